"""Rotary geometry and what follows from it. Tensors only."""
