"""The additive model of attention scores: least-squares fit of a distance, a query and a key component. Tensors only.

Here belong the sets of cells (masks), marginal sums, solver, identifiability and results of such fits; nothing in this
folder knows what a model or a rotation is.
"""

from tl_posdisent.utils.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
