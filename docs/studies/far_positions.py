"""Do attention outputs leave their region at positions beyond the training length?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from beyond import TRAINED, applies
from shared.attention_outputs import compare, outputs, positions
from shared.rows import Row
from shared.texts import Source, parts

import tl_posdisent as tp

TEXTS, SHORT, COMPARED = 8, 512, 256  # texts and tokens at far positions


def rows(model: Any, source: Source) -> Iterator[Row]:
    """Attention outputs at the same tokens behind the same keys, in three steps of equal size away from these: two end
    within the training length, the last beyond it, there also with a ceiling on distances."""
    if not applies(model, source):
        return
    texts, step = parts(model, source, TEXTS, SHORT), (TRAINED - SHORT) // 2
    first, second, third = (positions(SHORT, COMPARED, n * step) for n in (1, 2, 3))
    ceiling = (third[:, None] - third).clamp(0, TRAINED - 1)
    near, edge, far = (outputs(model, texts, COMPARED, tp.swap_positions(model, p)) for p in (first, second, third))
    limited = outputs(model, texts, COMPARED, tp.remap_distance(model, ceiling))
    yield compare("within the training length", near, edge, SHORT)
    yield compare("beyond it", edge, far, SHORT)
    yield compare("beyond it, ceiling", edge, limited, SHORT)
