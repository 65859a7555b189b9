"""Read what a model's attention layers do by running it: forward passes, recorded hooks, and their description."""
