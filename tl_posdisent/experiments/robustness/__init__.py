"""Robustness to perturbed order and positions, and length generalization."""
