"""How interventions on one layer act together in the running text: edits of rotation, scores and results."""
