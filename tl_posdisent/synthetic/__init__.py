"""Small models and tasks for experiments on position: what an encoding makes a transformer learn."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
