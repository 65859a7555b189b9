"""Which heads carry the effect of positions? Rotated vectors, or parts of scores, moved between two runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.hooks.patch import Keys, MovedPart, check_parts, score_hooks, vector_hooks
from tl_posdisent.hooks.positions import swap_positions
from tl_posdisent.models.forward import Hook, check_tokens, evaluating, run
from tl_posdisent.models.reading import read_layers, read_rotary_layers
from tl_posdisent.models.rotated_qk import listen_scores, listen_vectors
from tl_posdisent.models.spec import AttentionSpec, select

from .metrics import Metric, as_table, check_apart, check_metric, measure, next_token_loss

What = Literal["head", "query", "key", "layer"]
Direction = Literal["denoise", "noise"]


class _Run(NamedTuple):
    """A run that is patched, or patched from."""

    tokens: Int[Tensor, "batch pos"]
    hooks: list[Hook]
    positions: Tensor | None  # what swap_positions was told, if it was used


def position_patching(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | str,
    positions: Tensor | Sequence[float],
    metric: Metric = next_token_loss,
    *,
    what: What = "head",
    keys: Keys = "group",
    direction: Direction = "denoise",
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Which heads need the real positions? Their rotated queries and keys, moved between two runs of the same text.

    The *clean* run sees the positions 0, 1, 2 …; in the *corrupted* one RoPE sees others, in every layer
    (``swap_positions``). Then one head at a time gets the rotated vectors that it has in the clean run, while all else
    stays corrupted. As in ``transformer_lens.patching``, 0 is the corrupted run and 1 the clean one::

        effect = (value - corrupted) / (clean - corrupted)

    One forward pass for each run and each row (one per key head for ``"key"``); the queries and keys of the layers
    asked for are held meanwhile. Hooks of your own on the model act in every run. Dropout is off meanwhile.

    Args:
        model: a model with rotary embeddings.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer.
        positions: ``(pos,)`` or ``(batch, pos)``, what RoPE sees in the corrupted run.
        metric: a function of ``(logits [batch, pos, vocab], tokens [batch, pos])`` that returns a number or one for
            each text, of which the mean counts. Default: the loss of the next token, in nats.
        what: what is moved: queries and keys of a ``"head"``, its ``"query"`` or its ``"key"`` alone, or both of all
            heads of a ``"layer"``.
        keys: where heads share keys, ``"group"`` moves the key head's, which all heads of the group then see: by
            ``"key"`` they all have the same effect. ``"head"`` moves them for the one head alone, so that ``"head"``
            restores this head's scores and no others.
        direction: ``"denoise"`` moves from the clean run into the corrupted one, ``"noise"`` the other way. The effect
            is on the same scale, so that noise in vain leaves 1.
        layers: layers that are patched, default all that rotate. The corrupted run sees other positions in all.
        heads: query heads that are patched, default all.
        progress: show a bar.

    Returns:
        One row per layer and head (per layer for ``"layer"``): ``layer``, ``head``, ``clean``, ``corrupted`` and
        ``value``, the metric of the three runs, and ``effect``.

    Raises:
        ValueError: positions that leave the metric as it is, such as 0, 1, 2 … themselves; what ``swap_positions``
            refuses; an unknown option; a metric that returns anything else. While running: positions of another length.

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
        if option not in get_args(options):
            raise ValueError(f"{name} must be one of {', '.join(get_args(options))}, got {option!r}")
    check_metric(metric)
    specs = read_rotary_layers(model, layers, "position_patching")
    tokens = check_tokens(model, tokens)
    chosen = select("heads", heads, specs[0].n_heads)
    clean, corrupted = _Run(tokens, [], None), _swapped(model, tokens, positions)
    source, base = (clean, corrupted) if direction == "denoise" else (corrupted, clean)
    held: dict[int, dict[str, Tensor]] = {spec.layer: {} for spec in specs}
    listeners = [hook for spec in specs for hook in listen_vectors(spec, source.positions, held[spec.layer])]
    with evaluating(model):
        measured = {
            "clean": measure(model, tokens, [*clean.hooks, *(listeners if source is clean else [])], metric, tokens),
            "corrupted": measure(
                model, tokens, [*corrupted.hooks, *(listeners if base is clean else [])], metric, tokens
            ),
        }
        check_apart(model, measured, "positions")
        rows: list[tuple[int, int, float]] = []
        for spec, patched, reported in tqdm(_units(specs, chosen, what, keys), desc="patches", disable=not progress):
            q, k = held[spec.layer]["q"], held[spec.layer]["k"]
            vectors = None if what == "key" else q, None if what == "query" else k
            hooks = [*base.hooks, *vector_hooks(spec, patched, *vectors, keys)]
            value = measure(model, tokens, hooks, metric, tokens)
            rows += [(spec.layer, head, value) for head in reported]
    return as_table(rows, measured).drop(columns="head" if what == "layer" else [])


def _swapped(model: Any, tokens: Int[Tensor, "batch pos"], positions: Tensor | Sequence[float]) -> _Run:
    hooks = swap_positions(model, positions)
    return _Run(tokens, hooks, torch.as_tensor(positions).detach().double())


def _units(
    specs: list[AttentionSpec], heads: list[int], what: What, keys: Keys
) -> list[tuple[AttentionSpec, list[int], list[int]]]:
    """What is patched at once: a layer, heads, and the heads of which the result is reported."""
    if what == "layer":
        return [(spec, heads, [-1]) for spec in specs]
    if what != "key" or keys == "head":
        return [(spec, [head], [head]) for spec in specs for head in heads]
    units = []
    for spec in specs:
        for group in sorted({spec.key_head(head) for head in heads}):
            members = [head for head in heads if spec.key_head(head) == group]
            units.append((spec, members, members))
    return units


def component_patching(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | str,
    component: MovedPart | Collection[MovedPart] = "distance",
    *,
    from_tokens: Int[Tensor, "batch pos"] | str | None = None,
    from_positions: Tensor | Sequence[float] | None = None,
    metric: Metric = next_token_loss,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """How much of another run comes with one component of one head's scores?

    Scores are a sum of ``mean``, ``distance``, ``query``, ``key`` and ``residual`` (the three-axis fit of each text and
    head, with the gauge of ``AdditiveFit``). In a run on ``tokens``, the *baseline*, one head at a time gets a
    component that its scores have in the *source*, a run on other tokens or at other positions::

        effect = (value - baseline) / (source - baseline)

    One forward pass for each row, and for each layer a part of one. The scores of one layer are held meanwhile.

    Args:
        model: HookedTransformer, TransformerBridge or alike; with rotary embeddings for ``from_positions``.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer.
        component: ``"distance"``, ``"query"``, ``"key"``, ``"residual"``, ``"mean"`` or several of them together; all
            five are the scores themselves. A softmax ignores ``"query"`` and ``"mean"``: their effect is 0, except
            beside an attention sink.
        from_tokens: tokens of the run from which the component comes, as many texts as long.
        from_positions: or its positions, as in ``swap_positions``.
        metric: as in ``position_patching``. Its tokens are ``tokens`` in all three runs.
        layers: default all.
        heads: query heads, default all.
        progress: show a bar.

    Returns:
        One row per layer and head: ``layer``, ``head``; ``source``, ``baseline`` and ``value``, the metric of the run
        that was patched from, of the one that was patched, and with the patch; ``effect``, 0 where nothing came along,
        1 where everything did.

    Raises:
        ValueError: not one of ``from_tokens`` and ``from_positions``; two runs with the same metric; tokens of other
            shape; unknown components; a layer whose scores cannot be read or changed; padded texts; what
            ``position_patching`` refuses.

    Example:
        >>> from tl_posdisent import component_patching, demo_tokens, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=48)
        >>> table = component_patching(model, tokens, "query", from_tokens=tokens.flip(1), layers=[4], progress=False)
        >>> bool((table["effect"].abs() < 1e-4).all())  # a softmax over keys does not see it
        True
    """
    parts = check_parts(component)
    check_metric(metric)
    specs = read_layers(model, layers)
    tokens = check_tokens(model, tokens)
    chosen = select("heads", heads, specs[0].n_heads)
    source = _source(model, tokens, from_tokens, from_positions)
    rows: list[tuple[int, int, float]] = []
    with evaluating(model), tqdm(total=len(specs) * len(chosen), desc="patches", disable=not progress) as bar:
        measured = {
            "source": measure(model, source.tokens, source.hooks, metric, tokens),
            "baseline": measure(model, tokens, [], metric, tokens),
        }
        check_apart(model, measured, "from_tokens" if from_positions is None else "from_positions")
        for spec in specs:
            scores = _scores(model, source, spec)
            for head in chosen:
                value = measure(model, tokens, score_hooks(spec, [head], scores, parts), metric, tokens)
                rows.append((spec.layer, head, value))
                bar.update()
    return as_table(rows, measured)


def _source(model: Any, tokens: Int[Tensor, "batch pos"], from_tokens: Any, from_positions: Any) -> _Run:
    """The run from which components come."""
    if (from_tokens is None) == (from_positions is None):
        raise ValueError("from_tokens or from_positions must be given, and not both")
    if from_positions is not None:
        return _swapped(model, tokens, from_positions)
    other = check_tokens(model, from_tokens)
    if other.shape != tokens.shape:
        raise ValueError(f"from_tokens must have the shape of tokens, {tuple(tokens.shape)}, got {tuple(other.shape)}")
    return _Run(other, [], None)


def _scores(model: Any, source: _Run, spec: AttentionSpec) -> Tensor:
    """A layer's scores, of all heads, in another run; the layers behind it are left out."""
    held: dict[str, Tensor] = {}
    run(model, source.tokens, [*source.hooks, *listen_scores(spec, source.positions, held)], stop=spec.layer + 1)
    return held["scores"]
