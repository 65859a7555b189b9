"""Many experiments over models, checkpoints, texts and seeds: what is to be done, who does it, and what is kept."""
