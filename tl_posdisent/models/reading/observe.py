"""Record what fires in attention layers during one forward pass, and measure how well an explanation fits it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tl_posdisent.models.reading.forward import Hook, hook_name, hook_points, run
from tl_posdisent.models.reading.spec import AttentionSpec, Tap, masked_below

_LISTEN = (
    *("hook_q", "hook_k", "hook_v", "hook_q_normed", "hook_k_normed", "hook_rot_q", "hook_rot_k"),
    *("hook_cos", "hook_sin", "hook_attn_scores", "hook_pattern", "hook_z"),
)

Seen = dict[str, Tensor]
"""What fired in one layer during one pass, by short hook name."""


def listen(
    model: Any, tokens: Tensor, layers: Sequence[int], edits: Sequence[Hook] = (), **more: Any
) -> dict[int, Seen]:
    """One forward pass, with edits if there are any: what fired in each of the layers, after the edits.

    ``more`` are arguments of the pass.
    """
    seen: dict[int, Seen] = {layer: {} for layer in layers}
    there = hook_points(model)
    recorders = [
        (name, partial(_record, seen[layer], short))
        for layer in layers
        for short in _LISTEN
        if (name := hook_name(layer, short)) in there
    ]
    run(model, tokens, [*edits, *recorders], stop=max(layers) + 1, **more)
    return seen


def _record(seen: Seen, short: str, x: Any, hook: Any) -> None:
    if isinstance(x, Tensor):
        seen[short] = x.detach().clone()


def spread_rows(n: int, at_most: int, device: torch.device | None = None) -> Int[Tensor, "row"]:
    """Some of n rows all over a matrix, first and last included; in float64, which rounds no index of a long text."""
    rows: Tensor = torch.linspace(0, n - 1, min(n, at_most), dtype=torch.float64).round().long()
    return rows.to(device)


def shows_scores(seen: Seen) -> bool:
    """Whether the hook of the scores carries them: in some classes it carries the pattern."""
    scores, pattern = seen.get("hook_attn_scores"), seen.get("hook_pattern")
    return scores is not None and not (pattern is not None and torch.equal(scores, pattern))


def visible_cells(seen: Seen) -> Bool[Tensor, "query key"] | None:
    """Cells that any head of any text attends to: the probe's own look at the mask, never used for a fit.

    From the scores where they are shown, since a sharp softmax leaves zeros that no mask made.
    """
    scores, pattern = seen.get("hook_attn_scores"), seen.get("hook_pattern")
    attended = None if pattern is None else (pattern > 0).flatten(0, -3).any(0)
    if scores is None or not shows_scores(seen):
        return attended
    visible = (scores > masked_score(seen)).flatten(0, -3).any(0)
    if pattern is None or attended is None or torch.equal(visible, attended):
        return visible
    return visible if is_softmax(pattern, scores, visible) else attended  # some show scores without their mask


def is_softmax(pattern: Tensor, scores: Tensor, visible: Bool[Tensor, "query key"]) -> bool:
    """Whether the pattern is the softmax of these scores, up to what attention sinks take of a row."""
    wanted = scores.double().masked_fill(~visible, -torch.inf).softmax(-1)
    shared = pattern.double() / pattern.double().sum(-1, keepdim=True)
    return mismatch(shared.to(pattern.dtype), wanted) <= 1


def masked_score(seen: Seen) -> float:
    """The score at or below which a cell of this pass holds none."""
    return masked_below(*(seen[name].dtype for name in ("hook_attn_scores", "hook_q", "hook_v") if name in seen))


def is_mask(visible: Tensor | None, causal: bool, window: int | None) -> bool:
    """Whether these visible cells are what such a mask leaves."""
    if visible is None:
        return True
    layer = AttentionSpec(0, "", 1, 1, 1, causal, window)
    return torch.equal(visible, layer.mask(len(visible), visible.device))


def misfit(spec: AttentionSpec, q_rot: Tensor, k_rot: Tensor, seen: Seen, visible: Bool[Tensor, "query key"]) -> float:
    """Largest error of the scores (of the pattern, if that is all that fires) that rotated queries and keys predict.

    In units of what rounding explains: an explanation is acceptable up to 1.
    """
    predicted, dtype = spec.score(q_rot, k_rot), seen["hook_q"].dtype  # scores may be wider than what they are made of
    if spec.scores is not None:
        observed = seen["hook_attn_scores"]
        if predicted.shape == observed.shape:
            return mismatch(observed[..., visible], predicted[..., visible], dtype)
    elif "hook_pattern" in seen and seen["hook_pattern"].shape == predicted.shape:
        return mismatch(seen["hook_pattern"], predicted.masked_fill(~visible, -torch.inf).softmax(-1), dtype)
    return float("inf")


def mismatch(observed: Tensor, predicted: Tensor, dtype: torch.dtype | None = None) -> float:
    """Largest error in units of what rounding (of the observed or of a coarser dtype) explains."""
    if observed.numel() == 0:
        return 0.0
    error = (observed.double() - predicted.double()).abs().amax()
    allowed = score_tolerance(observed.dtype, dtype) * observed.double().abs().amax()
    return float(torch.where(error == 0, 0.0, error / allowed).nan_to_num(nan=torch.inf))


def score_tolerance(*dtypes: torch.dtype | None) -> float:
    """How nearly recomputed scores must agree, relative to the largest, if numbers of these dtypes went into them."""
    known = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2}  # rotation tables are float32 at best
    return max(known.get(dtype, 6e-2) for dtype in dtypes if dtype)


def short_name(tap: Tap) -> str:
    """The hook's name without layer: ``"hook_q"``."""
    return tap.name.rsplit(".", 1)[-1]
