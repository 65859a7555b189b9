from . import (
    additive as additive,
)
from . import (
    demo as demo,
)
from . import (
    experiments as experiments,
)
from . import (
    hooks as hooks,
)
from . import (
    models as models,
)
from . import (
    rope as rope,
)
from . import (
    sweeps as sweeps,
)
from . import (
    synthetic as synthetic,
)
from . import (
    viz as viz,
)
from .additive.attention.fit import (
    fit_attention as fit_attention,
)
from .additive.fit import (
    fit_additive as fit_additive,
)
from .additive.fit_from_qk import (
    fit_additive_qk as fit_additive_qk,
)
from .additive.result import (
    AdditiveFit as AdditiveFit,
)
from .demo.demo_model import (
    demo_text as demo_text,
)
from .demo.demo_model import (
    demo_tokens as demo_tokens,
)
from .demo.demo_model import (
    load_demo_model as load_demo_model,
)
from .experiments.attention_scores.additivity import (
    additivity as additivity,
)
from .experiments.attention_scores.controlled_distance import (
    controlled_distance as controlled_distance,
)
from .experiments.attention_scores.disentanglement import (
    disentanglement as disentanglement,
)
from .experiments.attention_scores.head_labels import (
    head_labels as head_labels,
)
from .experiments.attention_scores.head_preferences import (
    preference_flips as preference_flips,
)
from .experiments.attention_scores.positional_symbolic_plane import (
    positional_symbolic as positional_symbolic,
)
from .experiments.attention_scores.subspace_patterns import (
    subspace_patterns as subspace_patterns,
)
from .experiments.attention_scores.trained_vs_random import (
    trained_vs_random as trained_vs_random,
)
from .experiments.causal.additive_substitution import (
    additive_substitution as additive_substitution,
)
from .experiments.causal.attention_ladder import (
    attention_ladder as attention_ladder,
)
from .experiments.causal.attention_ladder import (
    head_verdicts as head_verdicts,
)
from .experiments.causal.head_ablation import (
    head_ablation as head_ablation,
)
from .experiments.causal.head_patching import (
    head_patching as head_patching,
)
from .experiments.causal.metrics import (
    logit_difference as logit_difference,
)
from .experiments.causal.position_patching import (
    component_patching as component_patching,
)
from .experiments.causal.position_patching import (
    position_patching as position_patching,
)
from .experiments.cost import (
    estimate as estimate,
)
from .experiments.model_check import (
    check_model as check_model,
)
from .experiments.residual_stream.distance_sources import (
    distance_sources as distance_sources,
)
from .experiments.robustness.length_generalization import (
    length_generalization as length_generalization,
)
from .experiments.robustness.perturbation_curve import (
    perturbation_curve as perturbation_curve,
)
from .hooks.ablate import (
    ablate_heads as ablate_heads,
)
from .hooks.frequencies import (
    limit_frequencies as limit_frequencies,
)
from .hooks.length_extension import (
    lambda_mask as lambda_mask,
)
from .hooks.length_extension import (
    position_interpolation as position_interpolation,
)
from .hooks.positions import (
    dummy_distance as dummy_distance,
)
from .hooks.positions import (
    remap_distance as remap_distance,
)
from .hooks.positions import (
    swap_positions as swap_positions,
)
from .models.capture import (
    capture as capture,
)
from .models.loading.load import (
    bridge_from_hf as bridge_from_hf,
)
from .models.loading.load import (
    hooked_from_hf as hooked_from_hf,
)
from .models.loading.load import (
    load_model as load_model,
)
from .models.loading.random_init import (
    random_control as random_control,
)
from .models.longer_context import (
    longer_context as longer_context,
)
from .models.reading.model_reading import (
    read_attention as read_attention,
)
from .models.reading.model_reading import (
    read_model as read_model,
)
from .report.build import (
    report as report,
)
from .viz.plots.bars import (
    plot_shares as plot_shares,
)
from .viz.plots.curves import (
    plot_distance as plot_distance,
)
from .viz.plots.heatmaps import (
    plot_heads as plot_heads,
)
from .viz.widgets.interventions import (
    show_interventions as show_interventions,
)
from .viz.widgets.score_matrices import (
    show_parts as show_parts,
)
from .viz.widgets.score_matrices import (
    show_patterns as show_patterns,
)
from .viz.widgets.score_matrices import (
    show_scores as show_scores,
)

__version__: str
