"""The numbers of the page on the attention ladder: ``python docs/figures/ladder.py FOLDER [demo] [story]``.

Writes one CSV file for each model into the folder. The story model is no part of the project: its weights are read from
the folder that ``POSDISENT_DATA`` names, and without them its table is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import tl_posdisent as tp


def demo() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return the demo model, texts to fit static heads to, and a text to predict."""
    tokens = tp.demo_tokens(length=14 * 160).reshape(14, 160)
    return tp.load_demo_model(), tokens[:6], tokens[6:7]


def story() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return the story model and the same kinds of texts, which it generated."""
    from stories import sample_story, stories_bridge

    texts = torch.cat([sample_story(160, seed) for seed in range(1, 7)])
    return stories_bridge(), texts, sample_story(160, 0)


def main(folder: Path, names: list[str]) -> None:
    """Compute and write the tables of these models."""
    for name in names:
        model, fitted, heldout = {"demo": demo, "story": story}[name]()
        (untrained,) = tp.random_control(model, [0])
        for kind, one in {name: model, f"{name}_untrained": untrained}.items():
            table = tp.attention_ladder(one, fitted, heldout=heldout, unit="all")
            table.to_csv(folder / f"ladder_{kind}.csv", index=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or ["demo", "story"])
