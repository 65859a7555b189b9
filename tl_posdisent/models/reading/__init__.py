"""Describe a model's attention layers from its configuration and modules."""
