"""circuitsvis widgets."""
