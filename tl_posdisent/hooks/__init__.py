"""Interventions on position and content, as lists of fwd_hooks."""

from tl_posdisent.utils.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
