"""Queries, keys and scores of a real run, one layer at a time.

The forward pass runs in a thread of its own and waits at each layer until the caller has done with what it was
given, so a loop over layers costs one pass and holds one layer, whatever the depth.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posdisent.models.probe.observe import is_masked, score_tolerance

from .forward import Hook, check_tokens, run
from .reading import read_layers
from .spec import AttentionSpec, Tap

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

    Example:
        >>> from tl_posdisent import capture, demo_tokens, load_demo_model
        >>> next(capture(load_demo_model(), demo_tokens(length=8), layers=[1], scores=False))
        Captured(layer 1: q (1, 8, 8, 16), k (1, 8, 4, 16), q_rot (1, 8, 8, 16), k_rot (1, 8, 4, 16))
    """

    layer: int
    spec: AttentionSpec
    q: Float[Tensor, "batch pos head d_head"] | None
    k: Float[Tensor, "batch pos kv d_head"] | None
    q_rot: Float[Tensor, "batch pos head d_head"] | None
    k_rot: Float[Tensor, "batch pos kv d_head"] | None
    scores: Float[Tensor, "batch head query key"] | None

    def __repr__(self) -> str:
        held = ", ".join(f"{name} {tuple(x.shape)}" for name, x in vars(self).items() if isinstance(x, Tensor))
        return f"Captured(layer {self.layer}: {held})"


def capture(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | str,
    *,
    layers: Iterable[int] | None = None,
    scores: bool = True,
) -> Generator[Captured, None, None]:
    """Run the model once and yield each layer's queries, keys and scores while it waits.

    Every layer is checked as it comes: scores recomputed from the queries, the keys and the rotation that was read
    from the model must equal the model's own, and must be masked where the mask says so.

    Args:
        model: HookedTransformer, TransformerBridge or alike. Dropout is off until the run has ended.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer.
        layers: which layers, in the model's order; default all. Layers after the last are not run.
        scores: False leaves the score matrices out (and their memory).

    Yields:
        ``Captured``, one per layer. Do not keep them all unless they fit. A loop that is left early ends the run; so
        does ``close()``, where the generator has a name of its own.

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
    if not isinstance(scores, bool):
        raise ValueError(f"scores must be True or False, got {scores!r}")
    specs = read_layers(model, layers)
    tokens = check_tokens(model, tokens)
    for spec in specs:
        spec.require_scale()
    return stream(model, tokens, specs, scores=scores)


def stream(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    specs: list[AttentionSpec],
    *,
    scores: bool = True,
    vectors: bool = True,
) -> Generator[Captured, None, None]:
    """``capture`` for layers already read.

    Without ``vectors``, and in layers whose scores cannot be recomputed, the scores come as they are, whatever hooks
    of the user's made them; only their mask is checked.
    """
    specs = sorted(specs, key=lambda spec: spec.layer)
    box: queue.Queue[Captured | BaseException | None] = queue.Queue()
    resume = threading.Semaphore(0)
    stopped, ended = threading.Event(), threading.Event()

    def hand_over(captured: Captured) -> None:
        box.put(captured)
        del captured
        resume.acquire()
        if stopped.is_set():
            raise _Stopped

    def work() -> None:
        end: BaseException | None = None
        try:
            if not stopped.is_set():
                run(model, tokens, _hooks(specs, hand_over, scores, vectors), stop=specs[-1].layer + 1)
        except BaseException as error:  # whatever it is, the caller must hear of it
            end = None if isinstance(error, _Stopped) else error
        finally:
            ended.set()
        box.put(end)

    worker = threading.Thread(target=work, name="capture", daemon=True)
    delivered = 0
    try:
        worker.start()  # Ctrl-C may come while it waits for the thread to begin
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
        if worker.ident is not None:  # it has begun; otherwise it finds that it is to stop, and leaves the model alone
            _wait(ended)


def _wait(ended: threading.Event) -> None:
    """Until the pass has ended, Ctrl-C or not: only then is the model as it was. Then it is Ctrl-C again."""
    pressed: KeyboardInterrupt | None = None
    while not ended.is_set():
        try:
            ended.wait()
        except KeyboardInterrupt as error:
            pressed = error
    if pressed is not None:
        raise pressed


class _Stopped(BaseException):
    """Unwinds the forward pass when nobody waits for more layers."""


def _hooks(specs: list[AttentionSpec], hand_over: Any, scores: bool, vectors: bool) -> list[Hook]:
    """Listeners that collect a layer's tensors in a pass of this thread, and hand them over when the last has come."""
    ours = threading.get_ident()
    held: dict[str, Tensor] = {}

    def listener(spec: AttentionSpec, name: str, names: list[str]) -> Hook:
        def listen(x: Tensor, hook: Any) -> None:
            if threading.get_ident() != ours:  # the caller runs the model between two layers
                return
            held[name] = x.detach()
            if name == names[-1]:
                captured = _gather(spec, held, scores) if len(names) > 1 else _alone(spec, held[name])
                held.clear()
                hand_over(captured)

        return name, listen

    hooks = []
    for spec in specs:
        end = spec.scores or spec.pattern
        if end is None or (spec.problem is not None and spec.scores is None):
            raise ValueError(f"layer {spec.layer} of {spec.architecture}: {spec.problem}")
        taps: list[Tap | None] = []
        if spec.problem is None and (vectors or spec.scores is None):
            taps = [spec.q, spec.k, spec.turn_q, spec.turn_k]
        names = [*dict.fromkeys(tap.name for tap in taps if tap), end]
        hooks += [listener(spec, name, names) for name in names]
    return hooks


def _alone(spec: AttentionSpec, seen: Tensor) -> Captured:
    """Scores without queries and keys."""
    _check_mask(spec, is_masked(seen[:, :, _rows(seen)]), _rows(seen), seen.shape[-1])
    return Captured(spec.layer, spec, None, None, None, None, seen)


def _gather(spec: AttentionSpec, held: dict[str, Tensor], scores: bool) -> Captured:
    assert spec.q
    assert spec.k
    q, k = (tap.read(held[tap.name]) for tap in (spec.q, spec.k))
    if spec.turn_q and spec.turn_k and spec.turn_q.name != spec.q.name and spec.turn_k.name != spec.k.name:
        q_rot, k_rot = (tap.read(held[tap.name]) for tap in (spec.turn_q, spec.turn_k))
    else:
        positions = torch.arange(q.shape[1], device=q.device)
        q_rot, k_rot = spec.rotated(q, positions), spec.rotated(k, positions)
    seen = held[spec.scores] if spec.scores else None
    _self_check(spec, q, k, seen, held.get(spec.pattern or ""))
    if scores and seen is None:
        seen = spec.score(q_rot, k_rot)
    return Captured(spec.layer, spec, q, k, q_rot, k_rot, seen if scores else None)


def _rows(cells: Tensor) -> Int[Tensor, "row"]:
    """Some rows all over the matrix, first and last included."""
    length = cells.shape[-2]
    return torch.linspace(0, length - 1, min(length, _ROWS_CHECKED), device=cells.device).round().long()


def _check_mask(spec: AttentionSpec, masked: Tensor, rows: Tensor, n_key: int) -> Bool[Tensor, "row key"]:
    """The cells inside the layer's mask in some rows; refuses a model that masks others."""
    inside = spec.sees(rows[:, None] - torch.arange(n_key, device=rows.device))
    if bool((masked == inside).any()):
        raise ValueError(
            f"layer {spec.layer} of {spec.architecture}: the model's mask is not the one that was read from it "
            f"({'causal' if spec.causal else 'full'}, window {spec.window}); padded or packed texts are not supported"
        )
    return inside


def _self_check(spec: AttentionSpec, q: Tensor, k: Tensor, scores: Tensor | None, pattern: Tensor | None) -> None:
    """Recompute some rows of the scores (of the pattern, where the model shows only that) and compare."""
    end = scores if scores is not None else pattern
    assert end is not None
    rows, positions = _rows(end), torch.arange(q.shape[1], device=q.device)
    theirs = end[:, :, rows]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    ours = spec.score(spec.rotated(q[:, rows].to(wide), rows), spec.rotated(k.to(wide), positions))
    if scores is not None:
        inside = _check_mask(spec, is_masked(theirs), rows, end.shape[-1])
    else:  # of a pattern that is 0 inside the mask it cannot be said whether it was masked
        inside = spec.sees(rows[:, None] - positions)
        _check_mask(spec, (theirs == 0) & ~inside, rows, end.shape[-1])
        ours = ours.masked_fill(~inside, -torch.inf).softmax(-1)
    theirs = theirs.to(wide)
    error = torch.where(inside, ours - theirs, 0.0).abs().amax()
    allowed = score_tolerance(end.dtype, q.dtype) * torch.where(inside, theirs, 0.0).abs().amax()
    if not bool(error <= allowed):
        raise ValueError(
            f"layer {spec.layer} of {spec.architecture}: scores recomputed from queries, keys and the rotation read "
            f"from the model differ from its own by {error.item():.1e}, where {allowed.item():.1e} is rounding; "
            "its positions or tables may have changed with the length (padding, dynamic scaling), or other hooks "
            "act on its attention"
        )
