"""Causal effects of heads, positions and parts of scores on the output."""
