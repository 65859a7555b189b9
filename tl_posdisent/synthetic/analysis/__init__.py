"""Analysis of positional work in trained synthetic models."""
