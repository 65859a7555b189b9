from .jobs import (
    Job as Job,
)
from .jobs import (
    jobs as jobs,
)
from .merging import (
    marginals_by_layer as marginals_by_layer,
)
from .merging import (
    merge_additivity as merge_additivity,
)
from .merging import (
    merge_controlled_distance as merge_controlled_distance,
)
from .merging import (
    merge_moments as merge_moments,
)
from .merging import (
    moments_by_layer as moments_by_layer,
)
from .model_sources import (
    checkpoint_steps as checkpoint_steps,
)
from .runner import (
    sweep as sweep,
)
from .storage import (
    failures as failures,
)
from .text_sources import (
    Text as Text,
)
