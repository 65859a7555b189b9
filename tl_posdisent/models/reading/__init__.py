"""What a model's attention layers do, read by running it: forward passes, recorded hooks, and their description."""
