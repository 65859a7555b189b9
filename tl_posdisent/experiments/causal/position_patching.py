"""Patch rotated vectors, or parts of scores, of single heads between runs at different positions or on other texts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pandas as pd
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.hooks.patch import Keys, MovedPart, check_parts, score_hooks, vector_hooks
from tl_posdisent.hooks.planning.chosen_heads import Heads, Layers, any_heads, rotary_heads
from tl_posdisent.hooks.positions import real_tensor, swap_positions
from tl_posdisent.models.reading.forward import Hook, evaluating, run
from tl_posdisent.models.reading.model_reading import ModelReading, read_model
from tl_posdisent.models.reading.rotated_qk import listen_scores, listen_vectors
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.texts import TextGroup, Texts, Tokens, read_texts
from tl_posdisent.utils.validation import check_choice

from .metrics import Metric, as_table, check_apart, check_metric, measure, next_token_loss, read_pair

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

    The *clean* run has the positions 0, 1, 2 …; in the *corrupted* one RoPE receives others, in every layer
    (``swap_positions``). Then one head at a time receives its rotated vectors of the clean run, while all else stays
    corrupted. As in ``transformer_lens.patching``, 0 is the corrupted run and 1 the clean one::

        effect = (value - corrupted) / (clean - corrupted)

    One forward pass for each run and each row (one per key head for ``"key"``); the queries and keys of the layers
    asked for are held meanwhile. Hooks of your own on the model act in every run. Dropout is off meanwhile.

    Args:
        model: a model with rotary embeddings, or its ``read_model``.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer: one, or a list of any lengths.
        attention_mask: 1 at tokens, 0 at padding, for padded ids. Each text is run without its padding.
        positions: what RoPE sees in the corrupted run: ``(pos,)``, counted from each text's first token, or
            ``(batch, pos)``, laid out like ``tokens``.
        metric: a function of ``(logits [batch, pos, vocab], tokens [batch, pos])`` that returns a number or one for
            each text, of which the mean counts. At padding its logits are NaN. Default: the mean loss of each text's
            next tokens, in nats.
        what: what is moved: queries and keys of a ``"head"``, its ``"query"`` or its ``"key"`` alone, or both of all
            heads of a ``"layer"``.
        keys: where heads share keys, ``"group"`` moves the key head's, which all heads of the group then see: by
            ``"key"`` they all have the same effect. ``"head"`` moves them for the one head alone, so that ``"head"``
            restores this head's scores and no others.
        direction: ``"denoise"`` moves from the clean run into the corrupted one, ``"noise"`` the other way. The effect
            is on the same scale, so that noise in vain leaves 1.
        layers: layers that are patched, default all that rotate. The corrupted run sees other positions in all.
        heads: query heads that are patched, default all: of each of these layers, or pairs ``(layer, head)``.
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
        check_choice(name, option, get_args(options))
    check_metric(metric)
    reading = read_model(model)
    model, chosen = reading.model, rotary_heads(reading, layers, heads, "position_patching")
    texts = read_texts(model, tokens, attention_mask)
    runs = [_Runs.of(reading, texts, group, positions, direction) for group in texts.groups]
    specs = [spec for spec, _ in chosen]
    with evaluating(model):
        measured = {
            name: measure(model, texts, [run.hooks(name, specs) for run in runs], metric, texts)
            for name in ("clean", "corrupted")
        }
        check_apart(model, measured, "positions")
        rows: list[tuple[int, int, float]] = []
        for spec, patched, reported in tqdm(_units(chosen, what, keys), desc="patches", disable=not progress):
            hooks = [run.patched(spec, patched, what, keys) for run in runs]
            value = measure(model, texts, hooks, metric, texts)
            rows += [(spec.layer, head, value) for head in reported]
    return reading.note(as_table(rows, measured).drop(columns="head" if what == "layer" else []))


@dataclass(frozen=True)
class _Runs:
    """The run that is patched from and the one that is patched, of texts of equal length."""

    corrupting: list[Hook]
    positions: Tensor
    direction: Direction
    held: dict[int, dict[str, Tensor]]  # vectors of the run that is patched from, by layer

    @classmethod
    def of(cls, reading: ModelReading, texts: Texts, group: TextGroup, positions: Any, direction: Direction) -> _Runs:
        place = positions_of(texts, group, positions)
        return cls(swap_positions(reading, place), place, direction, {})

    @property
    def _source(self) -> str:
        return "clean" if self.direction == "denoise" else "corrupted"

    def _of(self, name: str) -> tuple[list[Hook], Tensor | None]:
        return ([], None) if name == "clean" else (self.corrupting, self.positions)

    def hooks(self, name: str, specs: Sequence[AttentionSpec]) -> list[Hook]:
        """Those of a run as it is; of the source they keep its vectors, too."""
        hooks, positions = self._of(name)
        if name != self._source:
            return hooks
        self.held.update({spec.layer: {} for spec in specs})
        return [*hooks, *(hook for spec in specs for hook in listen_vectors(spec, positions, self.held[spec.layer]))]

    def patched(self, spec: AttentionSpec, heads: list[int], what: What, keys: Keys) -> list[Hook]:
        """Those of the run that is patched, with the vectors of the other."""
        hooks, _ = self._of("corrupted" if self._source == "clean" else "clean")
        q, k = self.held[spec.layer]["q"], self.held[spec.layer]["k"]
        vectors = None if what == "key" else q, None if what == "query" else k
        return [*hooks, *vector_hooks(spec, heads, *vectors, keys)]


def positions_of(texts: Texts, group: TextGroup, positions: Any) -> Tensor:
    """Positions of texts of equal length, from those of the batch: ``(pos,)`` or ``(batch, pos)``."""
    place = real_tensor("positions", positions)
    if place.ndim in (1, 2) and place.shape[-1] != texts.tokens.shape[1]:
        raise ValueError(
            f"positions must have shape (pos,) or (batch, pos) with pos = {texts.tokens.shape[1]}, got "
            f"{tuple(place.shape)}"
        )
    if place.shape == texts.tokens.shape:
        return group.cut(place)
    return place[: group.tokens.shape[1]] if place.ndim == 1 else place


def _units(
    chosen: Sequence[tuple[AttentionSpec, list[int]]], what: What, keys: Keys
) -> list[tuple[AttentionSpec, list[int], list[int]]]:
    """What is patched at once: a layer, heads, and the heads of which the result is reported."""
    if what == "layer":
        return [(spec, heads, [-1]) for spec, heads in chosen]
    if what != "key" or keys == "head":
        return [(spec, [head], [head]) for spec, heads in chosen for head in heads]
    units = []
    for spec, heads in chosen:
        for group in sorted({spec.key_head(head) for head in heads}):
            members = [head for head in heads if spec.key_head(head) == group]
            units.append((spec, members, members))
    return units


def component_patching(
    model: Any,
    tokens: Tokens,
    component: MovedPart | Collection[MovedPart] = "distance",
    *,
    attention_mask: Tensor | None = None,
    from_tokens: Int[Tensor, "batch pos"] | str | None = None,
    from_positions: Tensor | Sequence[float] | None = None,
    metric: Metric = next_token_loss,
    layers: Layers = None,
    heads: Heads = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Patch one additive component of each head's scores from a run on other tokens or at other positions.

    Scores are a sum of ``mean``, ``distance``, ``query``, ``key`` and ``residual`` (the three-axis fit of each text and
    head, with the gauge of ``AdditiveFit``). In a run on ``tokens``, the *baseline*, one head at a time gets a
    component that its scores have in the *source*, a run on other tokens or at other positions::

        effect = (value - baseline) / (source - baseline)

    One forward pass for each row, and for each layer a part of one. The scores of one layer are held meanwhile.

    Args:
        model: HookedTransformer, TransformerBridge or alike, or its ``read_model``; with rotary embeddings for
            ``from_positions``.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer: one, or a list of any lengths.
        attention_mask: 1 at tokens, 0 at padding, for padded ids. Each text is run without its padding.
        component: ``"distance"``, ``"query"``, ``"key"``, ``"residual"``, ``"mean"`` or several of them together; all
            five are the scores themselves. A softmax ignores ``"query"`` and ``"mean"``: their effect is 0, except
            beside an attention sink.
        from_tokens: tokens of the run from which the component comes, texts of the same lengths; ids are padded as
            ``tokens`` are.
        from_positions: or its positions, as in ``position_patching``.
        metric: as in ``position_patching``. Its tokens are ``tokens`` in all three runs.
        layers: default all.
        heads: query heads, default all: of each of these layers, or pairs ``(layer, head)``.
        progress: show a bar.

    Returns:
        One row per layer and head: ``layer``, ``head``; ``source``, ``baseline`` and ``value``, the metric of the run
        that was patched from, of the one that was patched, and with the patch; ``effect``, 0 for the result of the
        baseline, 1 for that of the source.

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
    reading = read_model(model)
    model, chosen = reading.model, any_heads(reading, layers, heads)
    texts = read_texts(model, tokens, attention_mask)
    source, hooks, positions = _source(reading, texts, from_tokens, from_positions, attention_mask)
    rows: list[tuple[int, int, float]] = []
    n_rows = sum(len(heads) for _, heads in chosen)
    with evaluating(model), tqdm(total=n_rows, desc="patches", disable=not progress) as bar:
        measured = {
            "source": measure(model, source, hooks, metric, texts),
            "baseline": measure(model, texts, [[] for _ in texts.groups], metric, texts),
        }
        check_apart(model, measured, "from_tokens" if from_positions is None else "from_positions")
        for spec, some in chosen:
            scores = [_scores(model, *run, spec) for run in zip(source.groups, hooks, positions, strict=True)]
            for head in some:
                patches = [score_hooks(spec, [head], theirs, parts) for theirs in scores]
                rows.append((spec.layer, head, measure(model, texts, patches, metric, texts)))
                bar.update()
    return reading.note(as_table(rows, measured))


def _source(
    reading: ModelReading, texts: Texts, from_tokens: Any, from_positions: Any, attention_mask: Any
) -> tuple[Texts, list[list[Hook]], list[Tensor | None]]:
    """The run from which components come: its texts, and hooks and positions for each group of them."""
    if (from_tokens is None) == (from_positions is None):
        raise ValueError("from_tokens or from_positions must be given, and not both")
    if from_positions is None:
        other = read_pair(reading.model, texts, ("from_tokens", "tokens"), from_tokens, attention_mask)
        return other, [[] for _ in other.groups], [None for _ in other.groups]
    places = [positions_of(texts, group, from_positions) for group in texts.groups]
    return texts, [swap_positions(reading, place) for place in places], [*places]


def _scores(
    model: Any, group: TextGroup, hooks: Sequence[Hook], positions: Tensor | None, spec: AttentionSpec
) -> Tensor:
    """A layer's scores, of all heads, in another run; the layers behind it are left out."""
    held: dict[str, Tensor] = {}
    run(model, group.tokens, [*hooks, *listen_scores(spec, positions, held)], stop=spec.layer + 1)
    return held["scores"]
