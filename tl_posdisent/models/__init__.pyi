from .capture import (
    Captured as Captured,
)
from .capture import (
    capture as capture,
)
from .loading.load import (
    bridge_from_hf as bridge_from_hf,
)
from .loading.load import (
    hooked_from_hf as hooked_from_hf,
)
from .loading.load import (
    load_model as load_model,
)
from .loading.random_init import (
    random_control as random_control,
)
from .longer_context import (
    longer_context as longer_context,
)
from .reading.model_reading import (
    ModelReading as ModelReading,
)
from .reading.model_reading import (
    read_attention as read_attention,
)
from .reading.model_reading import (
    read_layers as read_layers,
)
from .reading.model_reading import (
    read_model as read_model,
)
from .reading.spec import (
    AttentionSpec as AttentionSpec,
)
