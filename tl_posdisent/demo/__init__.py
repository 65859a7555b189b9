"""A small language model with rotary positions that comes with the package, its text, and how it was trained.

It has about a million parameters, loads without a network and runs on any machine, so that every analysis of
the package can be tried, shown and tested on a model that really uses position and content.
"""

from .demo_model import demo_hf_model, demo_text, demo_tokenizer, demo_tokens, load_demo_model

__all__ = ["demo_hf_model", "demo_text", "demo_tokenizer", "demo_tokens", "load_demo_model"]
