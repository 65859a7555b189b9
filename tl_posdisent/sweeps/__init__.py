"""Sweeps of experiments over models, checkpoints, texts and seeds, with stored results."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
