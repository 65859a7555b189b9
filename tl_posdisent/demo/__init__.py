"""The demo model, its tokenizer and its text: a small language model with rotary positions.

It has about a million parameters, loads without a network and runs on any machine, so that every analysis of the
package can be tried, shown and tested on a model that uses position and content. ``examples/train_demo_model.py``
trained it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
