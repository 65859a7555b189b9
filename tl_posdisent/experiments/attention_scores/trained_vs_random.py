"""Measures of a trained model beside those of random-weights baselines of the same architecture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from tl_posdisent.models.loading.random_init import random_control
from tl_posdisent.models.reading.model_reading import ModelReading, read_model
from tl_posdisent.models.texts import Texts, Tokens, read_texts
from tl_posdisent.rope.subspace_interactions import INTERACTIONS
from tl_posdisent.rope.variance_decomposition import Numbers
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.validation import check_choice, check_integer, check_seeds

from .additivity import additivity
from .controlled_distance import controlled_distance
from .positional_symbolic_plane import positional_symbolic
from .subspace_patterns import subspace_patterns

_HEAD = ["layer", "head"]


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
    check_integer("sinks", sinks, 0, min(texts.lengths) - 2)
    seeds = check_seeds(seeds)
    specs = reading.rotary(layers, "trained_vs_random")
    for spec in specs:
        spec.require_scale()
    layers = [spec.layer for spec in specs]
    copies = random_control(reading.model, seeds)
    index = _HEAD if by == "head" else _HEAD[:1]
    results = []
    models = (m for group in ([reading], copies) for m in group)
    with progress_bar(models, total=1 + len(seeds), desc="models", disable=not progress) as bar:
        for m in bar:
            measured = _measure(read_model(m, layers), texts, distances, layers, sinks)
            long = measured.groupby(index).mean().reset_index().melt(index, var_name="measure")
            results.append(long.set_index([*index, "measure"])["value"])
    chance = pd.concat(results[1:], axis=1)
    table = pd.DataFrame({"trained": results[0], "random": chance.mean(axis=1), "random_std": chance.std(axis=1)})
    return reading.note(table.reset_index().sort_values(index, kind="stable", ignore_index=True))


def _measure(
    reading: ModelReading, texts: Texts, distances: Numbers | None, layers: list[int], sinks: int
) -> pd.DataFrame:
    """One row per layer and head, one column per measure."""
    common: dict[str, Any] = {"tokens": texts, "layers": layers, "progress": False}
    at: dict[str, Any] = {"distances": distances, "sinks": sinks}
    late = torch.arange(texts.tokens.shape[1], device="cpu") >= sinks
    controlled = controlled_distance(reading, **at, **common).set_index(_HEAD)
    plane = positional_symbolic(reading, sinks=sinks, **common).groupby(_HEAD)
    patterns = subspace_patterns(reading, **at, **common).groupby(_HEAD)
    observed = additivity(reading, mask=(late[:, None] & late) if sinks else None, **common).groupby(_HEAD)
    return pd.DataFrame(
        {
            "r": observed["r"].mean(),
            **{name: controlled[name] for name in ("r_three_axis", "r_two_axis", *INTERACTIONS)},
            "bound": patterns["spread"].sum(min_count=1) ** 2,
            **{name: plane[name].mean() for name in ("positional", "symbolic")},
            "concentration": patterns["key_concentration"].mean(),
        }
    )
