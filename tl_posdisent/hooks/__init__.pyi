from .ablate import (
    ablate_heads as ablate_heads,
)
from .applied import (
    applied as applied,
)
from .frequencies import (
    limit_frequencies as limit_frequencies,
)
from .frequencies import (
    phase_noise as phase_noise,
)
from .length_extension import (
    lambda_mask as lambda_mask,
)
from .length_extension import (
    position_interpolation as position_interpolation,
)
from .patch import (
    patch_scores as patch_scores,
)
from .patch import (
    patch_vectors as patch_vectors,
)
from .positions import (
    dummy_distance as dummy_distance,
)
from .positions import (
    remap_distance as remap_distance,
)
from .positions import (
    swap_positions as swap_positions,
)
from .score_components import (
    drop_component as drop_component,
)
from .substitute import (
    substitute_additive as substitute_additive,
)
from .substitute_attention import (
    fit_attention_layers as fit_attention_layers,
)
from .substitute_attention import (
    substitute_attention as substitute_attention,
)
