"""``tl-posdisent length``: texts beyond the training length."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tl_posdisent.cli import options as o
from tl_posdisent.cli.errors import answering
from tl_posdisent.cli.inputs import cut, load_with_text, name_of
from tl_posdisent.cli.output import check_out, save
from tl_posdisent.cli.screen import rows

WAYS = ("plain", "lambda-mask", "interpolation")


def length(
    model: o.Model = "demo",
    text: o.Text = None,
    out: o.Out = None,
    backend: o.Backend = "auto",
    device: o.Device = None,
    dtype: o.Dtype = "float32",
    lengths: Annotated[
        str | None,
        typer.Option(help="Edges of the buckets of positions; default 1/8, 1/2, 1, 1.5 and 2 contexts."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=8, help="Tokens per text, in place of --lengths: the end of the last bucket."),
    ] = None,
    in_range: Annotated[
        int | None,
        typer.Option(min=1, help="The training length; default the context, or the first bucket's end."),
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(
            help="plain, lambda-mask or interpolation; may be repeated; default all three.",
            autocompletion=lambda: list(WAYS),
        ),
    ] = None,
    sinks: Annotated[int, typer.Option(min=0, help="lambda-mask: keys at the beginning that are always seen.")] = 4,
    window: Annotated[
        int | None, typer.Option(min=1, help="lambda-mask: how many last keys are seen; default half of --in-range.")
    ] = None,
    ceiling: Annotated[
        int | None, typer.Option(min=1, help="lambda-mask: the largest distance that RoPE sees; default the window.")
    ] = None,
    factor: Annotated[
        float | None, typer.Option(help="interpolation: positions are divided by it; default last length / in range.")
    ] = None,
    texts: o.Texts = 1,
    layers: o.Layers = None,
    progress: o.Progress = True,
) -> None:
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
      tl-posdisent length --length 800
      tl-posdisent length --lengths 64,256,512,1024 --way lambda-mask --window 128
      tl-posdisent length --model EleutherAI/pythia-70m --text book.txt
    """
    with answering():
        check_out(out)
        if length is not None and lengths is not None:
            raise ValueError("--length and --lengths must not be given together: both end the last bucket")
        ways = o.one_of("way", way or WAYS, WAYS)
        chosen, edges = o.whole_numbers("layers", layers), o.whole_numbers("lengths", lengths)
        import pandas as pd

        from tl_posdisent.experiments.robustness.length_generalization import length_generalization
        from tl_posdisent.hooks.length_extension import lambda_mask, position_interpolation

        loaded, words = load_with_text(model, text, backend=backend, device=device, dtype=dtype)
        context = int(loaded.cfg.n_ctx)
        usual = [context // 8, context // 2, context, context * 3 // 2, context * 2]
        if edges is None:
            edges = usual if length is None else [*(edge for edge in usual if edge < length), length]
            edges = edges if len(edges) > 1 else [edges[0] // 2, edges[0]]
        tokens = cut(loaded, words, edges[-1] + 1, texts)
        end = (
            in_range
            if in_range is not None
            else (context if edges[0] + 3 <= context <= edges[-1] else edges[min(1, len(edges) - 1)])
        )
        wide = max(1, end // 2) if window is None else window
        tables = []
        for name in ways:
            hooks: Any = None
            if name == "lambda-mask":
                hooks = lambda_mask(loaded, sinks, wide, wide if ceiling is None else ceiling)
            elif name == "interpolation":
                hooks = position_interpolation(loaded, max(1.0, edges[-1] / end) if factor is None else factor)
            table = length_generalization(loaded, tokens, edges, hooks, in_range=end, layers=chosen, progress=progress)
            table.insert(0, "way", name)
            tables.append(table)
        measured = pd.concat(tables, ignore_index=True)
        what = f"{name_of(model)}, {texts} × {edges[-1]} tokens, {end} in range"
        save(measured, out, f"Texts longer than those of the training: {what}")
    rows(measured, f"by position: {what}")
