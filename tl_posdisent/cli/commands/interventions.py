"""``tl-posdisent ablate``, ``perturb`` and ``length``: loss under interventions on heads, order and positions."""

from __future__ import annotations

from collections.abc import Callable
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
from tl_posdisent.cli.output import by_head, frame, save


@command(f"{ON_TEXT} layers heads seed progress")
def ablate(
    given: Given,
    metric: Literal["loss", "accuracy"] = Option("loss", help="Of the next token."),
    mode: Literal["zero", "mean", "resample"] = Option(
        "zero", help="Replacement of a head's output: zero, its mean, or another text's output (--texts 2 …)."
    ),
) -> list[str]:
    """Ablate each head and measure the change of loss or accuracy.

    Columns:
      layer, head   the ablated head
      baseline      the metric with all heads (nats, or share correct)
      value         the metric without this head
      effect        value - baseline

    Examples:
      tl-posdisent ablate
      tl-posdisent ablate --metric accuracy --mode mean --out heads.csv
      tl-posdisent ablate --model EleutherAI/pythia-70m --text book.txt --texts 4
    """
    from tl_posdisent.experiments.causal.head_ablation import head_ablation
    from tl_posdisent.experiments.causal.metrics import next_token_loss
    from tl_posdisent.synthetic.analysis.deposit import deposit

    model, tokens, what = given.read()
    table = head_ablation(
        model,
        tokens,
        next_token_loss if metric == "loss" else _next_token_accuracy,
        layers=given.chosen_layers,
        heads=given.chosen_heads,
        mode=mode,
        seed=given.seed,
        progress=given.progress,
    )
    save(table, given.out)
    report = deposit(table, better="lower" if metric == "loss" else "higher")
    title = f"change of {metric} without each head ({mode}): {what}"
    return [*by_head(table, "effect", title, digits=3), repr(report)]


def _next_token_accuracy(logits: Any, tokens: Any) -> Any:
    """The share of next tokens that the model predicts correctly, ``[batch]``."""
    return (logits[:, :-1].argmax(-1) == tokens[:, 1:].to(logits.device)).double().mean(1)


KINDS = ("order", "index", "feature")


@command(f"{ON_TEXT} seed progress")
def perturb(
    given: Given,
    kind: list[str] | None = repeated(KINDS),
    fractions: str = Option("0,0.02,0.1,0.5", help="Of the words or tokens that can move."),
    window: int = Option(1, min=1, help="Largest distance of an exchange."),
    unit: Literal["token", "word"] = Option("token", help="Unit of an exchange."),
    seeds: int = Option(5, min=1, help="Perturbations of each kind, from --seed on."),
) -> list[str]:
    """Measure the added loss if a fraction of a text is perturbed.

    Kinds: the order of the text, the positions that RoPE receives (index), or RoPE's phases (feature).

    Columns:
      kind, fraction          what is exchanged, and how many
      moved, intact           shares: moved; neither it nor the next token
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
    what += f", {seeds} seed{'s' if seeds > 1 else ''}"
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
    sinks: int = Option(4, min=0, help="lambda-mask: keys at the beginning that are always seen."),
    window: int | None = Option(None, min=1, help="lambda-mask: number of last keys seen; default half of --in-range."),
    ceiling: int | None = Option(None, min=1, help="lambda-mask: largest distance that RoPE sees; default the window."),
    factor: float | None = Option(None, help="interpolation: divides positions; default last length / in range."),
) -> list[str]:
    """Measure loss and attention by position in texts beyond the training length, with and without remedies.

    Ways: unmodified (plain), a window and a ceiling on distances (lambda-mask), divided positions (interpolation).

    Columns:
      way, start, stop       the remedy, and the bucket of positions
      loss                   cross entropy of the next token, in nats
      entropy                of the attention, in nats
      largest_score          of each query, averaged
      share_key              variance of the scores that the key alone explains
      mahalanobis, cosine    of attention outputs, to those in range
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
    from tl_posdisent.hooks.length_extension import lambda_mask, position_interpolation
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
