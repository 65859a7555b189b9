"""Analysis of trained synthetic models: positional deposit, gradients and training dynamics."""
