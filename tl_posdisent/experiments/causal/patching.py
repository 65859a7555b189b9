"""Patch heads between runs on different tokens or positions: activations, rotated vectors, components of scores."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import pandas as pd
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.experiments.causal.patch_runs import (
    Held,
    PatchRun,
    SourceRun,
    by_head,
    numbers,
    only,
    patch_effects,
    sharing,
    tokens_of,
)
from tl_posdisent.experiments.measuring.full_runs import run_texts
from tl_posdisent.experiments.measuring.metrics import (
    Metric,
    check_metric,
    next_token_loss,
    value_of,
)
from tl_posdisent.experiments.measuring.part_runs import Head
from tl_posdisent.hooks.hook_list import Heads, Hooks, any_heads, replace_scores
from tl_posdisent.hooks.patch import Keys, MovedComponent, score_hooks, vector_hooks
from tl_posdisent.models.capture import listen_scores, listen_vectors
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Hook, running
from tl_posdisent.models.running.model_parts import hook_name
from tl_posdisent.models.running.results import at_results, by_heads
from tl_posdisent.models.running.texts import Texts, TokenIds, Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.tables import HEAD
from tl_posdisent.utils.tensor_checks import real_tensor
from tl_posdisent.utils.validation import check_choice, check_indices, check_subset, is_integer, listed

Activation = Literal["z", "q", "k", "v", "pattern"]


def head_patching(
    model: Any,
    tokens: Tokens,
    source: Tokens,
    metric: Metric,
    *,
    attention_mask: Tensor | None = None,
    ignore: TokenIds | None = None,
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
        ignore: as in ``head_ablation``, of the tokens of ``source``.
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
    check_metric(metric, ignore)
    layers = listed("layers", layers)
    reading = read_model(model)
    model, chosen = reading.model, any_heads(reading, layers, heads)
    texts = read_texts(model, tokens, attention_mask)
    other = read_texts(model, _read_source_texts(model, texts, source, attention_mask), ignore=ignore)
    places = _places(positions, min(texts.lengths))
    held = Held(lambda rows, spec: _recorded(model, tokens_of(other, rows), spec, activation))
    held([0], chosen[0][0])  # or raise

    def hooks(spec: AttentionSpec, place: int | None, rows: list[int], heads: list[Head]) -> Sequence[Hook]:
        return _activation_hooks(spec, numbers(heads), held(rows, spec), activation, place)

    runs, by_key = list[PatchRun](), activation in ("k", "v")
    for spec, of_layer in chosen:
        # A norm of queries and keys may be that of all heads.
        changed = partial(_all_heads, spec) if activation in ("q", "k") else None
        for place in places:
            runs += by_head(spec, of_layer, partial(hooks, spec, place), by_key=by_key, changed=changed, place=place)
    value = value_of(metric, run_texts(model, other), other)
    return patch_effects(reading, texts, runs, metric, "source", value, target=other, progress=progress)


def _all_heads(spec: AttentionSpec, heads: Sequence[int]) -> list[int]:
    return list(range(spec.n_heads))


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
    spec: AttentionSpec, heads: Sequence[int], held: Tensor, activation: Activation, place: int | None
) -> Sequence[Hook]:
    """Patch an activation of heads of a layer, held from another run, at a position or (None) at all."""
    patched = sorted({spec.key_head(head) if activation in ("k", "v") else head for head in heads})
    at_place = slice(None) if place is None else place
    if activation == "pattern" and not spec.taps.scores:  # as scores of which it is the softmax

        def put_log(view: Any) -> Tensor:
            scores: Tensor = view.scores.clone()
            scores[:, :, at_place] = held[:, list(view.heads), at_place].log().to(scores)
            return scores

        return replace_scores(spec, heads, put_log, "head_patching")

    def put(x: Tensor, hook: Any = None) -> Tensor:
        x = x.clone()
        index = (slice(None), patched, at_place) if activation == "pattern" else (slice(None), at_place, patched)
        x[index] = held[index].to(x.device)
        return x

    if activation == "z":
        return [at_results(spec.layer, spec.n_heads, put)]
    return [(hook_name(spec.layer, f"hook_{activation}"), put)]


def _recorded(model: Any, tokens: Int[Tensor, "batch pos"], spec: AttentionSpec, activation: Activation) -> Tensor:
    """Record the activation of a layer in a run on these tokens."""
    name = hook_name(spec.layer, f"hook_{activation}")
    heads = spec.n_kv_heads if activation in ("k", "v") else spec.n_heads
    # In a text with as many tokens as heads the two axes cannot be distinguished, so a shorter text is checked.
    for checked in [tokens[:, :-1], tokens] if tokens.shape[1] == heads else [tokens]:
        with running(model) as p:
            held = p.record(checked, [name] if name in p.points else [], stop=spec.layer + 1).get(name)
        if activation == "z" and held is not None:
            held = by_heads(held, spec.n_heads)
        if checked.shape[1] != heads:
            _check_layout(spec, name, held, checked.shape[1], heads)
    assert held is not None
    return held


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
    ignore: TokenIds | None = None,
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
        model, tokens, metric, attention_mask, ignore, layers, heads, progress: as in ``head_ablation``; only rotary
            layers.
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
    check_metric(metric, ignore)
    reading = read_model(model)
    model, chosen = reading.model, any_heads(reading, layers, heads, "position_patching")
    texts = read_texts(model, tokens, attention_mask, ignore)
    moved = SourceRun(reading, texts, _check_positions(texts, positions))
    source, patched = ("clean", "corrupted") if direction == "denoise" else ("corrupted", "clean")

    def record(rows: list[int], spec: AttentionSpec) -> tuple[Tensor | None, Tensor | None]:
        seen = (moved if source == "corrupted" else SourceRun(reading, texts)).listen(rows, spec, listen_vectors)
        return (None if what == "key" else seen["q"]), (None if what == "query" else seen["k"])

    held = Held(record)

    def patch(spec: AttentionSpec, rows: list[int], heads: list[Head]) -> Hooks:
        q_rot, k_rot = held(rows, spec)
        return vector_hooks(spec, numbers(heads), q_rot, k_rot, keys)

    runs = list[PatchRun]()
    for spec, of_layer in chosen:
        hooks = partial(patch, spec)
        if what == "layer":
            runs.append(PatchRun(spec.layer, sharing(spec, of_layer), [None], only(spec, of_layer, hooks)))
        else:  # a key that a head receives may be that of other heads, too
            changed = partial(sharing, spec) if what == "head" and keys == "group" else None
            runs += by_head(spec, of_layer, hooks, by_key=what == "key" and keys == "group", changed=changed)
    value = value_of(metric, moved.outputs() if source == "corrupted" else run_texts(model, texts), texts)
    base = moved.hooks if patched == "corrupted" else None
    table = patch_effects(reading, texts, runs, metric, "positions", value, base=base, progress=progress)
    table = table.rename(columns={"source": source, "baseline": patched})
    if direction == "noise":
        table["effect"] = 1 - table["effect"]
    columns = [*HEAD, "clean", "corrupted", "value", "effect"]
    return table[[name for name in columns if name != "head" or what != "layer"]]


def _check_positions(texts: Texts, positions: Any) -> Tensor:
    place = real_tensor("positions", positions)
    if place.ndim in (1, 2) and place.shape[-1] != texts.tokens.shape[1]:
        raise ArgumentError(
            "positions",
            f"must have shape (pos,) or (batch, pos) with pos = {texts.tokens.shape[1]}, got {tuple(place.shape)}",
        )
    return place


def component_patching(
    model: Any,
    tokens: Tokens,
    component: MovedComponent | Collection[MovedComponent] = "distance",
    *,
    attention_mask: Tensor | None = None,
    ignore: TokenIds | None = None,
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
        model, tokens, metric, attention_mask, ignore, layers, heads, progress: as in ``head_ablation``; the metric's
            tokens are ``tokens`` in all three runs.
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
    check_metric(metric, ignore)
    reading = read_model(model)
    model, chosen = reading.model, any_heads(reading, layers, heads)
    texts = read_texts(model, tokens, attention_mask, ignore)
    if (source is None) == (source_positions is None):
        raise ValueError("pass exactly one of source or source_positions")
    other = texts if source is None else _read_source_texts(model, texts, source, attention_mask)
    moved = SourceRun(reading, other, None if source_positions is None else _check_positions(texts, source_positions))
    held = Held(lambda rows, spec: moved.listen(rows, spec, listen_scores)["scores"])

    def hooks(spec: AttentionSpec, rows: list[int], heads: list[Head]) -> Hooks:
        return score_hooks(spec, numbers(heads), held(rows, spec), components)

    runs = [run for spec, of_layer in chosen for run in by_head(spec, of_layer, partial(hooks, spec))]
    argument = "source_positions" if source is None else "source"
    return patch_effects(
        reading, texts, runs, metric, argument, value_of(metric, moved.outputs(), texts), progress=progress
    )


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
