"""Measure the heads of the demo model in the course of its training: ``language_dynamics.csv``.

``python docs/figures/language_dynamics.py FOLDER [STEP …]`` measures the checkpoints ``step-*.safetensors`` of a folder
that ``examples/train_demo_model.py`` has written (all, or those of these steps; some seconds each), and prints the
table of the page on training dynamics. ``python docs/figures/make.py language_dynamics`` draws the figure.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import torch

import tl_posdisent as tp
from tl_posdisent.demo import demo_hf_model
from tl_posdisent.demo.demo_model import load_weights

TABLE = Path(__file__).with_name("language_dynamics.csv")
TEXTS, LENGTH, SINKS = 7, 450, 50


def measured(checkpoint: Path, tokens: torch.Tensor) -> pd.DataFrame:
    """One row per head: r of the text, r and the distance share at controlled distances, and the loss."""
    hf = demo_hf_model()
    load_weights(hf, checkpoint)
    model = tp.bridge_from_hf(hf)
    table = tp.disentanglement(model, tokens, sinks=SINKS, progress=False)
    shares = tp.controlled_distance(model, tokens, sinks=SINKS, progress=False)
    with torch.no_grad():
        loss = model(tokens, return_type="loss").item()
    table = table.merge(shares[["layer", "head", "distance"]], on=["layer", "head"])
    table.insert(0, "step", int(checkpoint.stem.removeprefix("step-")))
    return table.assign(loss=loss)


def row(table: pd.DataFrame) -> str:
    """A line of the page: the step, the loss, and means over the heads of each layer."""
    means = table.groupby("layer")[["r_three_axis", "r_two_axis", "distance"]].mean()
    cells = [" ".join(f"{x:.2f}" for x in means[name]) for name in means]
    return f"| {table['step'].iloc[0]} | {table['loss'].iloc[0]:.2f} | {' | '.join(cells)} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    text = tp.demo_tokens(length=1 + TEXTS * (LENGTH - 1))[0, 1:]
    tokens = torch.cat([torch.zeros(TEXTS, 1, dtype=torch.long), text.view(TEXTS, LENGTH - 1)], 1)
    steps = [int(step) for step in sys.argv[2:]]
    tables = []
    for checkpoint in sorted(Path(sys.argv[1]).glob("step-*.safetensors")):
        if not steps or int(checkpoint.stem.removeprefix("step-")) in steps:
            tables.append(measured(checkpoint, tokens))
            print(row(tables[-1]), flush=True)
    pd.concat(tables).round(4).to_csv(TABLE, index=False)
