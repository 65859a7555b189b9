from .capacity import (
    RopeCapacity as RopeCapacity,
)
from .capacity import (
    rope_capacity as rope_capacity,
)
from .moments import (
    Moments as Moments,
)
from .positional_symbolic import (
    Plane as Plane,
)
from .positional_symbolic import (
    positional_symbolic_qk as positional_symbolic_qk,
)
from .preference_flips import (
    PreferenceFlips as PreferenceFlips,
)
from .preference_flips import (
    flip_probability as flip_probability,
)
from .preference_flips import (
    preference_flips_qk as preference_flips_qk,
)
from .rotary import (
    Rotary as Rotary,
)
from .rotary import (
    from_complex as from_complex,
)
from .rotary import (
    rotary_from_table as rotary_from_table,
)
from .rotary import (
    rotate as rotate,
)
from .rotary import (
    to_complex as to_complex,
)
from .rotary import (
    unrotate as unrotate,
)
from .subspace_interactions import (
    InteractionBound as InteractionBound,
)
from .subspace_interactions import (
    SubspaceShares as SubspaceShares,
)
from .subspace_interactions import (
    interaction_bound as interaction_bound,
)
from .subspace_interactions import (
    interaction_by_subspace as interaction_by_subspace,
)
from .subspaces import (
    SubspacePatterns as SubspacePatterns,
)
from .subspaces import (
    subspace_patterns_qk as subspace_patterns_qk,
)
from .toeplitz import (
    principal_angles as principal_angles,
)
from .toeplitz import (
    toeplitz_share as toeplitz_share,
)
from .variance_decomposition import (
    COMPONENTS as COMPONENTS,
)
from .variance_decomposition import (
    VarianceShares as VarianceShares,
)
from .variance_decomposition import (
    decompose as decompose,
)
