"""Plotly figures and circuitsvis widgets of results; they are returned, never shown."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
