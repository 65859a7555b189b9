"""Small models, tasks and training for experiments on position encodings."""

from tl_posdisent.utils.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
