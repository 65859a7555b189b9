"""Content and position in the residual stream."""
