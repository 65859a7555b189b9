from .plots.bars import (
    plot_deposit as plot_deposit,
)
from .plots.bars import (
    plot_shares as plot_shares,
)
from .plots.bars import (
    plot_substitution as plot_substitution,
)
from .plots.curves import (
    plot_distance as plot_distance,
)
from .plots.curves import (
    plot_length as plot_length,
)
from .plots.curves import (
    plot_perturbation as plot_perturbation,
)
from .plots.heatmaps import (
    plot_distance_sources as plot_distance_sources,
)
from .plots.heatmaps import (
    plot_heads as plot_heads,
)
from .plots.heatmaps import (
    plot_subspaces as plot_subspaces,
)
from .plots.training_curves import (
    plot_dynamics as plot_dynamics,
)
from .plots.training_curves import (
    plot_training as plot_training,
)
from .plots.verdict_maps import (
    plot_verdicts as plot_verdicts,
)
from .widgets.interventions import (
    show_change as show_change,
)
from .widgets.interventions import (
    show_interventions as show_interventions,
)
from .widgets.offline import (
    Widget as Widget,
)
from .widgets.score_matrices import (
    show_parts as show_parts,
)
from .widgets.score_matrices import (
    show_patterns as show_patterns,
)
from .widgets.score_matrices import (
    show_scores as show_scores,
)
from .widgets.token_colours import (
    show_key_importance as show_key_importance,
)
from .widgets.token_colours import (
    show_query_bias as show_query_bias,
)
