"""Rotary geometry, and its consequences for attention scores at controlled distances. Tensors only, no models.

This folder holds RoPE's rotation, the moments of queries and keys, the variance decomposition of scores, and measures
of single subspaces. The fit of observed scores is in ``additive``.
"""

from tl_posdisent.utils.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
