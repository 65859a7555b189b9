"""Commands that change a model's heads and measure its predictions: ablate, effects, intervene, patch, ladder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from typer import Option

from tl_posdisent.cli.options import ON_TEXT, Given, command, one_of, read_text, repeated
from tl_posdisent.cli.output import by_head, frame, save
from tl_posdisent.utils.words import plural


@command(f"{ON_TEXT} layers heads seed progress")
def ablate(
    given: Given,
    metric: Literal["loss", "accuracy"] = Option("loss", help="Loss or accuracy of the next token."),
    mode: Literal["zero", "mean", "resample"] = Option(
        "zero", help="Replacement of a head's output: zero, its mean, or another text's output (--texts 2 …)."
    ),
) -> list[str]:
    """Ablate each head and measure the change of loss or accuracy.

    Columns:
      layer, head   the ablated head
      baseline      the metric of the unmodified model (nats, or share correct)
      value         the metric without this head
      effect        value - baseline

    Examples:
      tl-posdisent ablate
      tl-posdisent ablate --metric accuracy --mode mean --out heads.csv
      tl-posdisent ablate --model EleutherAI/pythia-70m --text book.txt --texts 4
    """
    from tl_posdisent.experiments.causal.head_ablation import head_ablation
    from tl_posdisent.experiments.causal.metrics import next_token_accuracy, next_token_loss
    from tl_posdisent.synthetic.analysis.deposit import deposit

    model, tokens, what = given.read()
    table = head_ablation(
        model,
        tokens,
        next_token_loss if metric == "loss" else next_token_accuracy,
        layers=given.chosen_layers,
        heads=given.chosen_heads,
        mode=mode,
        seed=given.seed,
        progress=given.progress,
    )
    save(table, given.out)
    report = deposit(table, better="lower" if metric == "loss" else "higher")
    title = f"change of {metric} without each head ({mode}): {what}"
    return [*by_head(table, "effect", title, digits=3), repr(report).replace("DepositReport", "drops", 1)]


INTERVENTIONS = ("zero", "mean", "uniform", "first_token", "additive", "distance", "ceiling", "window")


@command(f"{ON_TEXT} layers heads seed progress")
def effects(
    given: Given,
    intervention: list[str] | None = repeated(INTERVENTIONS),
    distance: float = Option(5, help="distance: the distance of all pairs."),
    ceiling: int = Option(8, min=0, help="ceiling: largest distance that RoPE sees."),
    sinks: int = Option(4, min=0, help="window: number of first keys that are always seen."),
    window: int = Option(32, min=1, help="window: number of last keys seen."),
    draws: int = Option(4, min=0, help="Draws of labels for the curvature."),
    exact: int = Option(4, min=0, help="How many heads with the largest divergences to find by exact runs."),
) -> list[str]:
    """Estimate the added loss of interventions on each head, for all heads at once, and run the largest exactly.

    Interventions: ablation (zero, mean), attention that is uniform, all on the first token or additive (distance +
    key), one distance for all pairs, a ceiling on distances, first keys and a window. Default: mean and distance.

    Columns:
      intervention, layer, head   what is done to which head
      first                       first-order effect on the loss (attribution patching), nats
      curvature                   estimate of kl, also the second order of the loss
      estimate                    first + curvature
      exact                       added loss in a run with this head changed (if it was run)
      kl                          divergence of the predictions in that run, nats per token
      first_se, curvature_se, estimate_se, exact_se, kl_se  standard errors over texts

    Examples:
      tl-posdisent effects
      tl-posdisent effects --intervention distance --distance 1 --texts 4 --out effects.csv
      tl-posdisent effects --model EleutherAI/pythia-70m --text book.txt --intervention mean
    """
    names = one_of("intervention", intervention or ["mean", "distance"], INTERVENTIONS)
    from tl_posdisent.experiments.causal.head_effects import head_effects

    model, tokens, what = given.read()
    wide = {"distance": distance, "ceiling": ceiling, "sinks": sinks, "window": window}
    table = head_effects(
        model,
        tokens,
        {name: _intervention(model, tokens, name, wide) for name in names},
        layers=given.chosen_layers,
        heads=given.chosen_heads,
        draws=draws,
        exact=exact,
        seed=given.seed,
        progress=given.progress,
    )
    save(table, given.out)
    shown: list[str] = []
    for name, some in table.groupby("intervention", sort=False):
        effect = some.assign(effect=some["exact"].fillna(some["estimate"]))
        shown += by_head(effect, "effect", f"added loss, {name}, exact or estimated: {what}", digits=3)
        shown.append(f"{name}: {table.attrs['search'][name]['statement']}")
    return [*shown, f"{table.attrs['passes']:.0f} passes"]


def _intervention(model: Any, tokens: Any, name: Any, given: dict[str, Any]) -> Any:
    """Make the hooks of an intervention, on all heads."""
    from tl_posdisent import hooks

    made: dict[str, Callable[[], Any]] = {
        "zero": lambda: hooks.ablate_heads(model, None),
        "mean": lambda: hooks.ablate_heads(model, None, mode="mean", reference=tokens),
        "distance": lambda: hooks.dummy_distance(model, given["distance"]),
        "ceiling": lambda: hooks.remap_distance(model, lambda d: d.clamp(max=given["ceiling"])),
        "window": lambda: hooks.lambda_mask(model, given["sinks"], given["window"], tokens.shape[1]),
    }
    return made[name]() if name in made else hooks.substitute_attention(model, name)


Placed = Literal["reversed", "doubled", "shuffled"]


def _positions(placed: Placed, length: int, seed: int) -> Any:
    """Return positions for RoPE: in reverse order, two apart, or in a random order that keeps the first."""
    import torch

    from tl_posdisent.experiments.causal.metrics import shuffled_order

    there = torch.arange(length, device="cpu")
    return {"reversed": there.flip(0), "doubled": 2 * there, "shuffled": shuffled_order(length, seed)}[placed]


CHANGES = (
    *("ablate_heads", "dummy_distance", "swap_positions", "remap_distance", "position_interpolation", "lambda_mask"),
    *("limit_frequencies", "phase_noise"),
)


@command(f"{ON_TEXT} layers heads seed progress")
def intervene(
    given: Given,
    intervention: list[str] | None = repeated(CHANGES),
    distance: float = Option(5, help="dummy_distance: the distance of all pairs."),
    positions: Placed = Option("reversed", help="swap_positions: the positions that RoPE receives."),
    ceiling: int = Option(8, min=0, help="remap_distance: largest distance that RoPE sees."),
    factor: float = Option(2, help="position_interpolation: divisor of positions."),
    sinks: int = Option(4, min=0, help="lambda_mask: number of first keys that are always seen."),
    window: int = Option(32, min=1, help="lambda_mask: number of last keys seen."),
    low: float | None = Option(None, help="limit_frequencies: lowest frequency kept, in radians per position."),
    high: float | None = Option(0.1, help="limit_frequencies: highest frequency kept, in radians per position."),
    noise: float = Option(1, help="phase_noise: standard deviation of the noise, in radians."),
) -> list[str]:
    """Measure the added loss of interventions on positions, on all chosen heads at once.

    Interventions are functions of tl_posdisent.hooks; ablate_heads, zero for the same heads, is a scale for them.

    Columns:
      intervention            the function and its arguments; unmodified first
      loss                    loss of the next token, nats
      added_loss              minus the loss of the unmodified model
      kl                      KL(unmodified ‖ changed) of the predictions, nats per predicted token
      added_loss_se, kl_se    standard errors over texts or, if these are fewer than ten, parts of them
      accuracy                share of next tokens predicted correctly

    Examples:
      tl-posdisent intervene
      tl-posdisent intervene --intervention dummy_distance --distance 0 --heads L4H2
      tl-posdisent intervene --model smollm2 --intervention remap_distance --ceiling 16 --texts 4 --out cost.csv
    """
    names = one_of("intervention", intervention, CHANGES)
    model, tokens, what = given.read()
    length = tokens.shape[1]
    arguments: dict[str, dict[str, Any]] = {
        "ablate_heads": {"heads": given.chosen_heads},
        "dummy_distance": {"distance": distance},
        "swap_positions": {"positions": _positions(positions, length, given.seed)},
        "remap_distance": {"distances": lambda d: d.clamp(max=ceiling)},
        "position_interpolation": {"factor": factor},
        "lambda_mask": {"sinks": sinks, "window": window, "distance_ceiling": length},
        "limit_frequencies": {"low": low, "high": high},
        "phase_noise": {"noise": noise, "seed": given.seed},
    }
    from tl_posdisent import hooks
    from tl_posdisent.experiments import intervention_losses

    chosen = {"heads": given.chosen_heads, "layers": given.chosen_layers}
    said = {"swap_positions": f"({positions})", "remap_distance": f"(at most {ceiling})"}
    changes = {}
    for name in names:
        made = getattr(hooks, name)(model, **(chosen | arguments[name]))
        changes[name + said[name] if name in said else repr(made).partition(" on ")[0]] = made
    table = intervention_losses(model, tokens, changes, progress=given.progress)
    save(table, given.out)
    return frame(table, f"cost of interventions: {what}", digits=3)


COMPONENTS = ("distance", "query", "key", "residual", "mean")


@command(f"{ON_TEXT} layers heads seed progress")
def patch(
    given: Given,
    source: Path | None = Option(
        None, metavar="FILE|-", allow_dash=True, help="Text of the clean run; default the same text, other positions."
    ),
    activation: Literal["z", "q", "k", "v", "pattern"] = Option("z", help="With --source: what is patched."),
    positions: Placed = Option("reversed", help="Without --source: positions of the corrupted run."),
    vectors: Literal["head", "query", "key", "layer"] = Option(
        "head", help="Without --source: rotated queries, keys, or both; of one head or of a layer."
    ),
    component: list[str] | None = repeated(COMPONENTS),
    answer: str | None = Option(None, help="Metric: logit of this token after the text, minus that of --wrong."),
    wrong: str | None = Option(None, help="The wrong answer; default the mean logit of the vocabulary."),
) -> list[str]:
    """Patch heads of a corrupted run with those of a clean run, and measure how much of the difference they restore.

    With --source, --text is the corrupted text and --source the clean one, of equally many tokens. Without it, both
    runs have the same text, and RoPE receives other positions in the corrupted run. --component patches a component
    of the scores from the source run (text, or positions) into the run on --text instead.

    Columns:
      layer, head           the patched head
      clean, corrupted      the metric of both runs (source, baseline with --source or --component)
      value                 the metric with the patch
      effect                1 if the patch restores the clean run's value, 0 if nothing changes

    Examples:
      tl-posdisent patch
      tl-posdisent patch --positions doubled --vectors layer
      tl-posdisent patch --model smollm2 --text corrupted.txt --source clean.txt --answer " Mary" --wrong " John"
    """
    if wrong is not None and answer is None:
        raise ValueError("--wrong needs --answer")
    clean_text = None if source is None else read_text(source, given.model, "source")
    from tl_posdisent.experiments.causal import patching
    from tl_posdisent.sweeps.sources import cut

    model, tokens, what = given.read()
    options: dict[str, Any] = {"layers": given.chosen_layers, "heads": given.chosen_heads, "progress": given.progress}
    metric = _metric(model, answer, wrong)
    other = None if clean_text is None else cut(model, clean_text, tokens.shape[1], len(tokens))
    if component:
        parts: Any = one_of("component", component, COMPONENTS)
        place = None if other is not None else _positions(positions, tokens.shape[1], given.seed)
        end: dict[str, Any] = {"source": other, "source_positions": place}
        table = patching.component_patching(model, tokens, parts, metric=metric, **end, **options)
        patched = f"{' + '.join(parts)} of scores"
    elif other is not None:
        table = patching.head_patching(model, tokens, other, metric, activation=activation, **options)
        patched = activation
    else:
        place = _positions(positions, tokens.shape[1], given.seed)
        table = patching.position_patching(model, tokens, place, metric, what=vectors, **options)
        patched = f"rotated vectors ({vectors})"
    save(table, given.out)
    ends = ("clean", "corrupted") if "clean" in table else ("source", "baseline")
    values = ", ".join(f"{name} {table[name].iloc[0]:.3f}" for name in ends)
    shown = table if "head" in table else table.assign(head="all heads")
    name = "loss" if answer is None else "logit difference"
    return [*by_head(shown, "effect", f"effect of patched {patched}: {what}"), f"{name}: {values}"]


def _metric(model: Any, answer: str | None, wrong: str | None) -> Any:
    from tl_posdisent.experiments.causal.metrics import logit_difference, next_token_loss

    if answer is None:
        return next_token_loss
    ids = {name: _token(model, name, word) for name, word in (("answer", answer), ("wrong", wrong)) if word is not None}
    return logit_difference(ids["answer"], ids.get("wrong"))


def _token(model: Any, option: str, word: str) -> int:
    ids = model.to_tokens(word, prepend_bos=False)[0].tolist()
    if len(ids) != 1:
        raise ValueError(f"--{option} must be one token of the model, but {word!r} has {len(ids)}")
    return int(ids[0])


_SHOWN = 40  # largest number of verdicts that are listed one by one

RUNGS = ("uniform", "first_token", "distance", "distance+sink", "static", "additive", "banded", "low-rank", "untouched")


@command(f"{ON_TEXT} layers heads seed progress")
def ladder(
    given: Given,
    texts: int = Option(2, min=1, help="Number of consecutive parts of the text."),
    heldout: int | None = Option(
        None, min=0, help="Number of last parts that are predicted, not fitted; default half of them."
    ),
    unit: Literal["head", "layer", "all"] = Option("head", help="What is replaced at a time."),
    rung: list[str] | None = repeated(RUNGS),
    shuffled: bool = Option(True, help="Also rungs fitted to the same tokens in another order."),
    random: bool = Option(False, "--random", help="Also the ladder in a copy with random weights."),
    share: float = Option(0.95, help="Share of what uniform attention changes that a verdict's rung recovers."),
) -> list[str]:
    """Replace attention by additive attention of increasing freedom, and name the simplest that suffices, by head.

    Columns:
      layer, head          what is replaced
      control              none, shuffled (fitted to shuffled tokens) or random (weights)
      rung                 the form of attention, from uniform to untouched
      loss, kl             loss, and divergence from the untouched predictions, nats per predicted token
      recovered …          share of the loss (…_kl: divergence) between uniform (…_mean: mean output) and untouched
      se…, error…          standard errors of shares, of losses and divergences
      parameters, causal   number fitted; whether predictions depend only on earlier tokens

    Examples:
      tl-posdisent ladder --length 128 --layers 4
      tl-posdisent ladder --model smollm2 --unit layer --layers 0,15,29 --texts 4 --out ladder.csv
    """
    from tl_posdisent.experiments.causal.attention_ladder import attention_ladder
    from tl_posdisent.experiments.causal.head_verdicts import head_verdicts

    rungs: Any = one_of("rung", rung, RUNGS)
    given.texts = texts
    last = texts // 2 if heldout is None else heldout
    if last >= texts:
        raise ValueError(f"--heldout must be less than --texts, {texts}, got {last}")
    controls: Any = [name for name, wanted in (("shuffled", shuffled), ("random", random)) if wanted]
    model, tokens, what = given.read()
    table = attention_ladder(
        model,
        tokens[: texts - last],
        heldout=tokens[texts - last :] if last else None,
        layers=given.chosen_layers,
        heads=given.chosen_heads,
        unit=unit,
        rungs=rungs,
        controls=controls,
        seed=given.seed,
        progress=given.progress,
    )
    save(table, given.out)
    means = table.groupby(["control", "rung"], sort=False)[["loss", "kl", "recovered", "recovered_kl"]].mean()
    verdicts = head_verdicts(table, share).rename(columns={"error": "gap_se"})
    counted = ", ".join(f"{n} {verdict}" for verdict, n in verdicts["verdict"].value_counts().items())
    n = len(table[["layer", "head"]].drop_duplicates())
    over = "all heads together" if unit == "all" else f"means over {plural(n, unit)}"
    title = f"rungs, {over}: {what}"
    by_unit = verdicts[["layer", "head", "verdict", "gap", "gap_se"]].dropna(axis=1, how="all").head(_SHOWN)
    told = f"verdicts, and the gap to uniform attention ± its standard error{f', first {_SHOWN}' if n > _SHOWN else ''}"
    return [
        *frame(means.reset_index(), title, digits=3),
        *frame(by_unit, f"{told}:", digits=4),
        f"verdicts: {counted}",
    ]
