"""Position and content in attention: is this head looking at *where* or at *what*?

Shapes, everywhere: scores are ``[*batch, query, key]``, logits before the softmax, scale included. A *distance* is
``query_pos - key_pos``. Queries and keys are meant *before* rotation and after any QK-norm:
``[*batch, pos, head, d_head]`` at a model. Heads are query heads unless a shape says ``kv``.
"""

from .demo.load import demo_text, demo_tokenizer, demo_tokens, load_demo_model
from .experiments.additivity import additivity
from .lens.applied import applied
from .lens.attention import AttentionSpec, read_attention, read_layers
from .lens.capture import Captured, capture
from .lens.control import random_control
from .lens.loading import bridge_from_hf, hooked_from_hf, load_model
from .lens.positions import dummy_distance, remap_distance, swap_positions
from .maths.additive import fit_additive
from .maths.additive_fit import AdditiveFit
from .maths.correlation import score_correlation
from .maths.linear import fit_additive_qk
from .maths.rotary import Rotary, from_complex, rotary_from_table, rotate, to_complex, unrotate

__version__ = "0.1.0"

__all__ = [
    "AdditiveFit",
    "AttentionSpec",
    "Captured",
    "Rotary",
    "additivity",
    "applied",
    "bridge_from_hf",
    "capture",
    "demo_text",
    "demo_tokenizer",
    "demo_tokens",
    "dummy_distance",
    "fit_additive",
    "fit_additive_qk",
    "from_complex",
    "hooked_from_hf",
    "load_demo_model",
    "load_model",
    "random_control",
    "read_attention",
    "read_layers",
    "remap_distance",
    "rotary_from_table",
    "rotate",
    "score_correlation",
    "swap_positions",
    "to_complex",
    "unrotate",
]
