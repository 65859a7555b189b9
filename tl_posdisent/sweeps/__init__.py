"""Sweeps: many calls by name, in a loop or on a dask cluster, with one stored table for each."""

from tl_posdisent.utils.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
