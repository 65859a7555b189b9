"""The additive model of attention scores: least-squares fit of a distance, a query and a key component. Tensors only.

Here belong the sets of cells (masks), marginal sums, solver, identifiability and results of such fits; nothing in this
folder knows what a model or a rotation is.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
