"""Capture queries, keys and scores of a forward pass, one layer at a time.

``capture``, ``for_each_layer`` and ``for_each_scores`` call a function within the pass, once per layer, so all layers
take one pass and only one is in memory at a time. ``listen_vectors`` and ``listen_scores`` make hooks for runs under
interventions, which may have replaced the rotation tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posdisent.models.agreement import check_pattern, check_scores, checked_rows
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.reading.spec import AttentionSpec, most_limited
from tl_posdisent.models.running.forward_pass import Ended, Hook, running
from tl_posdisent.models.running.texts import Tokens, read_texts
from tl_posdisent.rope.rotary import rotate
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_flag, listed, shown

_Result = TypeVar("_Result")


@dataclass(frozen=True, repr=False)
class Captured:
    """Queries, keys and scores of one layer. The tensors are the model's own, in its dtype: do not write to them.

    Attributes:
        layer: index of the layer.
        spec: what the layer does (see ``read_model``).
        q: ``[batch, pos, head, d_head]``, queries before rotation, after any QK-norm.
        k: ``[batch, pos, kv_head, d_head]``, keys likewise.
        q_rot, k_rot: queries and keys after rotation.
        own_scores: the model's scores, if they were requested and the model shows them.
        scores: ``[batch, head, query, key]``, logits before the softmax, scale and soft cap included: the model's own,
            otherwise computed from ``q_rot`` and ``k_rot`` at first use. Values outside the mask
            (``spec.mask(length)``) are arbitrary.
    """

    layer: int
    spec: AttentionSpec
    q: Float[Tensor, "batch pos head d_head"]
    k: Float[Tensor, "batch pos kv d_head"]
    q_rot: Float[Tensor, "batch pos head d_head"]
    k_rot: Float[Tensor, "batch pos kv d_head"]
    own_scores: Float[Tensor, "batch head query key"] | None = None

    @cached_property
    def scores(self) -> Float[Tensor, "batch head query key"]:
        return self.spec.score(self.q_rot, self.k_rot) if self.own_scores is None else self.own_scores

    def __repr__(self) -> str:
        held = ", ".join(f"{name} {tuple(x.shape)}" for name, x in vars(self).items() if isinstance(x, Tensor))
        return f"Captured(layer {self.layer}: {held})"


def of_heads(x: Tensor, heads: Sequence[int], axis: int = 1) -> Tensor:
    """Select heads along an axis; all of them, in their order, are the tensor itself."""
    return x if [*heads] == [*range(x.shape[axis])] else x.index_select(axis, torch.tensor(heads, device=x.device))


def some_heads(layer: Captured, heads: Sequence[int]) -> Captured:
    """Select query heads of a layer, each with a key head of its own; all of them are the layer itself."""
    if [*heads] == [*range(layer.spec.n_heads)]:
        return layer
    keys = [layer.spec.key_head(head) for head in heads]
    q, q_rot = (of_heads(x, heads, 2) for x in (layer.q, layer.q_rot))
    k, k_rot = (of_heads(x, keys, 2) for x in (layer.k, layer.k_rot))
    own = layer.own_scores
    return replace(layer, q=q, k=k, q_rot=q_rot, k_rot=k_rot, own_scores=None if own is None else of_heads(own, heads))


@overload
def capture(
    model: Any,
    tokens: Tokens,
    function: None = None,
    *,
    layers: Layers = None,
    scores: bool = True,
    attention_mask: Int[Tensor, "batch pos"] | Bool[Tensor, "batch pos"] | None = None,
) -> list[Captured]: ...
@overload
def capture(
    model: Any,
    tokens: Tokens,
    function: Callable[[Captured], _Result],
    *,
    layers: Layers = None,
    scores: bool = True,
    attention_mask: Int[Tensor, "batch pos"] | Bool[Tensor, "batch pos"] | None = None,
) -> list[_Result]: ...
def capture(
    model: Any,
    tokens: Tokens,
    function: Callable[[Captured], Any] | None = None,
    *,
    layers: Layers = None,
    scores: bool = True,
    attention_mask: Int[Tensor, "batch pos"] | Bool[Tensor, "batch pos"] | None = None,
) -> list[Any]:
    """Run the model once and return each layer's queries, keys and scores, or what a function makes of them.

    Every layer is checked during the pass: scores recomputed from queries, keys and the rotation that was read must
    equal the model's own, and the same cells must be masked. The caller's hooks act on the pass.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``.
        tokens: ids ``[batch, pos]``, or text or texts if the model has a tokenizer; texts of equal length.
        function: called with each layer's ``Captured`` within the pass, so that only one layer is in memory at a time.
            By default the ``Captured`` of all layers are returned, all of them in memory. The function may run the
            model; an exception that it raises ends the pass.
        layers: layers to capture; default all with attention. Layers after the last of them are not run.
        scores: False omits the score matrices (and saves their memory).
        attention_mask: for padded ids, True at tokens. The padding is removed before the run.

    Returns:
        A list with one entry for each layer, in the model's order: what ``function`` returned, or the ``Captured``.

    Raises:
        ValueError: invalid tokens or layers; texts of unequal length, or longer than ``spec.limits.holds_to``; a layer
            whose scores cannot be recomputed from queries and keys (``additivity`` still fits those); scores that
            differ from the recomputed ones.

    Example:
        >>> from tl_posdisent import capture, demo_tokens, fit_additive, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> capture(model, tokens, layers=[0, 3], scores=False)[0]
        Captured(layer 0: q (1, 64, 8, 16), k (1, 64, 4, 16), q_rot (1, 64, 8, 16), k_rot (1, 64, 4, 16))
        >>> capture(model, tokens, lambda layer: tuple(layer.scores.shape), layers=[0, 3])
        [(1, 8, 64, 64), (1, 8, 64, 64)]
    """
    check_flag("scores", scores)
    if function is not None and not callable(function):
        raise ArgumentError("function", f"must be callable with a Captured, got {shown(function)}")
    layers = listed("layers", layers)
    reading = read_model(model)
    tokens = read_texts(reading.model, tokens, attention_mask).one_group("capture")
    specs, found = reading.specs(layers), list[Any]()
    wanted = [_vectors(spec, scores) for spec in specs]
    _called_back(reading.model, tokens, wanted, lambda layer: found.append(function(layer) if function else layer))
    return found


def for_each_layer(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    specs: Sequence[AttentionSpec],
    function: Callable[[Captured], None],
    *,
    scores: bool = True,
) -> None:
    """Run the model once and call ``function`` with each of these layers, in the model's order, as in ``capture``."""
    _called_back(model, tokens, [_vectors(spec, scores) for spec in specs], function)


def for_each_scores(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    specs: Sequence[AttentionSpec],
    function: Callable[[AttentionSpec, Tensor], None],
) -> None:
    """Run the model once and call ``function`` with each layer's spec and scores ``[batch, head, query, key]``.

    The scores are passed on as they are, including changes by the user's hooks, also in layers where they cannot be
    recomputed from queries and keys; only their mask is checked.
    """
    _called_back(model, tokens, [_scores(spec) for spec in specs], lambda item: function(*item))


@dataclass(frozen=True)
class _Wanted:
    """What to collect from one layer: hooks in firing order, and a function of their tensors."""

    spec: AttentionSpec
    names: list[str]
    make: Callable[[dict[str, Tensor]], Any]


def _vectors(spec: AttentionSpec, scores: bool) -> _Wanted:
    spec.require_scale()
    vectors = [
        name for tap in (spec.taps.q, spec.taps.k, spec.taps.q_rot, spec.taps.k_rot) if tap for name in tap.names
    ]
    names = [name for name in dict.fromkeys([*vectors, spec.taps.scores or spec.taps.pattern]) if name]
    return _Wanted(spec, names, partial(_gather, spec, scores))


def _scores(spec: AttentionSpec) -> _Wanted:
    if spec.taps.scores is None:
        computed = _vectors(spec, scores=False)
        return _Wanted(spec, computed.names, lambda held: (spec, computed.make(held).scores))

    def make(held: dict[str, Tensor]) -> tuple[AttentionSpec, Tensor]:
        (seen,) = held.values()
        rows = checked_rows(seen.shape[-2], seen.device)
        spec.check_mask(seen[:, :, rows], rows)
        return spec, seen

    return _Wanted(spec, [spec.taps.scores], make)


def _called_back(
    model: Any, tokens: Int[Tensor, "batch pos"], wanted: Sequence[_Wanted], function: Callable[[Any], None]
) -> None:
    """Run the model once and call ``function`` once per layer."""
    if (limited := most_limited(w.spec for w in wanted)) is not None:
        limited.check_length(tokens.shape[1], "capture")
    failed: list[Exception] = []
    delivered: list[int] = []

    def hand_over(item: Any) -> None:
        try:
            function(item)
        except Exception as error:  # raised by the function: must not be mistaken for an error of the model
            failed.append(error)
            raise Ended from error
        delivered.append(1)

    with running(model) as p:
        p.run(tokens, _listeners(wanted, hand_over), stop=max(w.spec.layer for w in wanted) + 1)
    if failed:
        raise failed[0]
    if len(delivered) < len(wanted):
        raise RuntimeError(f"only {len(delivered)} of {len(wanted)} layers were captured: their hooks did not fire")


def _listeners(wanted: Sequence[_Wanted], hand_over: Callable[[Any], None]) -> list[Hook]:
    """Make hooks that collect a layer's tensors and, when its last hook fires, pass the result to ``hand_over``."""

    def listen(w: _Wanted, held: dict[str, Tensor], name: str, x: Tensor, hook: Any) -> None:
        held[name] = x.detach()
        if name == w.names[-1]:
            item = w.make(held)
            held.clear()
            hand_over(item)

    # Each layer holds its own: one that attends to the keys of an earlier layer waits for them.
    each = [(w, dict[str, Tensor]()) for w in wanted]
    return [(name, partial(listen, w, held, name)) for w, held in each for name in w.names]


def _gather(spec: AttentionSpec, scores: bool, held: dict[str, Tensor]) -> Captured:
    assert spec.taps.q
    assert spec.taps.k
    q_tap, k_tap = spec.taps.q, spec.taps.k
    q, k = (tap.read(*(held[name] for name in tap.names)) for tap in (q_tap, k_tap))
    if spec.taps.q_rot and spec.taps.k_rot:
        q_rot, k_rot = (tap.read(held[tap.name]) for tap in (spec.taps.q_rot, spec.taps.k_rot))
    else:
        positions = torch.arange(q.shape[1], device=q.device)
        q_rot, k_rot = spec.rotated(q, positions), spec.rotated(k, positions)
    own = held[spec.taps.scores] if spec.taps.scores else None
    _self_check(spec, q, k, own, held.get(spec.taps.pattern or ""))
    if scores and own is None:
        own = spec.score(q_rot, k_rot)
    return Captured(spec.layer, spec, q, k, q_rot, k_rot, own if scores else None)


def _self_check(spec: AttentionSpec, q: Tensor, k: Tensor, scores: Tensor | None, pattern: Tensor | None) -> None:
    """Recompute some rows of the scores (of the pattern, if the model shows only that) and compare them."""
    shown = scores if scores is not None else pattern
    assert shown is not None
    rows, positions = checked_rows(shown.shape[-2], shown.device), torch.arange(q.shape[1], device=q.device)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    q_rot, k_rot = spec.rotated(q[:, rows].to(wide), rows), spec.rotated(k.to(wide), positions)
    if scores is not None:
        check_scores(spec, q_rot, k_rot, scores[:, :, rows], q.dtype, rows)
        return
    outside = ~spec.sees(rows[:, None] - positions)
    if bool((shown[:, :, rows][..., outside] != 0).any()):  # a 0 inside the mask is no sign of another mask
        spec.refuse_nan(shown)
        raise ValueError(spec.other_mask(shown.shape[-1], more=True))
    check_pattern(spec, q_rot, k_rot, shown[:, :, rows], q.dtype, rows)


def listen_vectors(spec: AttentionSpec, positions: Tensor | None, held: dict[str, Tensor]) -> list[Hook]:
    """Return hooks that store a layer's rotated vectors in ``held``, under ``"q"`` and ``"k"``.

    ``positions`` are those that ``swap_positions`` assigns to all heads in this run, or None for 0, 1, 2 …
    """
    rotary = None if spec.rotary is None and spec.taps.q and spec.taps.k else spec.require_rotary("patching")
    assert spec.taps.q
    assert spec.taps.k
    taps = {"q": spec.taps.q, "k": spec.taps.k}
    names = list(dict.fromkeys(name for tap in taps.values() for name in tap.names))
    seen: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor, hook: Any) -> None:
        seen[name] = x.detach().clone()
        if len(seen) < len(names):
            return
        for which, tap in taps.items():
            x = tap.read(*(seen[name] for name in tap.names))
            spec.check_length(x.shape[1], "patching")
            places = torch.arange(x.shape[1], device=x.device) if positions is None else positions.to(x.device)
            held[which] = x if rotary is None else rotate(x.double(), places, rotary)
        seen.clear()

    return [(name, partial(keep, name)) for name in names]


def listen_scores(spec: AttentionSpec, positions: Tensor | None, held: dict[str, Tensor]) -> list[Hook]:
    """Return hooks that store a layer's scores in ``held``, under ``"scores"``: its own, or computed from vectors."""

    def keep(x: Tensor, hook: Any) -> None:
        held["scores"] = x.detach().clone() if spec.taps.scores else spec.score(held.pop("q"), held.pop("k"))

    if spec.taps.scores is not None:
        return [(spec.taps.scores, keep)]
    spec.require_scale()
    assert spec.taps.pattern is not None
    return [*listen_vectors(spec, positions, held), (spec.taps.pattern, keep)]
