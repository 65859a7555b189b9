"""``tl-posdisent ablate``: head ablation, one head at a time."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from tl_posdisent.cli import options as o
from tl_posdisent.cli.errors import answering
from tl_posdisent.cli.inputs import load_and_read, name_of
from tl_posdisent.cli.output import check_out, save
from tl_posdisent.cli.screen import by_head, line


def ablate(
    model: o.Model = "demo",
    text: o.Text = None,
    out: o.Out = None,
    backend: o.Backend = "auto",
    device: o.Device = None,
    dtype: o.Dtype = "float32",
    length: o.Length = None,
    texts: o.Texts = 1,
    layers: o.Layers = None,
    heads: o.Heads = None,
    metric: Annotated[Literal["loss", "accuracy"], typer.Option(help="Of the next token.")] = "loss",
    mode: Annotated[
        Literal["zero", "mean", "resample"],
        typer.Option(help="Replacement of a head's output: zero, its mean, or another text's output (--texts 2 …)."),
    ] = "zero",
    seed: o.Seed = 0,
    progress: o.Progress = True,
) -> None:
    """Ablate each head and measure the change of loss or accuracy.

    Columns:
      layer, head   the ablated head
      baseline      the metric with all heads (nats, or share correct)
      value         the metric without this head
      effect        value - baseline

    Examples:
      tl-posdisent ablate
      tl-posdisent ablate --metric accuracy --mode mean --out heads.html
      tl-posdisent ablate --model EleutherAI/pythia-70m --text book.txt --texts 4
    """
    with answering():
        check_out(out)
        chosen, some = o.whole_numbers("layers", layers), o.whole_numbers("heads", heads)
        from tl_posdisent.experiments.causal.head_ablation import head_ablation
        from tl_posdisent.experiments.causal.metrics import next_token_loss
        from tl_posdisent.synthetic.analysis.deposit import deposit

        loaded, tokens = load_and_read(
            model, text, backend=backend, device=device, dtype=dtype, length=length, texts=texts
        )
        table = head_ablation(
            loaded,
            tokens,
            next_token_loss if metric == "loss" else next_token_accuracy,
            layers=chosen,
            heads=some,
            mode=mode,
            seed=seed,
            progress=progress,
        )
        what = f"{name_of(model)}, {tokens.shape[0]} × {tokens.shape[1]} tokens"
        save(table, out, f"{metric} without single heads ({mode}): {what}")
        report = deposit(table, better="lower" if metric == "loss" else "higher")
    by_head(table, "effect", f"change of {metric} without each head ({mode}): {what}", digits=3)
    for text_line in repr(report).splitlines():
        line(text_line)


def next_token_accuracy(logits: Any, tokens: Any) -> Any:
    """Compute the share of next tokens that the model predicts correctly, ``[batch]``."""
    return (logits[:, :-1].argmax(-1) == tokens[:, 1:].to(logits.device)).double().mean(1)
