"""Patch heads between runs on different tokens or positions: activations, rotated vectors, components of scores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import pandas as pd
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.experiments.measuring.metrics import Metric, check_metric, next_token_loss
from tl_posdisent.experiments.measuring.rows_by_head import LayerUnits, PatchRuns, layer_units, rows_by_head
from tl_posdisent.experiments.measuring.runs import GroupHooks
from tl_posdisent.hooks.edits.score_edits import Order, ScoreEdit, View
from tl_posdisent.hooks.hook_list import Heads, Hooks, any_heads, hooks_for, replace_scores
from tl_posdisent.hooks.patch import Keys, MovedComponent, score_hooks, vector_hooks
from tl_posdisent.hooks.positions import swap_positions
from tl_posdisent.models.capture import listen_scores, listen_vectors
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Hook, running
from tl_posdisent.models.running.model_parts import hook_name
from tl_posdisent.models.running.results import at_results, by_heads
from tl_posdisent.models.running.texts import TextGroup, Texts, Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.validation import check_choice, check_indices, check_subset, is_integer, listed, real_tensor

Activation = Literal["z", "q", "k", "v", "pattern"]


def head_patching(
    model: Any,
    tokens: Tokens,
    source: Tokens,
    metric: Metric,
    *,
    attention_mask: Tensor | None = None,
    activation: Activation = "z",
    positions: int | Iterable[int] | None = None,
    layers: Layers = None,
    heads: Heads = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Patch the activation of each head from a run on one text into a run on another, at all positions or one by one.

    The values equal those of ``transformer_lens.patching.get_act_patch_attn_head_{out,q,k,v,pattern}_all_pos``, in one
    table, and are computed faster (see ``head_ablation``). Heads that share a key head have a row each, with the effect
    of that key head. A pattern can also be patched in bridges that leave attention to Hugging Face (GPT-J, GPT-Neo,
    OPT). Queries, keys and values of latent attention (DeepSeek), which are not laid out as in TransformerLens, raise.

    Args:
        model, attention_mask, layers, heads, progress: as in ``head_ablation``; the mask applies to both runs.
        tokens: as in ``head_ablation``: the run that is patched (the *corrupted* run, to restore a clean result).
        source: tokens of the run from which activations come, with the shape or the lengths of ``tokens``.
        metric: as in ``head_ablation``, but a function of logits and ``source``.
        activation: ``"z"`` (a head's result), ``"q"``, ``"k"``, ``"v"`` (before rotation and norm) or ``"pattern"``.
        positions: token positions to patch one at a time, counted from each text's first token or, if negative, from
            its end; for a pattern, positions of queries. None patches all positions together, in a fraction of the
            time.

    Returns:
        One row per layer and head (and position): ``layer``, ``head``, (``position``;) ``source``, ``baseline`` and
        ``value``, the metric on ``source``, on ``tokens``, and with the patch; ``effect``, ``(value - baseline) /
        (source - baseline)``. Rows are in the order of layers, heads and positions; ``table.sort_values("effect",
        key=abs, ascending=False)`` begins with the largest effects of either sign.

    Raises:
        ValueError: tokens of different shapes; runs with the same metric; an unknown activation, or one whose hook has
            no axis of heads; positions beyond the shortest text; otherwise as ``head_ablation``.

    Example:
        >>> from tl_posdisent import demo_tokens, head_patching, load_demo_model
        >>> model, clean = load_demo_model(), demo_tokens(length=32)
        >>> corrupted = clean.clone()
        >>> corrupted[0, 20] = 5  # another token
        >>> def log_p(logits, tokens):
        ...     return logits[:, 20].log_softmax(-1)[:, tokens[0, 21]]
        >>> table = head_patching(model, corrupted, clean, log_p, layers=[0], progress=False)
        >>> list(table.columns)
        ['layer', 'head', 'source', 'baseline', 'value', 'effect']
        >>> some = {"layers": [0], "heads": [3], "progress": False}
        >>> table = head_patching(model, corrupted, clean, log_p, positions=[0, 19, 20], **some)
        >>> table["position"].tolist(), (table["effect"] != 0).tolist()  # the texts differ at 20
        ([0, 19, 20], [False, False, True])
    """
    check_choice("activation", activation, get_args(Activation))
    check_metric(metric)
    layers = listed("layers", layers)
    reading = read_model(model)
    model, chosen = reading.model, any_heads(reading, layers, heads)
    texts = read_texts(model, tokens, attention_mask)
    other = _read_source_texts(model, texts, source, attention_mask)
    places = _places(positions, min(texts.lengths))
    together = [] if activation == "pattern" else [spec for spec, _ in chosen]  # patterns are large: layer by layer
    of_layers = [_held(model, group.tokens, together, activation) for group in other.groups]

    def hooks_in(spec: AttentionSpec) -> list[GroupHooks]:
        held = of_layers if together else [_held(model, group.tokens, [spec], activation) for group in other.groups]
        of_groups = [by_layer[spec.layer] for by_layer in held]
        return [partial(_activation_hooks, spec, of_groups, activation, place) for place in places]

    units = [layer_units(spec, of_layer, by_key=activation in ("k", "v")) for spec, of_layer in chosen]
    return rows_by_head(
        reading,
        texts,
        units,
        hooks_in,
        metric,
        places=places,
        source=PatchRuns(other, "source", target=other),
        progress=progress,
    )


def _places(positions: Any, length: int) -> list[int | None]:
    """Return positions one by one, as given; ``[None]`` for all together."""
    if positions is None:
        return [None]
    if isinstance(positions, Tensor):
        positions = positions.tolist()
    listed_positions = [positions] if is_integer(positions) else positions
    if isinstance(listed_positions, Iterable) and not isinstance(listed_positions, str):
        listed_positions = list(listed_positions)
    check_indices("positions", listed_positions, length)
    return [int(x) for x in listed_positions]


def _activation_hooks(
    spec: AttentionSpec,
    of_groups: Sequence[Tensor],
    activation: Activation,
    place: int | None,
    group: int,
    heads: Sequence[int],
) -> list[Hook]:
    """Patch an activation of heads of a layer, held for each group of texts, at a position or (None) at all."""
    held = of_groups[group]
    patched = sorted({spec.key_head(head) if activation in ("k", "v") else head for head in heads})
    if activation == "pattern" and not spec.taps.scores:  # as scores of which it is the softmax
        if place is None:
            return replace_scores(spec, heads, lambda view: held[:, list(view.heads)].log(), "head_patching")

        def put_log(view: View) -> Tensor:
            scores = view.scores.clone()
            scores[:, :, place] = held[:, list(view.heads), place].log().to(scores)
            return scores

        return hooks_for([(spec, heads)], ScoreEdit("head_patching", put_log, Order.REPLACE))
    at_place = slice(None) if place is None else place

    def put(x: Tensor, hook: Any = None) -> Tensor:
        x = x.clone()
        index = (slice(None), patched, at_place) if activation == "pattern" else (slice(None), at_place, patched)
        x[index] = held[index].to(x.device)
        return x

    if activation == "z":
        return [at_results(spec.layer, spec.n_heads, put)]
    return [(hook_name(spec.layer, f"hook_{activation}"), put)]


def _held(
    model: Any, tokens: Int[Tensor, "batch pos"], specs: Sequence[AttentionSpec], activation: Activation
) -> dict[int, Tensor]:
    """Record the activation of layers in a run on these tokens."""
    names = {spec.layer: hook_name(spec.layer, f"hook_{activation}") for spec in specs}
    if not specs:
        return {}
    heads = {spec.layer: spec.n_kv_heads if activation in ("k", "v") else spec.n_heads for spec in specs}
    # In a text with as many tokens as heads the two axes cannot be distinguished, so a shorter text is checked.
    for checked in [tokens[:, :-1], tokens] if tokens.shape[1] in heads.values() else [tokens]:
        with running(model) as p:
            held = p.record(checked, [name for name in names.values() if name in p.points], stop=max(names) + 1)
        for spec in specs:
            name = names[spec.layer]
            if activation == "z" and name in held:
                held[name] = by_heads(held[name], spec.n_heads)
            if checked.shape[1] != heads[spec.layer]:
                _check_layout(spec, name, held.get(name), checked.shape[1], heads[spec.layer])
    return {layer: held[name] for layer, name in names.items()}


def _check_layout(spec: AttentionSpec, name: str, held: Tensor | None, length: int, n: int) -> None:
    """Raise if the heads of a hook's tensor are not at the axis where TransformerLens has them."""
    shape = () if held is None else tuple(held.shape)
    if shape[1:] != (n, length, length) if name.endswith("pattern") else shape[1:3] != (length, n):
        missing = f"carries a tensor of shape {shape} on {length} tokens" if shape else "does not fire"
        raise ArgumentError(
            "activation",
            f"must have a hook with {n} heads at its {'second' if name.endswith('pattern') else 'third'} axis, but "
            f"{name} of {spec.architecture} {missing}",
        )


What = Literal["head", "query", "key", "layer"]
Direction = Literal["denoise", "noise"]


def position_patching(
    model: Any,
    tokens: Tokens,
    positions: Tensor | Sequence[float],
    metric: Metric = next_token_loss,
    *,
    attention_mask: Tensor | None = None,
    what: What = "head",
    keys: Keys = "group",
    direction: Direction = "denoise",
    layers: Layers = None,
    heads: Heads = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Patch rotated queries and keys between runs at different positions, to measure which heads use positions.

    The *clean* run has the positions 0, 1, 2 …; in the *corrupted* run RoPE receives others, in every layer
    (``swap_positions``). Then one head at a time receives its rotated vectors of the clean run, while everything else
    stays corrupted::

        effect = (value - corrupted) / (clean - corrupted)

    The patched vectors also carry what earlier layers computed at the clean positions. To change only this layer's
    rotation, give other positions to this layer alone (``swap_positions(model, positions, layers=[layer])``).

    Args:
        model, tokens, metric, attention_mask, layers, heads, progress: as in ``head_ablation``; only rotary layers.
        positions: positions that RoPE receives in the corrupted run, in all layers: ``(pos,)``, counted from each
            text's first token, or ``(batch, pos)``, in the layout of ``tokens``.
        what: vectors to patch: queries and keys of a ``"head"``, only its ``"query"`` or its ``"key"``, or queries and
            keys of all heads of a ``"layer"``.
        keys: if heads share keys, ``"group"`` patches the key head, for all query heads of the group; ``"head"``
            patches the keys for one query head only.
        direction: ``"denoise"`` patches from the clean run into the corrupted one, ``"noise"`` the other way; an effect
            of 1 is the clean run in both.

    Returns:
        One row per layer and head (per layer for ``"layer"``): ``layer``, ``head``, ``clean``, ``corrupted`` and
        ``value``, the metric of the three runs, and ``effect``. Rows are in the order of layers and heads.

    Raises:
        ValueError: invalid arguments; positions that do not change the metric.

    Example:
        >>> import torch
        >>> from tl_posdisent import demo_tokens, load_demo_model, position_patching
        >>> model, tokens = load_demo_model(), demo_tokens(length=48)
        >>> every_other = torch.arange(48) * 2
        >>> table = position_patching(model, tokens, every_other, what="layer", progress=False)
        >>> len(table), bool((table["clean"] < table["corrupted"]).all())  # the loss grows
        (5, True)
    """
    for name, option, options in (("what", what, What), ("keys", keys, Keys), ("direction", direction, Direction)):
        check_choice(name, option, get_args(options))
    check_metric(metric)
    reading = read_model(model)
    model, chosen = reading.model, any_heads(reading, layers, heads, "position_patching")
    texts = read_texts(model, tokens, attention_mask)
    places = [positions_of(texts, group, positions) for group in texts.groups]
    hooks = {"clean": [Hooks([]) for _ in places], "corrupted": [swap_positions(reading, place) for place in places]}
    source, patched = ("clean", "corrupted") if direction == "denoise" else ("corrupted", "clean")
    seen_at = places if source == "corrupted" else [None] * len(places)
    if what == "layer":
        units = [LayerUnits(spec, [of_layer], [[None]]) for spec, of_layer in chosen]
    else:
        units = [layer_units(spec, of_layer, by_key=what == "key" and keys == "group") for spec, of_layer in chosen]
    held = _listened(model, texts, hooks[source], seen_at, [spec for spec, _ in chosen], listen_vectors)

    def hooks_in(spec: AttentionSpec) -> list[GroupHooks]:
        vectors = [by_layer[spec.layer] for by_layer in held]
        rotated = [(None if what == "key" else x["q"], None if what == "query" else x["k"]) for x in vectors]
        return [partial(_vector_hooks, spec, rotated, keys)]

    end = PatchRuns(texts, "positions", hooks[source], patched_hooks=hooks[patched])
    table = rows_by_head(reading, texts, units, hooks_in, metric, source=end, progress=progress)
    table = table.rename(columns={"source": source, "baseline": patched})
    if direction == "noise":
        table["effect"] = 1 - table["effect"]
    columns = ["layer", "head", "clean", "corrupted", "value", "effect"]
    return table[[name for name in columns if name != "head" or what != "layer"]]


def _listened(
    model: Any,
    texts: Texts,
    hooks: Sequence[Hooks],
    positions: Sequence[Tensor | None],
    specs: Sequence[AttentionSpec],
    listen: Callable[[AttentionSpec, Tensor | None, dict[str, Tensor]], list[Hook]],
) -> list[dict[int, dict[str, Tensor]]]:
    """Record layers in a run on each group of texts, under hooks that set the positions."""
    held: list[dict[int, dict[str, Tensor]]] = [{spec.layer: {} for spec in specs} for _ in texts.groups]
    for group, group_hooks, place, seen in zip(texts.groups, hooks, positions, held, strict=True):
        listening = [hook for spec in specs for hook in listen(spec, place, seen[spec.layer])]
        with running(model) as p:
            p.run(group.tokens, [*group_hooks, *listening], stop=max(seen) + 1)
    return held


def positions_of(texts: Texts, group: TextGroup, positions: Any) -> Tensor:
    """Return the positions of a group of texts of equal length, from those of the batch."""
    place = real_tensor("positions", positions)
    if place.ndim in (1, 2) and place.shape[-1] != texts.tokens.shape[1]:
        raise ArgumentError(
            "positions",
            f"must have shape (pos,) or (batch, pos) with pos = {texts.tokens.shape[1]}, got {tuple(place.shape)}",
        )
    if place.shape == texts.tokens.shape:
        return group.cut(place)
    return place[: group.tokens.shape[1]] if place.ndim == 1 else place


def component_patching(
    model: Any,
    tokens: Tokens,
    component: MovedComponent | Collection[MovedComponent] = "distance",
    *,
    attention_mask: Tensor | None = None,
    source: Tokens | None = None,
    source_positions: Tensor | Sequence[float] | None = None,
    metric: Metric = next_token_loss,
    layers: Layers = None,
    heads: Heads = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Patch one additive component of each head's scores from a run on other tokens or at other positions.

    Scores are a sum of ``mean``, ``distance``, ``query``, ``key`` and ``residual`` (the three-axis fit of each text and
    head, with the gauge of ``AdditiveFit``). In a run on ``tokens``, the *baseline*, one head at a time receives a
    component of its scores in the *source*, a run on other tokens or at other positions::

        effect = (value - baseline) / (source - baseline)

    Args:
        model, tokens, metric, attention_mask, layers, heads, progress: as in ``head_ablation``; the metric's tokens are
            ``tokens`` in all three runs.
        component: ``"distance"``, ``"query"``, ``"key"``, ``"residual"``, ``"mean"`` or several of them together. The
            softmax ignores ``"query"`` and ``"mean"``, except with a learned attention sink.
        source: tokens of the run from which the component comes, with the shape or the lengths of ``tokens``.
        source_positions: alternatively its positions, as in ``position_patching``.

    Returns:
        One row per layer and head, with the columns of ``head_patching``.

    Raises:
        ValueError: invalid arguments; runs with the same metric; a layer whose scores cannot be read or changed.

    Example:
        >>> from tl_posdisent import component_patching, demo_tokens, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=48)
        >>> table = component_patching(model, tokens, "query", source=tokens.flip(1), layers=[4], progress=False)
        >>> bool((table["effect"].abs() < 1e-4).all())  # the softmax over keys ignores it
        True
    """
    components = check_subset("component", component, get_args(MovedComponent))
    if not components:
        raise ArgumentError("component", f"must be at least one of {', '.join(get_args(MovedComponent))}, got none")
    check_metric(metric)
    reading = read_model(model)
    model, chosen = reading.model, any_heads(reading, layers, heads)
    texts = read_texts(model, tokens, attention_mask)
    if (source is None) == (source_positions is None):
        raise ValueError("pass exactly one of source or source_positions")
    other = texts if source is None else _read_source_texts(model, texts, source, attention_mask)
    positions = [None if source_positions is None else positions_of(texts, x, source_positions) for x in texts.groups]
    hooks = [Hooks([]) if place is None else swap_positions(reading, place) for place in positions]

    def hooks_in(spec: AttentionSpec) -> list[GroupHooks]:
        held = _listened(model, other, hooks, positions, [spec], listen_scores)  # one layer at a time: scores are large
        scores = [by_layer[spec.layer]["scores"] for by_layer in held]
        return [partial(_component_hooks, spec, scores, components)]

    units = [layer_units(spec, of_layer) for spec, of_layer in chosen]
    end = PatchRuns(other, "source_positions" if source is None else "source", hooks)
    return rows_by_head(reading, texts, units, hooks_in, metric, source=end, progress=progress)


def _vector_hooks(
    spec: AttentionSpec,
    rotated: Sequence[tuple[Tensor | None, Tensor | None]],
    keys: Keys,
    group: int,
    heads: Sequence[int],
) -> list[Hook]:
    """Patch rotated queries and keys of heads of a layer, held for each group of texts."""
    return vector_hooks(spec, heads, *rotated[group], keys)


def _component_hooks(
    spec: AttentionSpec,
    scores: Sequence[Tensor],
    components: Sequence[MovedComponent],
    group: int,
    heads: Sequence[int],
) -> list[Hook]:
    """Patch components of the scores of heads of a layer, held for each group of texts."""
    return score_hooks(spec, heads, scores[group], components)


def _read_source_texts(model: Any, texts: Texts, source: Any, attention_mask: Any) -> Texts:
    """Texts of the run that is patched from, each as long as its counterpart; same padding, if any.

    Raises:
        ValueError: another number of texts, or a text of another length.
    """
    as_ids = isinstance(source, Tensor)
    if as_ids and source.shape != texts.tokens.shape and source.shape != texts.tokens.shape[1:]:
        raise ArgumentError(
            "source", f"must have the shape of tokens, {tuple(texts.tokens.shape)}, got {tuple(source.shape)}"
        )
    with naming(tokens="source"):
        other = read_texts(model, source, attention_mask if as_ids else None)
    if other.lengths != texts.lengths:
        raise ArgumentError("source", f"must be texts as long as those of tokens, {texts.lengths}, got {other.lengths}")
    return other
