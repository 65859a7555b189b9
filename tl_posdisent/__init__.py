"""Position and content in attention: is this head looking at *where* or at *what*?

Shapes, everywhere: scores are ``[*batch, query, key]``, logits before the softmax, scale included. A *distance* is
``query_pos - key_pos``. Queries and keys are meant *before* rotation and after any QK-norm:
``[*batch, pos, head, d_head]`` at a model. Heads are query heads unless a shape says ``kv``.
"""

from .demo.load import demo_text, demo_tokenizer, demo_tokens, load_demo_model
from .experiments.additivity import additivity
from .experiments.chance import trained_vs_random
from .experiments.controlled import controlled_distance, dummy_distance_check
from .experiments.patterns import subspace_patterns
from .experiments.plane import positional_symbolic
from .lens.applied import applied
from .lens.attention import AttentionSpec, read_attention, read_layers
from .lens.capture import Captured, capture
from .lens.control import random_control
from .lens.loading import bridge_from_hf, hooked_from_hf, load_model
from .lens.positions import dummy_distance, remap_distance, swap_positions
from .maths.additive import fit_additive
from .maths.additive_fit import AdditiveFit
from .maths.bound import InteractionBound, interaction_bound
from .maths.capacity import RopeCapacity, rope_capacity
from .maths.correlation import score_correlation
from .maths.interactions import SubspaceShares, interaction_by_subspace
from .maths.linear import fit_additive_qk
from .maths.moments import Moments
from .maths.plane import Plane, positional_symbolic_qk
from .maths.rotary import Rotary, from_complex, rotary_from_table, rotate, to_complex, unrotate
from .maths.subspaces import SubspacePatterns, subspace_patterns_qk
from .maths.variance import EFFECTS, VarianceShares, decompose

__version__ = "0.1.0"

__all__ = [
    "AdditiveFit",
    "AttentionSpec",
    "Captured",
    "EFFECTS",
    "InteractionBound",
    "Moments",
    "Plane",
    "RopeCapacity",
    "Rotary",
    "SubspacePatterns",
    "SubspaceShares",
    "VarianceShares",
    "additivity",
    "applied",
    "bridge_from_hf",
    "capture",
    "controlled_distance",
    "decompose",
    "demo_text",
    "demo_tokenizer",
    "demo_tokens",
    "dummy_distance",
    "dummy_distance_check",
    "fit_additive",
    "fit_additive_qk",
    "from_complex",
    "hooked_from_hf",
    "interaction_bound",
    "interaction_by_subspace",
    "load_demo_model",
    "load_model",
    "positional_symbolic",
    "positional_symbolic_qk",
    "random_control",
    "read_attention",
    "read_layers",
    "remap_distance",
    "rope_capacity",
    "rotary_from_table",
    "rotate",
    "score_correlation",
    "subspace_patterns",
    "subspace_patterns_qk",
    "swap_positions",
    "to_complex",
    "trained_vs_random",
    "unrotate",
]
