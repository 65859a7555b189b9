"""Additive models of attention patterns, fitted by least Kullback-Leibler divergence. Tensors only."""
