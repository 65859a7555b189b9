"""``tl-posdisent fit``: the additive fit of the scores of a text."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tl_posdisent.cli import options as o
from tl_posdisent.cli.errors import answering
from tl_posdisent.cli.inputs import load_and_read, name_of
from tl_posdisent.cli.output import check_out, save
from tl_posdisent.cli.random_baseline import mean_line, together, with_random_baseline
from tl_posdisent.cli.screen import by_head, line
from tl_posdisent.utils.validation import check_indices


def fit(
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
    pool: Annotated[bool, typer.Option(help="One distance profile for all texts.")] = False,
    control: o.Control = 1,
    seed: o.Seed = 0,
    progress: o.Progress = True,
) -> None:
    """Fit attention scores by a distance, a query and a key part: r per layer and head, beside random weights.

    The scores are those of the text itself.

    Columns:
      batch, layer, head   which text and which head
      r, r2, r2_adjusted   correlation of scores and fit, square, adjusted
      share_distance …     share of the variance that one part explains alone
      cells, parameters    number of fitted scores and of free parameters
      weights              trained, or random and the seed

    Examples:
      tl-posdisent fit
      tl-posdisent fit --layers 0-2 --heads 0,3 --out r.html
      tl-posdisent fit --model EleutherAI/pythia-70m --text book.txt --pool
    """
    with answering():
        check_out(out)
        chosen, some = o.whole_numbers("layers", layers), o.whole_numbers("heads", heads)
        from tl_posdisent.experiments.attention_scores.additivity import additivity

        loaded, tokens = load_and_read(
            model, text, backend=backend, device=device, dtype=dtype, length=length, texts=texts
        )

        if some is not None:
            some = check_indices("--heads", some, int(loaded.cfg.n_heads))

        def measure(m: Any) -> Any:
            table = additivity(m, tokens, layers=chosen, pool=pool, progress=progress)
            return table if some is None else table[table["head"].isin(some)].reset_index(drop=True)

        trained, chance = with_random_baseline(measure, loaded, control, seed)
        what = f"{name_of(model)}, {tokens.shape[0]} × {tokens.shape[1]} tokens"
        save(together(trained, chance), out, f"Additive fit of attention scores: {what}")
    by_head(trained, "r", f"r of the three-axis fit, by layer and head: {what}", chance=chance)
    mean_line("r", trained, chance)
    shares = ", ".join(f"{name} {trained[f'share_{name}'].mean():.3f}" for name in ("distance", "query", "key"))
    line(f"share of the variance that each part explains alone: {shares}")
