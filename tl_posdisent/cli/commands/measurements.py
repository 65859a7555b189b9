"""Commands that measure a model on a text: fit, controlled, labels, perturb, length, report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from typer import Option

from tl_posdisent.cli.options import (
    ON_TEXT,
    Given,
    command,
    name_of,
    numbers,
    one_of,
    read_text,
    repeated,
    whole_numbers,
)
from tl_posdisent.cli.output import by_head, check_out, frame, save
from tl_posdisent.utils.words import plural

TEXTS = "Number of consecutive parts of the text; default 2 if the text is long enough."


@command(f"{ON_TEXT} layers heads control std seed progress")
def fit(
    given: Given,
    texts: int | None = Option(None, min=1, help=TEXTS),
    pool: bool = Option(False, help="One distance profile for all texts."),
) -> list[str]:
    """Fit attention scores by a distance, a query and a key component: r per layer and head, and for random weights.

    The scores are those of the text itself. With two or more texts, the r shown uses the distance profile of the other
    texts, which separates trained from random weights most clearly.

    Columns:
      batch, layer, head   text and head
      r, r2, r2_adjusted   correlation of scores and fit, its square, adjusted r²
      share_distance …     share of the variance that one component explains alone
      r_no_distance        r of the query and key component alone
      r_held_out           r with the distance profile of the other texts
      weights              trained, or random and the seed
      std                  standard deviation of the random weights

    Examples:
      tl-posdisent fit
      tl-posdisent fit --layers 0-2 --heads 0,3 --out r.csv
      tl-posdisent fit --model EleutherAI/pythia-70m --text book.txt --pool
    """
    from tl_posdisent.experiments.attention_scores.additivity import additivity
    from tl_posdisent.experiments.attention_scores.trained_vs_random import above_random
    from tl_posdisent.models.reading.model_reading import read_model

    given.texts = texts or 0
    model, tokens, what = given.read()
    chosen = read_model(model, given.chosen_layers).heads(given.chosen_layers, given.chosen_heads)

    def measure(m: Any) -> Any:
        table = additivity(m, tokens, layers=list(chosen), pool=pool, progress=given.progress)
        wanted = [head in chosen[layer] for layer, head in zip(table["layer"], table["head"], strict=True)]
        return table[wanted].reset_index(drop=True)

    trained, chance = _beside_random(measure, model, given)
    shares = ", ".join(f"{name} {trained[f'share_{name}'].mean():.3f}" for name in ("distance", "query", "key"))
    column, means = "r", "r of the three-axis fit"
    if "r_held_out" in trained:
        column, means = "r_held_out", "r with the distance profile of the other texts"
    return [
        *by_head(trained, column, f"{means}, by layer and head: {what}", chance=chance),
        *(_mean(x, trained, chance) for x in dict.fromkeys([column, "r"])),
        *([] if chance.empty else [above_random(trained, chance, column)]),
        f"share of the variance that each component explains alone: {shares}",
    ]


_MODELS = {"r_three_axis": "distance + query + key", "r_two_axis": "(query, distance) + (query, key)"}


@command(f"{ON_TEXT} layers control std seed progress")
def controlled(
    given: Given,
    sinks: int = Option(0, min=0, help="Number of first positions of each text to leave out."),
) -> list[str]:
    """Decompose the variance of scores over all combinations of queries, keys and distances, by layer and head.

    The variance is computed in closed form, for rotary models only.

    Columns:
      layer, head             the head
      mean, total             mean and variance of its scores
      distance, query, key    shares of the variance (main effects)
      distance:query …        shares of the interactions
      r_three_axis            correlation of scores with distance + query + key
      r_two_axis              the same with (query, distance) + (query, key)
      weights                 trained, or random and the seed
      std                     standard deviation of the random weights

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
    """Measure the model and ``--control`` random initialisations of it, and save both in one table.

    Its column ``weights`` is ``trained``, or ``random`` and the seed; ``std`` is that of the random weights.
    """
    import pandas as pd

    from tl_posdisent.models.loading.random_init import initial_scale, random_control

    trained = measure(model).assign(weights="trained", std=float("nan"))
    seeds = range(given.seed, given.seed + given.control)
    scales = [initial_scale(model, given.chosen_std)] if seeds else []
    fresh = random_control(model, seeds, std=scales) if seeds else []
    chance = [measure(m).assign(weights=f"random {s}", std=scales[0]) for s, m in zip(seeds, fresh, strict=True)]
    save(pd.concat([trained, *chance], ignore_index=True), given.out)
    return trained, pd.concat(chance, ignore_index=True) if chance else trained.iloc[:0]


def _mean(column: str, trained: Any, chance: Any) -> str:
    """Describe a column's mean, lowest and highest value over all heads, and its mean at random initialisation."""
    r, heads = trained[column], len(trained[["layer", "head"]].drop_duplicates())
    drawn = f" (standard deviation {chance['std'].iloc[0]:.3g})" if len(chance) else ""
    at_random = f"; at random initialisation{drawn} {chance[column].mean():.3f}" if len(chance) else ""
    return f"mean {column} {r.mean():.3f} ({r.min():.3f}…{r.max():.3f}) over {heads} heads{at_random}"


@command(f"{ON_TEXT} layers control std seed progress")
def labels(
    given: Given,
    local: int = Option(8, min=1, help="Number of last keys that count as local."),
    sinks: int = Option(4, min=0, help="streaming: number of first keys that are always seen."),
    window: int | None = Option(None, min=1, help="streaming: last keys seen; default a quarter of the text."),
    streaming: bool = Option(True, help="Added loss of a head that sees only sinks and a window; slow."),
    exact: int = Option(16, min=0, help="Number of heads with the largest estimates of streaming that are run."),
    threshold: float = Option(0.5, help="Share of the way from random weights to 1 that a label needs."),
) -> list[str]:
    """Label heads: previous token, duplicate token, induction, first token, local; beside random weights.

    Duplicate tokens and induction are measured on repeated random tokens, everything else on the text.

    Columns:
      layer, head, label    the head, and the labels that it reaches
      previous_token …      attention to the previous token, same token before, token after it, first token, last keys
      entropy               entropy of the attention, nats
      streaming             added loss if this head sees only first keys and a window, nats per token
      streaming_exact       whether that was run, or estimated
      …_random              the same, mean over --control copies with random weights

    Examples:
      tl-posdisent labels
      tl-posdisent labels --model smollm2 --length 128 --no-streaming --out labels.csv
    """
    from tl_posdisent.experiments.attention_scores.head_labels import head_labels

    model, tokens, what = given.read()
    table = head_labels(
        model,
        tokens,
        layers=given.chosen_layers,
        local=local,
        sinks=sinks,
        window=window,
        streaming=streaming,
        exact=exact,
        threshold=threshold,
        seed=given.seed,
        seeds=range(given.seed, given.seed + given.control),
        std=given.chosen_std,
        progress=given.progress,
    )
    save(table, given.out)
    return _labelled(table, what)


def _labelled(table: Any, what: str) -> list[str]:
    """Format the heads of each label, and each measure's mean and largest value beside random weights."""
    import pandas as pd

    from tl_posdisent.utils.validation import head_label

    named = [head_label(*place) for place in zip(table["layer"], table["head"], strict=True)]
    heads: dict[str, list[str]] = {}
    for name, label in zip(named, table["label"], strict=True):
        heads.setdefault(label or "none", []).append(name)
    counted = sorted(heads.items(), key=lambda item: (item[0] == "none", -len(item[1])))
    shown = [f"{label}: {len(some)} ({' '.join(some[:12])}{' …' if len(some) > 12 else ''})" for label, some in counted]
    rows = []
    for measure in [name for name in table if f"{name}_random" in table or name in _MEASURES]:
        if measure.endswith("_exact"):
            continue
        value = table[measure]
        random = table[f"{measure}_random"].mean() if f"{measure}_random" in table else float("nan")
        rows.append((measure, value.mean(), value.max(), named[int(value.argmax())], random))
    summary = pd.DataFrame(rows, columns=["measure", "mean", "largest", "head", "random"])
    return [*frame(summary, f"measures by which heads are labelled: {what}", digits=3), *shown]


_MEASURES = ("previous_token", "duplicate_token", "induction", "first_token", "local", "entropy", "streaming")


KINDS = ("order", "index", "feature")


@command(f"{ON_TEXT} seed progress")
def perturb(
    given: Given,
    kind: list[str] | None = repeated(KINDS),
    fractions: str = Option("0,0.02,0.1,0.5", help="Fractions of the words or tokens that can move."),
    window: int = Option(1, min=1, help="Largest distance of an exchange, in units."),
    unit: Literal["token", "word"] = Option("token", help="Unit of an exchange."),
    seeds: int = Option(5, min=1, help="Number of perturbations of each kind, from --seed on."),
) -> list[str]:
    """Measure the added loss if a fraction of a text is perturbed.

    Kinds: the order of the text, the positions that RoPE receives (index), or RoPE's phases (feature).

    Columns:
      kind, fraction          kind, and fraction of units exchanged
      moved, intact           shares of positions: moved; not moved, nor the next
      perplexity, accuracy    of the next token, at all positions
      added_loss, kl          at intact positions, in nats
      …_se                    standard error over seeds

    Examples:
      tl-posdisent perturb
      tl-posdisent perturb --kind order --kind index --fractions 0,0.1,1
      tl-posdisent perturb --model EleutherAI/pythia-70m --text book.txt
    """
    kinds: Any = one_of("kind", kind, KINDS)
    parts, drawn = numbers("fractions", fractions), range(given.seed, given.seed + seeds)
    from tl_posdisent.experiments.robustness.perturbation_curve import perturbation_curve

    model, tokens, what = given.read()
    what += f", {plural(seeds, 'seed')}"
    options: dict[str, Any] = {"window": window, "unit": unit, "progress": given.progress}
    table = perturbation_curve(model, tokens, kinds, parts, drawn, **options)
    save(table, given.out)
    return frame(table, f"cost of perturbations: {what}", digits=3)


WAYS = ("plain", "lambda-mask", "interpolation")


@command("model text out backend device dtype texts layers progress")
def length(
    given: Given,
    lengths: str | None = Option(None, help="Edges of the position buckets; default 1/8, 1/2, 1, 1.5 and 2 contexts."),
    in_range: int | None = Option(None, min=1, help="Training length; default the context, or the first bucket's end."),
    way: list[str] | None = repeated(WAYS),
    sinks: int = Option(4, min=0, help="lambda-mask: number of first keys that are always seen."),
    window: int | None = Option(None, min=1, help="lambda-mask: number of last keys seen; default half of --in-range."),
    ceiling: int | None = Option(None, min=1, help="lambda-mask: largest distance that RoPE sees; default the window."),
    factor: float | None = Option(None, help="interpolation: divisor of positions; default last length / in range."),
) -> list[str]:
    """Measure loss and attention by position in texts beyond the training length, with and without remedies.

    Ways: unmodified (plain), a window and a ceiling on distances (lambda-mask), divided positions (interpolation).

    Columns:
      way, start, stop       the remedy, and the bucket of positions
      loss                   cross-entropy of the next token, in nats
      entropy                entropy of the attention, in nats
      largest_score          largest score of a query, averaged over queries
      share_key              share of the scores' variance that the key explains
      mahalanobis, cosine    attention outputs compared with those in range
      outside                share of outputs beyond 99 % of those in range

    Examples:
      tl-posdisent length
      tl-posdisent length --lengths 64,256,512,1024 --way lambda-mask --window 128
      tl-posdisent length --model EleutherAI/pythia-70m --text book.txt
    """
    ways, edges = one_of("way", way, WAYS), whole_numbers("lengths", lengths)
    words = read_text(given.text, given.model)
    import pandas as pd

    from tl_posdisent.experiments.robustness.length_generalization import length_generalization
    from tl_posdisent.hooks.lambda_mask import lambda_mask
    from tl_posdisent.hooks.positions import position_interpolation
    from tl_posdisent.sweeps.sources import cut

    model = given.load()
    context = int(model.cfg.n_ctx)
    edges = edges or [context // 8, context // 2, context, context * 3 // 2, context * 2]
    tokens = cut(model, words, edges[-1] + 1, given.texts)
    end = in_range
    if end is None:
        end = context if edges[0] + 3 <= context <= edges[-1] else edges[min(1, len(edges) - 1)]
    wide = max(1, end // 2) if window is None else window
    remedies: dict[str, Callable[[], Any]] = {
        "plain": lambda: None,
        "lambda-mask": lambda: lambda_mask(model, sinks, wide, wide if ceiling is None else ceiling),
        "interpolation": lambda: position_interpolation(model, max(1.0, edges[-1] / end) if factor is None else factor),
    }
    options: dict[str, Any] = {"in_range": end, "layers": given.chosen_layers, "progress": given.progress}
    tables = {name: length_generalization(model, tokens, edges, remedies[name](), **options) for name in ways}
    measured = pd.concat([table.assign(way=name)[["way", *table]] for name, table in tables.items()], ignore_index=True)
    what = f"{name_of(given.model)}, {given.texts} × {edges[-1]} tokens, {end} in range"
    save(measured, given.out)
    return frame(measured, f"by position: {what}")


SECTIONS = ("additivity", "distance", "shares", "subspaces", "labels", "heads", "perturbation", "ablation", "ladder")


@command(f"{ON_TEXT} layers heads control std seed progress")
def report(
    given: Given,
    texts: int | None = Option(None, min=1, help=TEXTS),
    out: Path = Option(Path("report.html"), "--out", help="File for the page: .html."),
    section: list[str] | None = repeated(SECTIONS),
    title: str | None = Option(None, help="Title of the page."),
) -> list[str]:
    """Write all measurements of a model and a text to one HTML page that works offline, and print its path.

    Each section explains its figures, and the page contains the command that created it.

    Examples:
      tl-posdisent report
      tl-posdisent report --layers 0,4 --title "Layers 0 and 4" --out layers.html
      tl-posdisent report --model EleutherAI/pythia-70m --text book.txt
    """
    check_out(out, (".html",))
    sections: Any = one_of("section", section, SECTIONS) if section else None
    given.texts = texts or 0
    model, tokens, _ = given.read()
    from tl_posdisent.page.build import report as write_report

    path = write_report(
        model,
        tokens,
        out,
        layers=given.chosen_layers,
        heads=given.chosen_heads,
        control=given.control,
        std=given.chosen_std,
        sections=sections,
        title=title,
        seed=given.seed,
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),  # as typed, to be run again
        progress=given.progress,
    )
    return [str(path)]
