"""Rotated queries and keys, or parts of the scores, of one run of a model put into another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.models.forward import Hook
from tl_posdisent.models.probe.observe import is_masked, mismatch
from tl_posdisent.models.reading import read_layers, read_rotary_layers
from tl_posdisent.models.rotated_qk import Door, doors
from tl_posdisent.models.rotation_tables import table_like
from tl_posdisent.models.spec import AttentionSpec, select

from .positions import real_tensor
from .score_components import split_scores
from .score_edits import View, edit_scores

Keys = Literal["group", "head"]
MovedPart = Literal["mean", "distance", "query", "key", "residual"]
_ALL: tuple[MovedPart, ...] = get_args(MovedPart)


def patch_vectors(
    model: Any,
    layer: int,
    q_rot: Float[Tensor, "batch pos head d_head"] | None,
    k_rot: Float[Tensor, "batch pos kv d_head"] | None,
    *,
    heads: Iterable[int] | None = None,
    keys: Keys = "group",
    positions: Tensor | Sequence[float] | None = None,
) -> list[Hook]:
    """Hooks under which heads of a layer attend with these rotated queries, these rotated keys, or both.

    The vectors are those of another run, as ``capture`` gives them. Where the model has no hook behind its rotation
    that takes effect, they are turned back by the angle by which the model is going to turn them.

    Args:
        model: a model with rotary embeddings.
        layer: 0 … n_layers - 1.
        q_rot: ``[batch, pos, head, d_head]``, queries of all heads; None leaves the run's own.
        k_rot: ``[batch, pos, kv, d_head]``, keys of all key heads, likewise.
        heads: query heads that are patched, default all.
        keys: who sees the patched keys where several heads share them. ``"group"``: they belong to the key head, so
            all heads that read it do, also those that are not in ``heads``. ``"head"``: the patched heads alone, whose
            scores are recomputed.
        positions: what ``swap_positions`` was told for the same run, if it was used (for all heads). Put its hooks
            first.

    Returns:
        ``[(hook name, function), ...]``. The run's own vectors put in change nothing: bit for bit in most models, to
        rounding where scores are recomputed.

    Raises:
        ValueError: neither queries nor keys; vectors of wrong shape or not finite; a layer or heads out of range; a
            layer without rotary embeddings that hooks can reach; an unknown ``keys``. While running: a text of another
            shape; a rotation table that is not that of ``positions``.

    Example:
        >>> import torch
        >>> from tl_posdisent import capture, demo_tokens, load_demo_model, patch_vectors, swap_positions
        >>> model, tokens, reversed = load_demo_model(), demo_tokens(length=48), torch.arange(48).flip(0)
        >>> clean = next(capture(model, tokens, layers=[0], scores=False))
        >>> hooks = patch_vectors(model, 0, clean.q_rot, clean.k_rot, positions=reversed)
        >>> name = "blocks.0.attn.hook_pattern"
        >>> with model.hooks(fwd_hooks=swap_positions(model, reversed) + hooks):
        ...     _, patched = model.run_with_cache(tokens, names_filter=name)
        >>> bool(torch.equal(patched[name], model.run_with_cache(tokens, names_filter=name)[1][name]))
        True
    """
    (spec,) = read_rotary_layers(model, [layer], "patch_vectors")
    chosen = select("heads", heads, spec.n_heads)
    if keys not in get_args(Keys):
        raise ValueError(f'keys must be "group" or "head", got {keys!r}')
    if q_rot is None and k_rot is None:
        raise ValueError("q_rot or k_rot must be given, got neither")
    for name, x, n in (("q_rot", q_rot, spec.n_heads), ("k_rot", k_rot, spec.n_kv_heads)):
        if x is not None and (not isinstance(x, Tensor) or x.ndim != 4 or x.shape[2:] != (n, spec.d_head)):
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must have shape (batch, pos, {n}, {spec.d_head}), got {got}")
        if x is not None and not bool(x.isfinite().all()):
            raise ValueError(f"{name} must be finite, got {int((~x.isfinite()).sum())} values that are not")
    place = None if positions is None else real_tensor("positions", positions)
    return vector_hooks(spec, chosen, q_rot, k_rot, keys, place)


def patch_scores(
    model: Any,
    layer: int,
    scores: Float[Tensor, "batch head query key"],
    component: MovedPart | Collection[MovedPart] = _ALL,
    *,
    heads: Iterable[int] | None = None,
) -> list[Hook]:
    """Hooks under which heads of a layer attend with one or more components of these scores, and the rest their own.

    Both are split as ``mean + distance[i - j] + query[i] + key[j] + residual`` (the three-axis fit of each text and
    head, in the gauge of ``AdditiveFit``), the run's own within the pass. Rotary embeddings are not needed.

    Args:
        model: HookedTransformer, TransformerBridge or alike.
        layer: 0 … n_layers - 1.
        scores: ``[batch, head, query, key]`` of all heads in another run, as ``capture`` gives them; outside the mask
            they may hold anything.
        component: ``"distance"``, ``"query"``, ``"key"``, ``"residual"``, ``"mean"`` or several of them. Default all:
            the scores as they are. A softmax ignores ``"query"`` and ``"mean"``, except beside an attention sink.
        heads: query heads, default all.

    Returns:
        ``[(hook name, function), ...]``. The run's own scores put in change nothing.

    Raises:
        ValueError: unknown components; scores of wrong shape; a layer or heads out of range; a layer whose scores
            cannot be changed. While running: a text of another shape, padding, scores that are not finite.

    Example:
        >>> from tl_posdisent import capture, demo_text, demo_tokens, load_demo_model, patch_scores
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> other = next(capture(model, tokens.roll(20, 1), layers=[4]))
        >>> plain = model(tokens)
        >>> for part in ("query", "distance"):
        ...     patched = model.run_with_hooks(tokens, fwd_hooks=patch_scores(model, 4, other.scores, part))
        ...     print(part, bool((patched - plain).abs().max() > 0.01))
        query False
        distance True
    """
    (spec,) = read_layers(model, [layer])
    if not isinstance(scores, Tensor) or scores.ndim != 4 or scores.shape[1] != spec.n_heads:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"scores must have shape (batch, {spec.n_heads}, query, key), got {got}")
    return score_hooks(spec, select("heads", heads, spec.n_heads), scores, check_parts(component))


def check_parts(component: Any) -> list[MovedPart]:
    """One component or several, as a list."""
    parts: list[Any] = (
        [component] if isinstance(component, str) else list(component) if isinstance(component, Iterable) else []
    )
    if not parts or len(set(parts)) < len(parts) or not set(parts) <= set(_ALL):
        raise ValueError(f"component must be one or several of {', '.join(_ALL)}, got {component!r}")
    return parts


def vector_hooks(
    spec: AttentionSpec,
    heads: Sequence[int],
    q_rot: Tensor | None,
    k_rot: Tensor | None,
    keys: Keys,
    positions: Tensor | None,
) -> list[Hook]:
    """``patch_vectors`` for a layer already read and arguments already checked."""
    door_q, door_k = doors(spec, positions)
    groups = sorted({spec.key_head(h) for h in heads})
    hooks = _known_table(spec, door_q)
    whole = len(heads) == len(groups) * (spec.n_heads // spec.n_kv_heads)
    if k_rot is not None and keys == "head" and not whole:
        return hooks + _own_view(spec, heads, (door_q, q_rot), (door_k, k_rot))
    if q_rot is not None:
        hooks.append(_put(door_q, q_rot, heads, "q_rot"))
    if k_rot is not None:
        hooks.append(_put(door_k, k_rot, groups, "k_rot"))
    return hooks


def _put(door: Door, vectors: Tensor, heads: Sequence[int], name: str) -> Hook:
    """Vectors of some heads, put in the place of the run's own."""

    def put(x: Tensor, hook: Any) -> Tensor:
        own = door.tap.read(x)
        _check_shape(name, vectors, own)
        some = torch.zeros(own.shape[2], 1, dtype=torch.bool, device=own.device)
        some[list(heads)] = True
        return door.tap.write(torch.where(some, door.write(vectors).to(own), own))

    return door.tap.name, put


def _own_view(
    spec: AttentionSpec, heads: Sequence[int], query: tuple[Door, Tensor | None], key: tuple[Door, Tensor]
) -> list[Hook]:
    """Keys that these heads see and others that read the same key head do not: by recomputed scores."""
    (door_q, q_rot), (door_k, k_rot) = query, key
    key_heads, held = [spec.key_head(h) for h in heads], {}

    def listen_q(x: Tensor, hook: Any) -> None:
        if q_rot is None:
            held["q"] = door_q.read(x)
        else:
            _check_shape("q_rot", q_rot, door_q.tap.read(x))

    def listen_k(x: Tensor, hook: Any) -> None:
        _check_shape("k_rot", k_rot, door_k.tap.read(x))

    def attend(view: View) -> Tensor:
        q, k = held.pop("q") if q_rot is None else q_rot, k_rot.to(view.inside.device)
        q, k = q.to(k)[:, :, heads], k[:, :, key_heads]
        wide = torch.promote_types(k.dtype, torch.float32)
        return spec.score(q.to(wide), k.to(wide))

    return [(door_q.tap.name, listen_q), (door_k.tap.name, listen_k), *edit_scores(spec, heads, attend)]


def _known_table(spec: AttentionSpec, door: Door) -> list[Hook]:
    """Before a rotation one must know it: refuse a table that is not that of the positions."""
    rotary, name = door.ahead, spec.cos
    if rotary is None or name is None:
        return []

    def check(x: Tensor, hook: Any) -> None:
        expected = table_like(x, rotary, door.place(x), "cos")
        fits = expected.shape[1:] == x.shape[1:] and len(expected) in (1, len(x))
        if not fits or mismatch(x, expected.expand_as(x)) > 1:
            raise ValueError(
                f"positions must be those of the run, but the rotation table of layer {spec.layer} is of others: give "
                "here what swap_positions was given, and run the model without padding or a key/value cache"
            )

    return [(name, check)]


def score_hooks(spec: AttentionSpec, heads: Sequence[int], source: Tensor, parts: Collection[MovedPart]) -> list[Hook]:
    """``patch_scores`` for a layer already read and arguments already checked."""

    def move(view: View) -> Tensor:
        own, theirs = view.scores(), source[:, list(heads)].to(view.inside.device)
        _check_shape("scores", theirs, own)
        if bool((is_masked(theirs) & view.inside).any() | (view.inside != spec.mask(own.shape[-1], own.device)).any()):
            raise ValueError(f"scores of layer {spec.layer} must have the layer's mask: padded texts are not supported")
        if not bool((theirs.isfinite() | ~view.inside).all()):
            raise ValueError(f"scores of layer {spec.layer} must be finite inside the mask")
        if set(parts) == set(_ALL):
            return theirs
        before, after = split_scores(own, view.inside), split_scores(theirs, view.inside)
        return sum((after[part] - before[part] for part in parts), own.double())

    return edit_scores(spec, heads, move, scores=True)


def _check_shape(name: str, given: Tensor, own: Tensor) -> None:
    if given.shape != own.shape:
        raise ValueError(f"{name} must have the shape of the run's own, {tuple(own.shape)}, got {tuple(given.shape)}")
