"""Perturbed order and positions, and longer texts."""
