"""``tl-posdisent fit``: how additive the attention scores of a text are."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

from tl_posdisent.cli.inputs import load_and_read, read_heads, read_layers, read_std, title_of
from tl_posdisent.cli.options import (
    Backend,
    Control,
    Device,
    Dtype,
    Heads,
    Layers,
    Length,
    Model,
    Out,
    Progress,
    Seed,
    Std,
    TextFile,
    Texts,
)
from tl_posdisent.cli.output import answering, check_out, grid, number, save, show
from tl_posdisent.utils.words import plural

_HEADS_SHOWN = 12


def fit(
    model: Model = "demo",
    text: TextFile = None,
    out: Out = None,
    backend: Backend = "auto",
    device: Device = None,
    dtype: Dtype = "float32",
    length: Length = None,
    texts: Texts = None,
    layers: Layers = None,
    heads: Heads = None,
    pool: Annotated[bool, Option(help="One distance profile for all texts.")] = False,
    control: Control = 1,
    std: Std = "config",
    seed: Seed = 0,
    progress: Progress = True,
) -> None:
    """Fit attention scores by a distance, a query and a key component: r per layer and head, and for random weights.

    The scores are those of the text itself. With two or more texts, the r shown uses the distance profile of the other
    texts, which separates trained from random weights most clearly.

    Columns:
      batch, layer, head   text and head
      r, r2, r2_adjusted   correlation of scores and fit, its square, adjusted r²
      share_distance …     share of the variance that one component explains alone
      r_no_distance        r of the query and key component alone
      r_held_out           r with the distance profile of the other texts
      weights, seed        trained; or random, and the seed
      std                  standard deviation of the random weights

    Examples:
      tl-posdisent fit
      tl-posdisent fit --layers 0-2 --heads 0,3 --out r.csv
      tl-posdisent fit --model EleutherAI/pythia-70m --text book.txt --pool
    """
    with answering():
        check_out(out)
        chosen_layers, chosen_heads, scale = read_layers(layers), read_heads(heads), read_std(std)
        loaded, words = load_and_read(model, text, backend, device, dtype, chosen_layers, chosen_heads)
        from tl_posdisent.experiments.attention_scores.additivity import additivity
        from tl_posdisent.experiments.measuring.random_copies import beside_random
        from tl_posdisent.models.loading.random_init import initial_scale
        from tl_posdisent.models.reading.model_reading import read_model
        from tl_posdisent.models.running.cut_text import cut_text

        tokens = cut_text(loaded, words, length=length, texts=texts)

        def measure(m: Any) -> Any:
            return additivity(m, tokens, layers=chosen_layers, heads=chosen_heads, pool=pool, progress=progress)

        scale = initial_scale(loaded, scale) if control else float("nan")
        seeds = range(seed, seed + control)
        table = beside_random(read_model(loaded), {"fit": measure}, seeds, scale)["fit"]
        table["std"] = table["weights"].map({"random": scale})
        save(table, out)
        lines = _shown(table, title_of(model, tokens))
    show(lines)


def _shown(table: Any, what: str) -> list[str]:
    """Format r by layer and head, its means beside those of random weights, and the shares of the components."""
    from tl_posdisent.experiments.measuring.random_copies import above_random, by_weights

    trained, random = by_weights(table)
    chance = table.iloc[:0] if random is None else random
    column, means = "r", "r of the three-axis fit"
    if "r_held_out" in trained:
        column, means = "r_held_out", "r with the distance profile of the other texts"
    shares = ", ".join(f"{name} {number(trained[f'share_{name}'].mean(), 3)}" for name in ("distance", "query", "key"))
    return [
        *_by_head(trained, chance, column, f"{means}, by layer and head: {what}"),
        *(_mean(x, trained, chance) for x in dict.fromkeys([column, "r"])),
        *([] if random is None else [above_random(trained, random, column)]),
        f"share of the variance that each component explains alone: {shares}",
    ]


def _by_head(table: Any, chance: Any, column: str, title: str) -> list[str]:
    """Format one row per layer: heads (or the lowest and highest of many), their mean, and the mean of ``chance``."""
    import pandas as pd

    heads = table.pivot_table(values=column, index="layer", columns="head", aggfunc="mean")
    shown = heads
    if len(heads.columns) > _HEADS_SHOWN:
        shown = pd.DataFrame({"lowest": heads.min(axis=1), "highest": heads.max(axis=1)})
    shown = shown.assign(mean=heads.mean(axis=1))
    shown["random"] = [chance.loc[chance["layer"] == layer, column].mean() for layer in heads.index]
    rows = [[str(layer), *(number(float(x)) for x in row)] for layer, row in shown.iterrows()]
    return grid(title, dict.fromkeys(["layer", *map(str, shown.columns)], True), rows)


def _mean(column: str, trained: Any, chance: Any) -> str:
    """Describe a column's mean, lowest and highest value over all heads, and its mean at random initialisation."""
    r, heads = trained[column], len(trained[["layer", "head"]].drop_duplicates())
    if r.isna().all():
        return f"{column} is undefined in all {plural(heads, 'head')}: too few tokens, or scores that do not vary"
    drawn = f" (standard deviation {chance['std'].iloc[0]:.3g})" if len(chance) else ""
    at_random = f"; at random initialisation{drawn} {number(chance[column].mean(), 3)}" if len(chance) else ""
    return f"mean {column} {r.mean():.3f} ({r.min():.3f}…{r.max():.3f}) over {plural(heads, 'head')}{at_random}"
