"""Sweeps of experiments over models, checkpoints, texts and seeds, with stored results."""

from tl_posdisent.utils.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
