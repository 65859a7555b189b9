"""``tl-posdisent fit`` and ``controlled``: how additive attention scores are, beside random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typer import Option

from tl_posdisent.cli.options import ON_TEXT, Given, command
from tl_posdisent.cli.output import by_head, save


@command(f"{ON_TEXT} layers heads control seed progress")
def fit(
    given: Given,
    pool: bool = Option(False, help="One distance profile for all texts."),
) -> list[str]:
    """Fit attention scores by a distance, a query and a key component: r per layer and head, beside random weights.

    The scores are those of the text itself.

    Columns:
      batch, layer, head   which text and which head
      r, r2, r2_adjusted   correlation of scores and fit, square, adjusted
      share_distance …     share of the variance that one component explains alone
      cells, parameters    number of fitted scores and of free parameters
      weights              trained, or random and the seed

    Examples:
      tl-posdisent fit
      tl-posdisent fit --layers 0-2 --heads 0,3 --out r.csv
      tl-posdisent fit --model EleutherAI/pythia-70m --text book.txt --pool
    """
    from tl_posdisent.experiments.attention_scores.additivity import additivity
    from tl_posdisent.utils.validation import check_heads

    model, tokens, what = given.read()
    chosen = check_heads(given.chosen_layers, given.chosen_heads, int(model.cfg.n_layers), int(model.cfg.n_heads))

    def measure(m: Any) -> Any:
        table = additivity(m, tokens, layers=list(chosen), pool=pool, progress=given.progress)
        wanted = [head in chosen[layer] for layer, head in zip(table["layer"], table["head"], strict=True)]
        return table[wanted].reset_index(drop=True)

    trained, chance = _beside_random(measure, model, given)
    shares = ", ".join(f"{name} {trained[f'share_{name}'].mean():.3f}" for name in ("distance", "query", "key"))
    return [
        *by_head(trained, "r", f"r of the three-axis fit, by layer and head: {what}", chance=chance),
        _mean("r", trained, chance),
        f"share of the variance that each component explains alone: {shares}",
    ]


_MODELS = {"r_three_axis": "distance + query + key", "r_two_axis": "(query, distance) + (query, key)"}


@command(f"{ON_TEXT} layers control seed progress")
def controlled(
    given: Given,
    sinks: int = Option(0, min=0, help="Positions to leave out at the beginning of each text."),
) -> list[str]:
    """Decompose the variance of scores with every query at every key and distance, by layer and head.

    The variance over all combinations is computed in closed form; rotary models only.

    Columns:
      layer, head             which head
      mean, total             mean and variance of its scores
      distance, query, key    shares of the variance (main effects)
      distance:query …        shares of the interactions
      r_three_axis            correlation of scores with distance + query + key
      r_two_axis              the same with (query, distance) + (query, key)
      weights                 trained, or random and the seed

    Examples:
      tl-posdisent controlled
      tl-posdisent controlled --layers 0,4 --control 3 --out shares.parquet
      tl-posdisent controlled --model EleutherAI/pythia-70m --text book.txt
    """
    from tl_posdisent.experiments.attention_scores.controlled_distance import controlled_distance

    model, tokens, what = given.read()

    def measure(m: Any) -> Any:
        return controlled_distance(m, tokens, layers=given.chosen_layers, sinks=sinks, progress=given.progress)

    trained, chance = _beside_random(measure, model, given)
    shown: list[str] = []
    for column, fitted in _MODELS.items():
        shown += by_head(trained, column, f"r of {fitted}, by layer and head: {what}", chance=chance)
    shares = ", ".join(f"{name} {trained[name].mean():.3f}" for name in ("distance", "query", "key"))
    return [*shown, *(_mean(column, trained, chance) for column in _MODELS), f"shares: {shares}"]


def _beside_random(measure: Callable[[Any], Any], model: Any, given: Given) -> tuple[Any, Any]:
    """Measure the model and ``--control`` random initialisations of it, and save both tables as one, with a column
    ``weights``: ``trained``, or ``random`` and the seed."""
    import pandas as pd

    from tl_posdisent.models.loading.random_init import random_control

    trained, seeds = measure(model).assign(weights="trained"), range(given.seed, given.seed + given.control)
    fresh = random_control(model, seeds) if seeds else []
    chance = [measure(m).assign(weights=f"random {s}") for s, m in zip(seeds, fresh, strict=True)]
    save(pd.concat([trained, *chance], ignore_index=True), given.out)
    return trained, pd.concat(chance, ignore_index=True) if chance else trained.iloc[:0]


def _mean(column: str, trained: Any, chance: Any) -> str:
    """A column's mean, lowest and highest value over all heads, and its mean at random initialisation."""
    r, heads = trained[column], len(trained[["layer", "head"]].drop_duplicates())
    at_random = f"; at random initialisation {chance[column].mean():.3f}" if len(chance) else ""
    return f"mean {column} {r.mean():.3f} ({r.min():.3f}…{r.max():.3f}) over {heads} heads{at_random}"
