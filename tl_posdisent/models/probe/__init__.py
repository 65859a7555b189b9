"""What a model's attention layers do, found by running the model."""
