"""Position and content in attention: is this head looking at *where* or at *what*?

Shapes, everywhere: scores are ``[*batch, query, key]``, logits before the softmax, scale included. A *distance* is
``query_pos - key_pos``. Queries and keys are meant *before* rotation and after any QK-norm:
``[*batch, pos, head, d_head]`` at a model. Heads are query heads unless a shape says ``kv``.

Names that a notebook uses are here; the rest is reached by subject: ``tl_posdisent.hooks``, ``.experiments``,
``.rope``, ``.models``, ``.synthetic``, ``.sweeps``, ``.viz``. All are listed in ``__init__.pyi``, and imported on
demand.
"""

from tl_posdisent.utils.lazy_names import attach

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = attach(__name__, __file__)
