"""How much attention do heads need: their own in a window, or static attention?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shared.rows import Row, losses, row
from shared.texts import Source, how_many, parts, repeated
from torch import Tensor

import tl_posdisent as tp

LENGTH = 256
FITTED, HELD_OUT = 8, 4
WINDOWS = (8, 32)


def rows(model: Any, source: Source) -> Iterator[Row]:
    """The share of attention that is kept where all heads are replaced at once, of the loss between mean outputs and
    the model itself: the heads' own attention in a window of the last keys and the first token, also on the second copy
    of a passage; and static attention, predicted for other texts."""
    n = how_many(model, source, HELD_OUT)
    texts = parts(model, source, n + (FITTED // 2 if source == "demo" else FITTED), LENGTH)
    heldout, fitted = texts[:n], texts[n:]
    copied = repeated(heldout)
    for kind, measured, first in (("", heldout, 1), (", second copy of a passage", copied, copied.shape[1] // 2 + 2)):
        base, mean = losses(model, measured, first=first), losses(model, measured, ablated(model, fitted), first)
        yield row(f"loss, mean outputs{kind}", mean, measured.shape[1], "ablate_heads(model, None, reference=fitted)")
        for window in WINDOWS:
            hooks = tp.lambda_mask(model, 1, window, LENGTH)
            share = (mean - losses(model, measured, hooks, first)) / (mean - base)
            name = f"attention kept, own in a window of {window} and the first token{kind}"
            yield row(name, share, measured.shape[1], f"lambda_mask(model, 1, {window}, {LENGTH})")
    options: dict[str, Any] = {"unit": "all", "rungs": ["static"], "controls": [], "progress": False}
    table = tp.attention_ladder(model, fitted, heldout=heldout, **options).set_index("rung")
    value, error, blocks = table.loc["static", ["recovered_mean", "se_mean", "blocks"]]
    call = f'attention_ladder(model, fitted, heldout=texts, unit="all"), {len(fitted)} fitted'
    yield Row("attention kept, static, fitted to other texts", value, error, f"{int(blocks)} blocks", LENGTH, call)


def ablated(model: Any, reference: Tensor) -> Any:
    return tp.ablate_heads(model, None, mode="mean", reference=reference)
