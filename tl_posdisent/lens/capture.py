"""Queries, keys and scores of a real run, one layer at a time.

The forward pass runs in a thread of its own and waits at each layer until the caller has done with what it was
given, so a loop over layers costs one pass and holds one layer, whatever the depth.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .attention import AttentionSpec, read_layers
from .probe import is_masked, score_tolerance
from .run import Hook, check_tokens, run

_ROWS_CHECKED = 32


@dataclass(frozen=True, repr=False)
class Captured:
    """What one layer computed. Tensors are the model's own, in its dtype: read them, do not write.

    Attributes:
        layer: its number.
        spec: what the layer does.
        q: ``[batch, pos, head, d_head]``, queries before rotation, after any QK-norm.
        k: ``[batch, pos, kv_head, d_head]``, keys likewise.
        q_rot, k_rot: the same after rotation.
        scores: ``[batch, head, query, key]``, logits before the softmax, scale and soft cap included; outside the
            mask (``spec.mask(length)``) they may hold anything.
    """

    layer: int
    spec: AttentionSpec
    q: Float[Tensor, "batch pos head d_head"] | None
    k: Float[Tensor, "batch pos kv d_head"] | None
    q_rot: Float[Tensor, "batch pos head d_head"] | None
    k_rot: Float[Tensor, "batch pos kv d_head"] | None
    scores: Float[Tensor, "batch head query key"] | None

    def __repr__(self) -> str:
        held = ", ".join(
            f"{name} {tuple(x.shape)}" for name, x in vars(self).items() if isinstance(x, Tensor)
        )
        return f"Captured(layer {self.layer}: {held})"


def capture(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | str,
    *,
    layers: Iterable[int] | None = None,
    scores: bool = True,
) -> Iterator[Captured]:
    """Run the model once and yield each layer's queries, keys and scores while it waits.

    Every layer is checked as it comes: scores recomputed from the queries, the keys and the rotation that was read
    from the model must equal the model's own, and must be masked where the mask says so.

    Args:
        model: HookedTransformer, TransformerBridge or alike.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer.
        layers: which layers, in the model's order; default all. Layers after the last are not run.
        scores: False leaves the score matrices out (and their memory).

    Yields:
        ``Captured``, one per layer. Do not keep them all unless they fit.

    Raises:
        ValueError: unusable tokens or layers; a layer whose scores cannot be recomputed from queries and keys
            (``additivity`` still fits those); scores that differ from the recomputed ones.

    Example:
        >>> from tl_posdisent import capture, demo_tokens, load_demo_model
        >>> for layer in capture(load_demo_model(), demo_tokens(length=32), layers=[0, 3]):
        ...     print(layer.layer, tuple(layer.q.shape), tuple(layer.scores.shape))
        0 (1, 32, 8, 16) (1, 8, 32, 32)
        3 (1, 32, 8, 16) (1, 8, 32, 32)
    """
    specs = read_layers(model, layers)
    tokens = check_tokens(model, tokens)
    for spec in specs:
        spec.require_scale()
    return stream(model, tokens, specs, scores=scores)


def stream(
    model: Any, tokens: Int[Tensor, "batch pos"], specs: list[AttentionSpec], *, scores: bool = True
) -> Iterator[Captured]:
    """``capture`` for layers already read; those whose scores cannot be recomputed give their scores alone."""
    specs = sorted(specs, key=lambda spec: spec.layer)
    box: queue.Queue[Captured | BaseException | None] = queue.Queue()
    resume = threading.Semaphore(0)
    stopped = threading.Event()

    def hand_over(captured: Captured) -> None:
        box.put(captured)
        del captured
        resume.acquire()
        if stopped.is_set():
            raise _Stopped

    def work() -> None:
        end: BaseException | None = None
        try:
            run(model, tokens, _hooks(specs, hand_over, scores), stop=specs[-1].layer + 1)
        except BaseException as error:  # whatever it is, the caller must hear of it
            end = None if isinstance(error, _Stopped) else error
        box.put(end)

    worker = threading.Thread(target=work, name="capture", daemon=True)
    worker.start()
    delivered = 0
    try:
        while isinstance(item := box.get(), Captured):
            delivered += 1
            yield item
            del item
            resume.release()
        if item is not None:
            raise item
        if delivered < len(specs):
            raise RuntimeError(f"only {delivered} of {len(specs)} layers were captured: their hooks did not fire")
    finally:  # also when the caller leaves its loop early, or is interrupted
        stopped.set()
        resume.release()
        worker.join()


class _Stopped(BaseException):
    """Unwinds the forward pass when nobody waits for more layers."""


def _hooks(specs: list[AttentionSpec], hand_over: Any, scores: bool) -> list[Hook]:
    """Listeners that collect one layer's tensors and hand them over when the last has come."""
    worker: list[int] = []
    held: dict[str, Tensor] = {}

    def listener(spec: AttentionSpec, name: str, last: bool) -> Hook:
        def listen(x: Tensor, hook: Any) -> None:
            # The caller may run the model between two layers: that pass is none of ours.
            if not worker:
                worker.append(threading.get_ident())
            if threading.get_ident() != worker[0]:
                return
            held[name] = x.detach()
            if last:
                captured = _gather(spec, held, scores)
                held.clear()
                hand_over(captured)

        return name, listen

    hooks = []
    for spec in specs:
        names = [tap.name for tap in (spec.q, spec.k) if tap] if spec.problem is None else []
        if spec.problem is None and spec.turn_q and spec.turn_k:
            names += [tap.name for tap in (spec.turn_q, spec.turn_k) if tap.name not in names]
        end = spec.scores or spec.pattern
        if end is None:
            raise ValueError(f"layer {spec.layer} of {spec.architecture}: {spec.problem}")
        hooks += [listener(spec, name, name == end) for name in [*names, end]]
    return hooks


def _gather(spec: AttentionSpec, held: dict[str, Tensor], scores: bool) -> Captured:
    seen = held[spec.scores] if spec.scores else None
    if spec.problem is not None or spec.q is None or spec.k is None:
        if seen is None:
            raise ValueError(f"layer {spec.layer} of {spec.architecture}: {spec.problem}")
        return Captured(spec.layer, spec, None, None, None, None, seen)
    q, k = (tap.read(held[tap.name]) for tap in (spec.q, spec.k))
    if spec.turn_q and spec.turn_k and spec.turn_q.name != spec.q.name and spec.turn_k.name != spec.k.name:
        q_rot, k_rot = (tap.read(held[tap.name]) for tap in (spec.turn_q, spec.turn_k))
    else:
        positions = torch.arange(q.shape[1], device=q.device)
        q_rot, k_rot = spec.rotated(q, positions), spec.rotated(k, positions)
    end = held[spec.scores] if spec.scores else held[spec.pattern or ""]
    _self_check(spec, q, k, end)
    if scores and seen is None:
        seen = spec.score(q_rot, k_rot)
    return Captured(spec.layer, spec, q, k, q_rot, k_rot, seen if scores else None)


def _self_check(spec: AttentionSpec, q: Tensor, k: Tensor, end: Tensor) -> None:
    """Recompute some rows of the scores (of the pattern, where the model shows only that) and compare."""
    length = q.shape[1]
    rows = torch.linspace(0, length - 1, min(length, _ROWS_CHECKED), device=q.device).round().long()
    positions = torch.arange(length, device=q.device)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    q_rot = spec.rotated(q[:, rows].to(wide), positions[rows])
    ours = spec.score(q_rot, spec.rotated(k.to(wide), positions))
    inside = spec.sees(positions[rows][:, None] - positions)
    theirs = end[:, :, rows]
    if spec.scores is None:
        ours = ours.masked_fill(~inside, -torch.inf).softmax(-1)
        masked = theirs == 0
    else:
        masked = is_masked(theirs)
    theirs = theirs.to(wide)
    if (spec.scores is not None and bool((masked & inside).any())) or bool((~masked & ~inside).any()):
        raise ValueError(
            f"layer {spec.layer} of {spec.architecture}: the model's mask is not the one that was read from it "
            f"({'causal' if spec.causal else 'full'}, window {spec.window}); padded or packed texts are not supported"
        )
    error = torch.where(inside, ours - theirs, 0.0).abs().amax()
    allowed = score_tolerance(end.dtype) * torch.where(inside, theirs, 0.0).abs().amax().clamp_min(1.0)
    if not bool(error <= allowed):
        raise ValueError(
            f"layer {spec.layer} of {spec.architecture}: scores recomputed from queries, keys and the rotation read "
            f"from the model differ from its own by {error.item():.1e}, where {allowed.item():.1e} is rounding; "
            "its positions or tables may have changed with the length (padding, dynamic scaling)"
        )
