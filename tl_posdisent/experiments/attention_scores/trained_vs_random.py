"""Measures of a trained model beside those of random-weights baselines of the same architecture."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from tl_posdisent.additive.fit import fit_additive
from tl_posdisent.models.capture import Captured
from tl_posdisent.models.loading.random_init import random_control
from tl_posdisent.models.reading.model_reading import ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.texts import Texts, Tokens, read_texts
from tl_posdisent.rope.moments import Moments
from tl_posdisent.rope.positional_symbolic import positional_symbolic_qk
from tl_posdisent.rope.subspaces import INTERACTIONS, subspace_patterns_qk
from tl_posdisent.rope.variance_decomposition import Numbers, decompose
from tl_posdisent.utils.tables import progress_bar
from tl_posdisent.utils.validation import check_choice, check_seeds, head_label

from .additivity import cells_of
from .measure_layers import measure_layers

_HEAD = ["layer", "head"]
_OfTexts = tuple[Captured, Moments, Tensor]  # in texts of equal length; ``[measure, text, head]`` of single texts


def above_random(trained: pd.DataFrame, random: pd.DataFrame, column: str) -> str:
    """In words, which heads are above the highest head of their layer at random initialisation, means over texts."""
    mean = trained.groupby(_HEAD)[column].mean().dropna()
    copies = random.groupby([*{"weights", "seed"}.intersection(random), *_HEAD])[column].mean()
    limit = copies.groupby("layer").max().reindex(mean.index.get_level_values("layer")).to_numpy()
    low = [head_label(*place) for place in mean.index[~(mean.to_numpy() > limit)]]
    named = f", all but {', '.join(low[:20])}{' …' if len(low) > 20 else ''}" if low else ""  # the table has all
    return f"above the highest random head of their layer: {len(mean) - len(low)} of {len(mean)} heads{named}"


def trained_vs_random(
    model: Any,
    tokens: Tokens,
    *,
    attention_mask: Tensor | None = None,
    seeds: int | Iterable[int] = 3,
    by: Literal["head", "layer"] = "head",
    distances: Numbers | None = None,
    layers: int | Iterable[int] | None = None,
    sinks: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Compare additivity and other measures of a model's scores with their random-weights baseline.

    The measures are ``r`` of ``additivity`` and ``positional``, ``symbolic`` of ``positional_symbolic`` (means over
    texts); ``r_three_axis``, ``r_two_axis``, ``distance:key`` and ``distance:query:key`` of ``controlled_distance``;
    ``bound`` of ``distance:key`` (``interaction_bound``); and the keys' ``concentration`` (``subspace_patterns``).

    Args:
        model, tokens, attention_mask, distances, layers: as in ``controlled_distance``.
        seeds: random copies (``random_control``): how many, or a list of their seeds.
        by: one row per head, or per layer: the mean over its heads.
        sinks: positions to leave out at the beginning of each text, as queries and as keys.
        progress: show a bar over the models.

    Returns:
        One row per layer (and head) and measure: ``layer``, (``head``,) ``measure``; ``trained``; ``random`` and
        ``random_std``, mean and standard deviation over the copies (NaN for a single one).

    Raises:
        ValueError: what these functions refuse.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model, trained_vs_random
        >>> tokens = demo_tokens(length=128)
        >>> table = trained_vs_random(load_demo_model(), tokens, layers=[4], by="layer", seeds=1, progress=False)
        >>> table = table.set_index("measure")
        >>> bool(table.loc["r_two_axis", "trained"] > table.loc["r_two_axis", "random"])
        True
    """
    check_choice("by", by, ("head", "layer"))
    reading = read_model(model, layers)
    texts = read_texts(reading.model, tokens, attention_mask)
    seeds = check_seeds(seeds)
    layers = [spec.layer for spec in reading.rotary(layers, "trained_vs_random")]
    copies = random_control(reading.model, seeds)
    index = _HEAD if by == "head" else _HEAD[:1]
    results = []
    models = (m for group in ([reading], copies) for m in group)
    with progress_bar(models, total=1 + len(seeds), desc="models", disable=not progress) as bar:
        for m in bar:
            measured = _measure(read_model(m, layers), texts, distances, layers, sinks)
            long = measured.groupby(index).mean().reset_index().melt(index, list(measured)[2:], var_name="measure")
            results.append(long.set_index([*index, "measure"])["value"])
    chance = pd.concat(results[1:], axis=1)
    table = pd.DataFrame({"trained": results[0], "random": chance.mean(axis=1), "random_std": chance.std(axis=1)})
    return reading.note(table.reset_index().sort_values(index, kind="stable", ignore_index=True))


def _measure(
    reading: ModelReading, texts: Texts, distances: Numbers | None, layers: list[int], sinks: int
) -> pd.DataFrame:
    """One row per layer and head, one column per measure; one pass for all of them."""
    at, tool = range(texts.longest) if distances is None else distances, "trained_vs_random"

    def measure(layer: Captured) -> _OfTexts:
        rotary, n = layer.spec.require_rotary(tool), layer.q_rot.shape[1]
        late = torch.arange(n, device=layer.q.device) >= sinks
        fit = fit_additive(layer.scores, **cells_of(layer.spec, late[:, None] & late if sinks else None, n))
        plane = positional_symbolic_qk(layer.q, layer.k, rotary)
        points = (fit.r.new_tensor(plane[x].tolist()).view_as(fit.r) for x in ("positional", "symbolic"))
        by_text = torch.stack([fit.r, *points])
        return layer, Moments.from_qk(layer.q, layer.k, rotary), by_text

    def table(spec: AttentionSpec, parts: list[_OfTexts]) -> pd.DataFrame:
        captured, of_texts, points = zip(*parts, strict=True)
        moments, scale = functools.reduce(operator.add, of_texts), spec.require_scale()
        q, k = (torch.cat([getattr(layer, x).flatten(0, 1) for layer in captured]) for x in ("q", "k"))
        patterns = subspace_patterns_qk(q, k, moments.rotary, at, scale=scale).groupby("head")
        controlled = decompose(moments, at, scale=scale).to_frame().set_index("head")
        r, positional, symbolic = torch.cat(points, 1).nanmean(1).tolist()
        columns = {
            "r": r,
            **{name: controlled[name] for name in ("r_three_axis", "r_two_axis", *INTERACTIONS)},
            "bound": patterns["spread"].sum(min_count=1) ** 2,
            "positional": positional,
            "symbolic": symbolic,
            "concentration": patterns["key_concentration"].mean(),
        }
        return pd.DataFrame(columns).reset_index()

    return measure_layers(reading, texts, tool, measure, table, layers=layers, sinks=sinks, progress=False, leave=2)
