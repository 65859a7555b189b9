"""The additive model of the attention pattern that is nearest to it in divergence. Tensors only."""
