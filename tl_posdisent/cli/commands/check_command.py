"""``tl-posdisent check``: every tool tried on a model."""

from __future__ import annotations

import typer

from tl_posdisent.cli import options as o
from tl_posdisent.cli.errors import answering
from tl_posdisent.cli.inputs import device_of, load, name_of
from tl_posdisent.cli.output import check_out, save
from tl_posdisent.cli.screen import line, rows


def check(
    model: o.Model = "demo",
    out: o.Out = None,
    backend: o.Backend = "auto",
    device: o.Device = None,
    dtype: o.Dtype = "float32",
    length: o.Length = None,
    seed: o.Seed = 0,
    progress: o.Progress = True,
) -> None:
    """Try every tool on a model: on short, long and padded texts, and with a KV cache.

    Exit code 1 if a tool runs and does something else than it says; please report the table then.

    Columns:
      tool      which function
      text      its length, padded, or token by token (KV cache)
      verdict   works, refused or wrong
      error     the largest relative error of what must hold
      reason    why refused, or what does not hold

    Examples:
      tl-posdisent check
      tl-posdisent check --model EleutherAI/pythia-70m --dtype bfloat16
    """
    with answering():
        check_out(out)
        from tl_posdisent.experiments.model_check import check_model

        lengths = (12, 48) if length is None else (12, length)
        loaded = load(model, backend=backend, device=device_of(device), dtype=dtype)
        table = check_model(loaded, lengths=lengths, seed=seed, progress=progress)
        save(table, out, f"Every tool tried on {name_of(model)}")
    short = table.assign(error=[f"{x:.0e}" for x in table["error"]], reason=table["reason"].str.slice(0, 80))
    rows(short, f"Every tool tried on {name_of(model)}")
    counts = table["verdict"].value_counts()
    line(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    if "wrong" in counts:
        raise typer.Exit(1)
