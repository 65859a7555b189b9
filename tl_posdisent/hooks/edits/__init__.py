"""Edits of heads, and how the edits of a layer are carried out in a forward pass."""
