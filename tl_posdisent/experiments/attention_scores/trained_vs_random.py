"""Comparison of a trained model's measures with random-weights baselines of the same architecture."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable
from math import isnan, nan
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from tl_posdisent.additive.cells import Cells, make_cells
from tl_posdisent.experiments.measuring.measure_layers import measure_layers
from tl_posdisent.hooks.hook_list import Heads, any_heads, pairs_of
from tl_posdisent.models.capture import Captured
from tl_posdisent.models.loading.random_init import Baseline, Scale, described_copies, initial_scales, random_control
from tl_posdisent.models.reading.model_reading import Layers, ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.texts import Texts, Tokens, read_texts
from tl_posdisent.rope.factorial_variance_decomposition import decompose
from tl_posdisent.rope.moments import Moments
from tl_posdisent.rope.positional_symbolic import positional_symbolic_qk
from tl_posdisent.rope.subspaces import INTERACTIONS, subspace_patterns_qk
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.validation import Numbers, check_choice, check_seeds, head_label, listed
from tl_posdisent.utils.words import plural

from .additivity import TextMarginals, cells_of, columns_of_texts, text_marginals

_HEAD = ["layer", "head"]
_OfTexts = tuple[Tensor, Tensor, Moments, TextMarginals, Tensor]  # of texts of equal length
_OF_FITS = ("r", "r_no_distance", "r_held_out")


def above_random(trained: pd.DataFrame, random: pd.DataFrame, column: str) -> str:
    """Describe which heads are above the highest random head of their layer (means over texts)."""
    mean = trained.groupby(_HEAD)[column].mean().dropna()
    copies = random.groupby([*{"weights", "seed"}.intersection(random), *_HEAD])[column].mean()
    limit = copies.groupby("layer").max().reindex(mean.index.get_level_values("layer")).to_numpy()
    above = mean.to_numpy() > limit
    high, low = ([head_label(*place) for place in mean.index[some]] for some in (above, ~above))
    said = f"above the highest random head of their layer: {len(high)} of {plural(len(mean), 'head')}"
    fewer = low if len(low) <= len(high) else high
    named = ", ".join(fewer[:20]) + (" …" if len(fewer) > 20 else "")  # the table lists all
    return said + (f"{', all but' if fewer is low else ','} {named}" if fewer else "")


def trained_vs_random(
    model: Any,
    tokens: Tokens,
    *,
    attention_mask: Tensor | None = None,
    seeds: int | Iterable[int] = 3,
    weights: Baseline = "random",
    std: Scale | Iterable[Scale] = "config",
    by: Literal["head", "layer"] = "head",
    distances: Numbers | None = None,
    layers: Layers = None,
    heads: Heads = None,
    sinks: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Compare additivity and other measures of a model's scores with their random-weights baseline.

    The measures are ``r``, ``r_no_distance`` and (with two or more texts) ``r_held_out`` of ``additivity``, and
    ``positional``, ``symbolic`` of ``positional_symbolic`` (means over texts); ``r_three_axis``, ``r_two_axis``,
    ``distance:key`` and ``distance:query:key`` of ``controlled_distance``; ``bound``, the bound of ``distance:key``
    (``interaction_bound``); and the keys' ``concentration`` (``subspace_patterns``).

    Args:
        model, tokens, attention_mask, distances, layers, heads: as in ``controlled_distance``.
        seeds: number of random copies (``random_control``), or a list of their seeds.
        weights, std: which weights of the copies are random, and their standard deviation, as in ``random_control``.
            Results for random weights depend on ``std``: pass several values to see by how much.
        by: one row per head, or per layer (the mean over its heads, or over those of ``heads``).
        sinks: number of first positions of each text to leave out, as queries and as keys.
        progress: show a progress bar over the models.

    Returns:
        One row per layer (and head), measure and ``std``: ``layer``, (``head``,) ``measure``, ``std`` (NaN for shuffled
        weights); ``trained``; ``random`` and ``random_std``, mean and standard deviation over the copies. A single copy
        has no standard deviation: ``random_std`` is NaN then, and ``table.attrs["random_std"]`` says why.
        ``table.attrs["random weights"]`` describes the copies.

    Raises:
        ValueError: as the functions named above.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model, trained_vs_random
        >>> tokens = demo_tokens(length=128)
        >>> table = trained_vs_random(load_demo_model(), tokens, layers=[4], by="layer", seeds=1, progress=False)
        >>> table = table.set_index("measure")
        >>> bool(table.loc["r_two_axis", "trained"] > table.loc["r_two_axis", "random"])
        True
    """
    check_choice("by", by, ("head", "layer"))
    layers = listed("layers", layers)
    reading = read_model(model, layers)
    texts = read_texts(reading.model, tokens, attention_mask)
    seeds = check_seeds(seeds)
    chosen = any_heads(reading, layers, heads, "trained_vs_random")
    read, pairs = [spec.layer for spec, _ in chosen], pairs_of(chosen)
    scales = [nan] if weights == "shuffled" else initial_scales(reading.model, std)
    copies = random_control(reading.model, seeds, weights=weights, std=std if weights == "shuffled" else scales)
    index = _HEAD if by == "head" else _HEAD[:1]

    tables = []
    with progress_bar(total=1 + len(scales) * len(seeds), desc="models", disable=not progress) as bar:

        def measured(m: Any) -> pd.Series:
            table = _measure(read_model(m, read), texts, distances, pairs, sinks).groupby(index).mean().reset_index()
            measures = [name for name in table if name not in _HEAD]
            bar.update()
            return table.melt(index, measures, var_name="measure").set_index([*index, "measure"])["value"]

        trained = measured(reading)
        for scale in scales:
            chance = pd.concat([measured(m) for m in itertools.islice(copies, len(seeds))], axis=1)
            columns = {"trained": trained, "random": chance.mean(axis=1), "random_std": chance.std(axis=1)}
            tables.append(pd.DataFrame({"std": scale} | columns).reset_index())
    table = pd.concat(tables).sort_values(index, kind="stable", ignore_index=True)
    table.attrs["random weights"] = described_copies(weights, [x for x in scales if not isnan(x)], seeds)
    if len(seeds) == 1:
        table.attrs["random_std"] = "NaN: one copy has no standard deviation; pass seeds=2 or more"
    return reading.note(table)


def _measure(
    reading: ModelReading, texts: Texts, distances: Numbers | None, heads: list[tuple[int, int]], sinks: int
) -> pd.DataFrame:
    """Compute all measures in one pass: one row per head, one column per measure."""
    at, tool = range(texts.longest) if distances is None else distances, "trained_vs_random"

    def measure(layer: Captured, q: Tensor, k: Tensor) -> _OfTexts:
        rotary, scores = layer.spec.require_rotary(tool), layer.scores

        def cells_at(n: int) -> Cells:
            late = torch.arange(n, device=scores.device) >= sinks
            mask = cells_of(layer.spec, late[:, None] & late if sinks else None, n)
            return make_cells((*scores.shape[:-2], n, n), device=scores.device, **mask)

        fitted = text_marginals(texts, torch.arange(len(scores), device=scores.device), scores, cells_at)
        plane = positional_symbolic_qk(q, k, rotary)
        pivot = fitted.read.pivot  # [text, head] in float64
        points = [pivot.new_tensor(plane[x].tolist()).view_as(pivot) for x in ("positional", "symbolic")]
        return q.flatten(0, 1), k.flatten(0, 1), Moments.from_qk(q, k, rotary), fitted, torch.stack(points)

    def table(spec: AttentionSpec, parts: list[_OfTexts]) -> pd.DataFrame:
        queries, keys, of_texts, fitted, points = zip(*parts, strict=True)
        moments, scale = functools.reduce(operator.add, of_texts), spec.require_scale()
        q, k = torch.cat(queries), torch.cat(keys)
        patterns = subspace_patterns_qk(q, k, moments.rotary, at, scale=scale).groupby("head")
        controlled = decompose(moments, at, scale=scale).to_frame().set_index("head")
        fits = columns_of_texts(fitted)
        positional, symbolic = torch.cat(points, 1).nanmean(1).tolist()
        columns = {
            **{name: fits[name].nanmean(0).tolist() for name in _OF_FITS if name in fits},
            **{name: controlled[name] for name in ("r_three_axis", "r_two_axis", *INTERACTIONS)},
            "bound": patterns["spread"].sum(min_count=1) ** 2,
            "positional": positional,
            "symbolic": symbolic,
            "concentration": patterns["key_concentration"].mean(),
        }
        return pd.DataFrame(columns).reset_index()

    return measure_layers(reading, texts, tool, measure, table, heads=heads, sinks=sinks, progress=False, leave=2)
