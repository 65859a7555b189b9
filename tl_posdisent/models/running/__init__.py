"""Run a model: its parts, its texts, forward passes with hooks, and passes that reuse earlier ones."""
