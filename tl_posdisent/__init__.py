"""Position and content in attention: is this head looking at *where* or at *what*?

Shapes, everywhere: scores are ``[*batch, query, key]``, logits before the softmax, scale included. A *distance* is
``query_pos - key_pos``. Queries and keys are meant *before* rotation and after any QK-norm:
``[*batch, pos, head, d_head]`` at a model. Heads are query heads unless a shape says ``kv``.
"""

from .demo.load import demo_text, demo_tokenizer, demo_tokens, load_demo_model
from .experiments.ablation import head_ablation
from .experiments.additivity import additivity
from .experiments.causal import additive_substitution, substitute_additive
from .experiments.chance import trained_vs_random
from .experiments.choice import MultipleChoice, choice_scores
from .experiments.controlled import controlled_distance, dummy_distance_check
from .experiments.length import length_generalization
from .experiments.patched_heads import patch_heads
from .experiments.patching import patch_component, patch_positions
from .experiments.patterns import subspace_patterns
from .experiments.perturbation import perturbation_curve
from .experiments.plane import positional_symbolic
from .experiments.scramble import Perturbed, perturb
from .lens.ablation import ablate_heads
from .lens.applied import applied
from .lens.attention import AttentionSpec, read_attention, read_layers
from .lens.capture import Captured, capture
from .lens.components import drop_component
from .lens.control import random_control
from .lens.frequencies import limit_frequencies
from .lens.loading import bridge_from_hf, hooked_from_hf, load_model
from .lens.longer import longer_context
from .lens.patching import patch_scores, patch_vectors
from .lens.phase import phase_noise
from .lens.positions import dummy_distance, remap_distance, swap_positions
from .lens.windows import lambda_mask, position_interpolation
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
from .synthetic.checkpoints import load_checkpoint, save_checkpoint
from .synthetic.config import SyntheticConfig
from .synthetic.conversion import to_hooked_transformer
from .synthetic.lookups import IndexLookup, Retrieval
from .synthetic.model import SyntheticModel
from .synthetic.presets import Preset, accuracies, preset, train_preset
from .synthetic.runs import TrainConfig, TrainRun
from .synthetic.sampling import Split, Task
from .synthetic.steps import evaluate
from .synthetic.tasks import TriggerCount, TriggerDistance
from .synthetic.training import TrainingInterrupted, train

__version__ = "0.1.0"

__all__ = [
    "AdditiveFit",
    "AttentionSpec",
    "Captured",
    "EFFECTS",
    "IndexLookup",
    "InteractionBound",
    "Moments",
    "MultipleChoice",
    "Perturbed",
    "Plane",
    "Preset",
    "Retrieval",
    "RopeCapacity",
    "Rotary",
    "Split",
    "SubspacePatterns",
    "SubspaceShares",
    "SyntheticConfig",
    "SyntheticModel",
    "Task",
    "TrainConfig",
    "TrainRun",
    "TrainingInterrupted",
    "TriggerCount",
    "TriggerDistance",
    "VarianceShares",
    "ablate_heads",
    "accuracies",
    "additive_substitution",
    "additivity",
    "applied",
    "bridge_from_hf",
    "capture",
    "choice_scores",
    "controlled_distance",
    "decompose",
    "demo_text",
    "demo_tokenizer",
    "demo_tokens",
    "drop_component",
    "dummy_distance",
    "dummy_distance_check",
    "evaluate",
    "fit_additive",
    "fit_additive_qk",
    "from_complex",
    "head_ablation",
    "hooked_from_hf",
    "interaction_bound",
    "interaction_by_subspace",
    "lambda_mask",
    "length_generalization",
    "limit_frequencies",
    "load_checkpoint",
    "load_demo_model",
    "load_model",
    "longer_context",
    "patch_component",
    "patch_heads",
    "patch_positions",
    "patch_scores",
    "patch_vectors",
    "perturb",
    "perturbation_curve",
    "phase_noise",
    "position_interpolation",
    "positional_symbolic",
    "positional_symbolic_qk",
    "preset",
    "random_control",
    "read_attention",
    "read_layers",
    "remap_distance",
    "rope_capacity",
    "rotary_from_table",
    "rotate",
    "save_checkpoint",
    "score_correlation",
    "subspace_patterns",
    "subspace_patterns_qk",
    "substitute_additive",
    "swap_positions",
    "to_complex",
    "to_hooked_transformer",
    "train",
    "train_preset",
    "trained_vs_random",
    "unrotate",
]
