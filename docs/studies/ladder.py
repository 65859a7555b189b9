"""How much loss do the rungs of the attention ladder recover in the demo model and the story model?"""

from __future__ import annotations

import pandas as pd
import torch
from shared.stories import sample_story, stories_bridge

import tl_posdisent as tp


def main() -> None:
    """Print the page's table: the share of the loss recovered where all heads are replaced."""
    tokens = tp.demo_tokens(length=14 * 160).reshape(14, 160)
    stories = torch.cat([sample_story(160, seed) for seed in range(7)])
    cases = {"story model": (stories_bridge(), stories[1:], stories[:1])}
    cases["demo model"] = (tp.load_demo_model(), tokens[:6], tokens[6:7])
    columns = {}
    for name, (model, fitted, heldout) in cases.items():
        table = tp.attention_ladder(model, fitted, heldout=heldout, unit="all", progress=False)
        for control, label in (("none", name), ("shuffled", f"{name}, shuffled")):
            columns[label] = table[table["control"] == control].set_index("rung")["recovered"]
    print(pd.DataFrame(columns).loc[["distance", "static", "additive"]].round(2).to_string())
