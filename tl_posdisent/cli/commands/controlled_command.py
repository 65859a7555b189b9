"""``tl-posdisent controlled``: variance decomposition of the scores at controlled distances."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tl_posdisent.cli import options as o
from tl_posdisent.cli.errors import answering
from tl_posdisent.cli.inputs import load_and_read, name_of
from tl_posdisent.cli.output import check_out, save
from tl_posdisent.cli.random_baseline import mean_line, together, with_random_baseline
from tl_posdisent.cli.screen import by_head, line

_SHOWN = {"r_three_axis": "distance + query + key", "r_two_axis": "(query, distance) + (query, key)"}


def controlled(
    model: o.Model = "demo",
    text: o.Text = None,
    out: o.Out = None,
    backend: o.Backend = "auto",
    device: o.Device = None,
    dtype: o.Dtype = "float32",
    length: o.Length = None,
    texts: o.Texts = 1,
    layers: o.Layers = None,
    sinks: Annotated[int, typer.Option(min=0, help="Positions to leave out at the beginning of each text.")] = 0,
    control: o.Control = 1,
    seed: o.Seed = 0,
    progress: o.Progress = True,
) -> None:
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
    with answering():
        check_out(out)
        chosen = o.whole_numbers("layers", layers)
        from tl_posdisent.experiments.attention_scores.controlled_distance import controlled_distance

        loaded, tokens = load_and_read(
            model, text, backend=backend, device=device, dtype=dtype, length=length, texts=texts
        )

        def measure(m: Any) -> Any:
            return controlled_distance(m, tokens, layers=chosen, sinks=sinks, progress=progress)

        trained, chance = with_random_baseline(measure, loaded, control, seed)
        what = f"{name_of(model)}, {tokens.shape[0]} × {tokens.shape[1]} tokens"
        save(together(trained, chance), out, f"Attention scores at controlled distance: {what}")
    for column, model_of_scores in _SHOWN.items():
        by_head(trained, column, f"r of {model_of_scores}, by layer and head: {what}", chance=chance)
    for column in _SHOWN:
        mean_line(column, trained, chance)
    line("shares: " + ", ".join(f"{name} {trained[name].mean():.3f}" for name in ("distance", "query", "key")))
