"""What is learned: every measure beside its value in the same architecture at random initialisation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.models.forward import check_tokens
from tl_posdisent.models.loading.random_init import random_control
from tl_posdisent.rope.subspace_interactions import INTERACTIONS
from tl_posdisent.rope.variance_decomposition import Numbers

from .additivity import additivity
from .controlled_distance import controlled_distance
from .positional_symbolic_plane import positional_symbolic
from .rotary_layers import check_burn_in, rotary_specs
from .subspace_patterns import subspace_patterns

_HEAD = ["layer", "head"]


def trained_vs_random(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | str,
    *,
    seeds: Iterable[int] = (0, 1, 2),
    by: Literal["head", "layer"] = "head",
    distances: Numbers | None = None,
    layers: Iterable[int] | None = None,
    burn_in: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """The measures of additivity, of the positional–symbolic plane and of the distance patterns, and what chance gives.

    The measures, with the function that has more to say about each:

    * ``r`` of the three-axis fit of the scores as they are in the text (``additivity``; mean over texts);
    * ``r_three_axis``, ``r_two_axis`` and the shares that break additivity, ``distance:key`` and
      ``distance:query:key``, at controlled distances (``controlled_distance``);
    * ``bound``, how large ``distance:key`` could be at most, going by how much each subspace turns and its keys vary
      (``interaction_bound``, ``separate``): a share of the variance too, but it can exceed 1. Random queries are next
      to 0 on average, and so is this bound: what they break is ``distance:query:key``;
    * ``positional`` and ``symbolic`` (``positional_symbolic``; mean over texts);
    * ``concentration``, of the keys' phases, mean over the rotary subspaces (``subspace_patterns``).

    Args:
        model: HookedTransformer, TransformerBridge or alike, with rotary embeddings.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer. The random copies read the same.
        seeds: one random copy each (see ``random_control``).
        by: one row per head, or per layer: the mean over its heads.
        distances: controlled distances, default ``0 … pos - 1``.
        layers: default all.
        burn_in: positions to leave out at the beginning of each text, among queries and keys.
        progress: show a bar over the models.

    Returns:
        One row per layer (and head) and measure: ``layer``, (``head``,) ``measure``; ``trained``; ``random`` and
        ``random_std``, mean and standard deviation over the copies (NaN for a single one).

    Raises:
        ValueError: what these functions refuse; ``burn_in`` that leaves fewer than two positions.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model, trained_vs_random
        >>> tokens = demo_tokens(length=128)
        >>> table = trained_vs_random(load_demo_model(), tokens, layers=[4], by="layer", seeds=[0], progress=False)
        >>> table = table.set_index("measure")
        >>> bool(table.loc["r_two_axis", "trained"] > table.loc["r_two_axis", "random"])
        True
    """
    if by not in ("head", "layer"):
        raise ValueError(f'by must be "head" or "layer", got {by!r}')
    tokens = check_tokens(model, tokens)
    check_burn_in(burn_in, tokens.shape[1], leave=2)
    seeds = list(seeds) if isinstance(seeds, Iterable) else [seeds]
    layers = [spec.layer for spec in rotary_specs(model, layers, "trained_vs_random")]
    copies = random_control(model, seeds)
    index = _HEAD if by == "head" else _HEAD[:1]
    results = []
    models = (m for group in ([model], copies) for m in group)
    for m in tqdm(models, total=1 + len(seeds), desc="models", disable=not progress):
        measured = _measure(m, tokens, distances=distances, layers=layers, burn_in=burn_in)
        long = measured.groupby(index).mean().reset_index().melt(index, var_name="measure")
        results.append(long.set_index([*index, "measure"])["value"])
    chance = pd.concat(results[1:], axis=1)
    table = pd.DataFrame({"trained": results[0], "random": chance.mean(axis=1), "random_std": chance.std(axis=1)})
    return table.reset_index().sort_values(index, kind="stable", ignore_index=True)


def _measure(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    *,
    distances: Numbers | None,
    layers: list[int] | None,
    burn_in: int,
) -> pd.DataFrame:
    """One row per layer and head, one column per measure."""
    common: dict[str, Any] = {"layers": layers, "progress": False}
    at: dict[str, Any] = {"distances": distances, "burn_in": burn_in}
    late = torch.arange(tokens.shape[1]) >= burn_in
    controlled = controlled_distance(model, tokens, **at, **common).set_index(_HEAD)
    plane = positional_symbolic(model, tokens, burn_in=burn_in, **common).groupby(_HEAD)
    patterns = subspace_patterns(model, tokens, **at, **common).groupby(_HEAD)
    observed = additivity(model, tokens, mask=(late[:, None] & late) if burn_in else None, **common).groupby(_HEAD)
    return pd.DataFrame(
        {
            "r": observed["r"].mean(),
            **{name: controlled[name] for name in ("r_three_axis", "r_two_axis", *INTERACTIONS)},
            "bound": patterns["spread"].sum(min_count=1) ** 2,
            **{name: plane[name].mean() for name in ("positional", "symbolic")},
            "concentration": patterns["key_concentration"].mean(),
        }
    )
