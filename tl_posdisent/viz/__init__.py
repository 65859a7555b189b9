"""Plotly figures and circuitsvis widgets of results; they are returned, never shown."""

from tl_posdisent.utils.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
