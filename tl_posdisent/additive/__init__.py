"""The additive model of attention scores: least-squares fit of a distance, a query and a key component. Tensors only.

This folder holds the sets of cells (masks), marginal sums, the solver, identifiability, and the results of such fits.
It does not depend on models or rotations.
"""

from tl_posdisent.utils.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
