"""Many experiments over models, checkpoints, texts and seeds: what is to be done, who does it, and what is kept."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
