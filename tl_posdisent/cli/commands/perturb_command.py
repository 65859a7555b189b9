"""``tl-posdisent perturb``: perturbed word order, positions and rotary phases."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tl_posdisent.cli import options as o
from tl_posdisent.cli.errors import answering
from tl_posdisent.cli.inputs import load_and_read, name_of
from tl_posdisent.cli.output import check_out, save
from tl_posdisent.cli.screen import rows

KINDS = ("order", "index", "feature")


def perturb(
    model: o.Model = "demo",
    text: o.Text = None,
    out: o.Out = None,
    backend: o.Backend = "auto",
    device: o.Device = None,
    dtype: o.Dtype = "float32",
    length: o.Length = None,
    texts: o.Texts = 1,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="order, index or feature; may be repeated; default all three.", autocompletion=lambda: list(KINDS)
        ),
    ] = None,
    fractions: Annotated[str, typer.Option(help="Of the words or tokens that can move.")] = "0,0.02,0.1,0.5",
    window: Annotated[int, typer.Option(min=1, help="Largest distance of an exchange.")] = 1,
    unit: Annotated[Literal["token", "word"], typer.Option(help="Unit of an exchange.")] = "token",
    seeds: Annotated[int, typer.Option(min=1, help="Perturbations of each kind, from --seed on.")] = 5,
    seed: o.Seed = 0,
    progress: o.Progress = True,
) -> None:
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
    with answering():
        check_out(out)
        parts = o.numbers("fractions", fractions)
        from tl_posdisent.experiments.robustness.perturbation_curve import perturbation_curve

        loaded, tokens = load_and_read(
            model, text, backend=backend, device=device, dtype=dtype, length=length, texts=texts
        )
        table = perturbation_curve(
            loaded,
            tokens,
            o.one_of("kind", kind or KINDS, KINDS),  # type: ignore[arg-type]
            parts,
            range(seed, seed + seeds),
            window=window,
            unit=unit,
            progress=progress,
        )
        what = f"{name_of(model)}, {tokens.shape[0]} × {tokens.shape[1]} tokens, {seeds} seed{'s' if seeds > 1 else ''}"
        save(table, out, f"Perturbed word order and positions: {what}")
    rows(table, f"cost of perturbations: {what}", digits=3)
