"""The public names, from wherever they are; ``tl_posdisent`` hands them on."""

from tl_posdisent.additive.fit import fit_additive
from tl_posdisent.additive.from_qk import fit_additive_qk
from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.additive.score_correlation import score_correlation
from tl_posdisent.demo.demo_model import demo_text, demo_tokenizer, demo_tokens, load_demo_model
from tl_posdisent.experiments.attention_scores.additivity import additivity
from tl_posdisent.experiments.attention_scores.controlled_distance import controlled_distance, dummy_distance_check
from tl_posdisent.experiments.attention_scores.disentanglement import disentanglement
from tl_posdisent.experiments.attention_scores.positional_symbolic_plane import positional_symbolic
from tl_posdisent.experiments.attention_scores.subspace_patterns import subspace_patterns
from tl_posdisent.experiments.attention_scores.trained_vs_random import trained_vs_random
from tl_posdisent.experiments.causal.additive_substitution import additive_substitution, substitute_additive
from tl_posdisent.experiments.causal.head_ablation import head_ablation
from tl_posdisent.experiments.causal.head_patching import patch_heads
from tl_posdisent.experiments.causal.position_patching import patch_component, patch_positions
from tl_posdisent.experiments.cost import Estimate, estimate
from tl_posdisent.experiments.residual_stream.content_position import ContentPosition, content_position_terms
from tl_posdisent.experiments.residual_stream.positional_subspace import PositionalSubspace, positional_subspace
from tl_posdisent.experiments.residual_stream.rope_hadamard import RopeHadamard, rope_hadamard
from tl_posdisent.experiments.robustness.length_generalization import length_generalization
from tl_posdisent.experiments.robustness.multiple_choice import MultipleChoice, choice_scores
from tl_posdisent.experiments.robustness.perturb import Perturbed, perturb
from tl_posdisent.experiments.robustness.perturbation_curve import perturbation_curve
from tl_posdisent.hooks.ablate import ablate_heads
from tl_posdisent.hooks.applied import applied
from tl_posdisent.hooks.frequencies import limit_frequencies
from tl_posdisent.hooks.length_extension import lambda_mask, position_interpolation
from tl_posdisent.hooks.patch import patch_scores, patch_vectors
from tl_posdisent.hooks.phase_noise import phase_noise
from tl_posdisent.hooks.positions import dummy_distance, remap_distance, swap_positions
from tl_posdisent.hooks.score_components import drop_component
from tl_posdisent.models.capture import Captured, capture
from tl_posdisent.models.loading.load import bridge_from_hf, hooked_from_hf, load_model
from tl_posdisent.models.loading.random_init import random_control
from tl_posdisent.models.longer_context import longer_context
from tl_posdisent.models.spec import AttentionSpec, read_attention, read_layers
from tl_posdisent.report.build import report
from tl_posdisent.rope.capacity import RopeCapacity, rope_capacity
from tl_posdisent.rope.moments import Moments
from tl_posdisent.rope.positional_symbolic import Plane, positional_symbolic_qk
from tl_posdisent.rope.rotary import Rotary, from_complex, rotary_from_table, rotate, to_complex, unrotate
from tl_posdisent.rope.subspace_interactions import (
    InteractionBound,
    SubspaceShares,
    interaction_bound,
    interaction_by_subspace,
)
from tl_posdisent.rope.subspaces import SubspacePatterns, subspace_patterns_qk
from tl_posdisent.rope.toeplitz import principal_angles, toeplitz_share
from tl_posdisent.rope.variance_decomposition import EFFECTS, VarianceShares, decompose
from tl_posdisent.sweeps.merging import (
    marginals_by_layer,
    merge_additivity,
    merge_controlled_distance,
    merge_moments,
    moments_by_layer,
)
from tl_posdisent.sweeps.model_sources import checkpoint_steps
from tl_posdisent.sweeps.runner import sweep
from tl_posdisent.sweeps.storage import failures
from tl_posdisent.sweeps.text_sources import Text
from tl_posdisent.synthetic.analysis.deposit import DepositReport, deposit, deposit_spread, head_drops
from tl_posdisent.synthetic.analysis.deposit_study import DepositStudy, deposit_study
from tl_posdisent.synthetic.analysis.gradients import gradient_margins, positional_gradients
from tl_posdisent.synthetic.analysis.training_dynamics import dynamics
from tl_posdisent.synthetic.model.config import SyntheticConfig
from tl_posdisent.synthetic.model.to_hooked import to_hooked_transformer
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.tasks.lookups import IndexLookup, Retrieval
from tl_posdisent.synthetic.tasks.sampling import Split, Task
from tl_posdisent.synthetic.tasks.triggers import TriggerCount, TriggerDistance
from tl_posdisent.synthetic.training.checkpoints import load_checkpoint, save_checkpoint
from tl_posdisent.synthetic.training.presets import Preset, accuracies, preset, train_preset
from tl_posdisent.synthetic.training.runs import TrainConfig, TrainRun
from tl_posdisent.synthetic.training.steps import evaluate
from tl_posdisent.synthetic.training.train import TrainingInterrupted, train
from tl_posdisent.viz.plots.bars import plot_deposit, plot_shares, plot_substitution
from tl_posdisent.viz.plots.curves import plot_distance, plot_length, plot_perturbation
from tl_posdisent.viz.plots.heatmaps import plot_heads, plot_subspaces
from tl_posdisent.viz.plots.training_curves import plot_dynamics, plot_training
from tl_posdisent.viz.widgets.interventions import show_change, show_interventions
from tl_posdisent.viz.widgets.offline import Widget
from tl_posdisent.viz.widgets.score_matrices import show_parts, show_patterns, show_scores
from tl_posdisent.viz.widgets.token_colours import show_key_importance, show_query_bias

from .sweeps.jobs import Job, jobs

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
