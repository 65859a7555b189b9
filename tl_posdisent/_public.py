"""The public names, from wherever they are; ``tl_posdisent`` hands them on."""

from .demo.load import demo_text, demo_tokenizer, demo_tokens, load_demo_model
from .experiments.ablation import head_ablation
from .experiments.additivity import additivity
from .experiments.causal import additive_substitution, substitute_additive
from .experiments.chance import trained_vs_random
from .experiments.choice import MultipleChoice, choice_scores
from .experiments.content_position import ContentPosition, content_position_terms
from .experiments.controlled import controlled_distance, dummy_distance_check
from .experiments.dynamics import disentanglement
from .experiments.estimate import Estimate, estimate
from .experiments.hadamard import RopeHadamard, rope_hadamard
from .experiments.length import length_generalization
from .experiments.patched_heads import patch_heads
from .experiments.patching import patch_component, patch_positions
from .experiments.patterns import subspace_patterns
from .experiments.perturbation import perturbation_curve
from .experiments.plane import positional_symbolic
from .experiments.positional_subspace import PositionalSubspace, positional_subspace
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
from .maths.rotary import Rotary, from_complex, rotate, to_complex, unrotate
from .maths.rotary_table import rotary_from_table
from .maths.subspaces import SubspacePatterns, subspace_patterns_qk
from .maths.toeplitz import principal_angles, toeplitz_share
from .maths.variance import EFFECTS, VarianceShares, decompose
from .show.interventions import show_change, show_interventions
from .show.offline import Widget
from .show.plots.bars import plot_deposit, plot_shares, plot_substitution
from .show.plots.curves import plot_distance, plot_length, plot_perturbation
from .show.plots.heat import plot_heads, plot_subspaces
from .show.plots.training import plot_dynamics, plot_training
from .show.report.make import report
from .show.token_widgets import show_key_importance, show_query_bias
from .show.widgets import show_parts, show_patterns, show_scores
from .sweeps.jobs import Job, jobs
from .sweeps.marginals import marginals_by_layer, merge_additivity
from .sweeps.models import checkpoint_steps
from .sweeps.moments import merge_controlled_distance, merge_moments, moments_by_layer
from .sweeps.parts import failures
from .sweeps.sweep import sweep
from .sweeps.texts import Text
from .synthetic.checkpoints import load_checkpoint, save_checkpoint
from .synthetic.config import SyntheticConfig
from .synthetic.conversion import to_hooked_transformer
from .synthetic.deposit import DepositReport, deposit, deposit_spread, head_drops
from .synthetic.dynamics import dynamics
from .synthetic.gradients import gradient_margins, positional_gradients
from .synthetic.lookups import IndexLookup, Retrieval
from .synthetic.model import SyntheticModel
from .synthetic.presets import Preset, accuracies, preset, train_preset
from .synthetic.runs import TrainConfig, TrainRun
from .synthetic.sampling import Split, Task
from .synthetic.steps import evaluate
from .synthetic.study import DepositStudy, deposit_study
from .synthetic.tasks import TriggerCount, TriggerDistance
from .synthetic.training import TrainingInterrupted, train

__all__ = [
    "AdditiveFit",
    "AttentionSpec",
    "Captured",
    "ContentPosition",
    "DepositReport",
    "DepositStudy",
    "EFFECTS",
    "Estimate",
    "IndexLookup",
    "InteractionBound",
    "Job",
    "Moments",
    "MultipleChoice",
    "Perturbed",
    "Plane",
    "PositionalSubspace",
    "Preset",
    "Retrieval",
    "RopeCapacity",
    "RopeHadamard",
    "Rotary",
    "Split",
    "SubspacePatterns",
    "SubspaceShares",
    "SyntheticConfig",
    "SyntheticModel",
    "Task",
    "Text",
    "TrainConfig",
    "TrainRun",
    "TrainingInterrupted",
    "TriggerCount",
    "TriggerDistance",
    "VarianceShares",
    "Widget",
    "ablate_heads",
    "accuracies",
    "additive_substitution",
    "additivity",
    "applied",
    "bridge_from_hf",
    "capture",
    "checkpoint_steps",
    "choice_scores",
    "content_position_terms",
    "controlled_distance",
    "decompose",
    "demo_text",
    "demo_tokenizer",
    "demo_tokens",
    "deposit",
    "deposit_spread",
    "deposit_study",
    "disentanglement",
    "drop_component",
    "dummy_distance",
    "dummy_distance_check",
    "dynamics",
    "estimate",
    "evaluate",
    "failures",
    "fit_additive",
    "fit_additive_qk",
    "from_complex",
    "gradient_margins",
    "head_ablation",
    "head_drops",
    "hooked_from_hf",
    "interaction_bound",
    "interaction_by_subspace",
    "jobs",
    "lambda_mask",
    "length_generalization",
    "limit_frequencies",
    "load_checkpoint",
    "load_demo_model",
    "load_model",
    "longer_context",
    "marginals_by_layer",
    "merge_additivity",
    "merge_controlled_distance",
    "merge_moments",
    "moments_by_layer",
    "patch_component",
    "patch_heads",
    "patch_positions",
    "patch_scores",
    "patch_vectors",
    "perturb",
    "perturbation_curve",
    "phase_noise",
    "plot_deposit",
    "plot_distance",
    "plot_dynamics",
    "plot_heads",
    "plot_length",
    "plot_perturbation",
    "plot_shares",
    "plot_subspaces",
    "plot_substitution",
    "plot_training",
    "position_interpolation",
    "positional_gradients",
    "positional_subspace",
    "positional_symbolic",
    "positional_symbolic_qk",
    "preset",
    "principal_angles",
    "random_control",
    "read_attention",
    "read_layers",
    "remap_distance",
    "report",
    "rope_capacity",
    "rope_hadamard",
    "rotary_from_table",
    "rotate",
    "save_checkpoint",
    "score_correlation",
    "show_change",
    "show_interventions",
    "show_key_importance",
    "show_parts",
    "show_patterns",
    "show_query_bias",
    "show_scores",
    "subspace_patterns",
    "subspace_patterns_qk",
    "substitute_additive",
    "swap_positions",
    "sweep",
    "to_complex",
    "to_hooked_transformer",
    "toeplitz_share",
    "train",
    "train_preset",
    "trained_vs_random",
    "unrotate",
]
