"""Reading, loading and running TransformerLens models, without changing or subclassing them."""

from tl_posdisent.utils.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
