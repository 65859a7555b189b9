from .attention_scores.additivity import (
    additivity as additivity,
)
from .attention_scores.controlled_distance import (
    controlled_distance as controlled_distance,
)
from .attention_scores.controlled_distance import (
    dummy_distance_check as dummy_distance_check,
)
from .attention_scores.disentanglement import (
    disentanglement as disentanglement,
)
from .attention_scores.head_labels import (
    head_labels as head_labels,
)
from .attention_scores.head_preferences import (
    preference_flips as preference_flips,
)
from .attention_scores.positional_symbolic_plane import (
    positional_symbolic as positional_symbolic,
)
from .attention_scores.subspace_patterns import (
    subspace_patterns as subspace_patterns,
)
from .attention_scores.trained_vs_random import (
    trained_vs_random as trained_vs_random,
)
from .causal.additive_substitution import (
    additive_substitution as additive_substitution,
)
from .causal.attention_ladder import (
    attention_ladder as attention_ladder,
)
from .causal.attention_ladder import (
    head_verdicts as head_verdicts,
)
from .causal.head_ablation import (
    head_ablation as head_ablation,
)
from .causal.head_patching import (
    head_patching as head_patching,
)
from .causal.loss_attribution import (
    component_attribution as component_attribution,
)
from .causal.loss_attribution import (
    shapley_values as shapley_values,
)
from .causal.metrics import (
    LogitDifference as LogitDifference,
)
from .causal.metrics import (
    logit_difference as logit_difference,
)
from .causal.position_patching import (
    component_patching as component_patching,
)
from .causal.position_patching import (
    position_patching as position_patching,
)
from .causal.streaming import (
    streaming_ablation as streaming_ablation,
)
from .cost import (
    Estimate as Estimate,
)
from .cost import (
    estimate as estimate,
)
from .model_check import (
    check_model as check_model,
)
from .residual_stream.content_position import (
    ContentPosition as ContentPosition,
)
from .residual_stream.content_position import (
    content_position_terms as content_position_terms,
)
from .residual_stream.distance_sources import (
    DistanceSources as DistanceSources,
)
from .residual_stream.distance_sources import (
    distance_sources as distance_sources,
)
from .residual_stream.distance_sources import (
    distance_sources_check as distance_sources_check,
)
from .residual_stream.pair_profile import (
    pair_profile as pair_profile,
)
from .residual_stream.positional_subspace import (
    PositionalSubspace as PositionalSubspace,
)
from .residual_stream.positional_subspace import (
    positional_subspace as positional_subspace,
)
from .residual_stream.rope_hadamard import (
    RopeHadamard as RopeHadamard,
)
from .residual_stream.rope_hadamard import (
    rope_hadamard as rope_hadamard,
)
from .robustness.length_generalization import (
    length_generalization as length_generalization,
)
from .robustness.multiple_choice import (
    MultipleChoice as MultipleChoice,
)
from .robustness.multiple_choice import (
    choice_scores as choice_scores,
)
from .robustness.multiple_choice import (
    questions_from_text as questions_from_text,
)
from .robustness.output_projection import (
    output_projection as output_projection,
)
from .robustness.perturb import (
    Perturbed as Perturbed,
)
from .robustness.perturb import (
    perturb as perturb,
)
from .robustness.perturbation_curve import (
    perturbation_curve as perturbation_curve,
)
