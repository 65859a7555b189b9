"""Rotary geometry, and what follows from it for attention scores at controlled distances. Tensors only, no models.

Here belong RoPE's rotation, the moments of queries and keys, the variance decomposition of scores, and what is said
subspace by subspace; the fit of scores that were observed is in ``additive``.
"""

from tl_posdisent.utils.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
