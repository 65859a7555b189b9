"""What does distance 5 in one head cost the second copy of random tokens?"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from shared.rows import losses
from shared.speeches import COPY, copies

import tl_posdisent as tp

DRAWS, TEXTS = 3, 2


def table(model: Any) -> pd.DataFrame:
    """Per head: the loss added by distance 5 on the second copy of repeated random tokens, three draws of two texts."""
    tokens = torch.cat([copies(model, TEXTS, seed=seed) for seed in range(DRAWS)])
    heads = [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]
    changes = [[], *(tp.dummy_distance(model, 5, heads=[head]) for head in heads)]
    loss = torch.stack([losses(model, tokens, hooks, COPY + 2) for hooks in changes])
    added = (loss[1:] - loss[0]).unflatten(1, (DRAWS, TEXTS)).mean(2)
    by_seed = pd.DataFrame(added.numpy(), columns=[f"seed {seed}" for seed in range(DRAWS)])
    return pd.DataFrame(heads, columns=["layer", "head"]).join(by_seed)
