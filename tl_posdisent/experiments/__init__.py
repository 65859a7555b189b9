"""Experiments on a model and a text; each returns a pandas table."""

from tl_posdisent.utils.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
