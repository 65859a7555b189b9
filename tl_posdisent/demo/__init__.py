"""The demo model: a small language model with rotary positions, its text and its training.

It has about a million parameters, loads without a network and runs on any machine, so that every analysis of
the package can be tried, shown and tested on a model that really uses position and content."""

from tl_posdisent.utils.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
