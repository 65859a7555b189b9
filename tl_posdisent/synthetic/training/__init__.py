"""Training of synthetic models."""
