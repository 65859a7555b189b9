"""What does running the model in bfloat16 change in its predictions?"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pandas as pd
import torch
from shared.speeches import beginnings


def table(model: Any) -> pd.DataFrame:
    """What running the model in bfloat16 instead of float32 does to predictions: divergence of four texts, in nats."""
    tokens = beginnings(model, 4)
    with torch.no_grad():
        exact, rounded = (
            variant(tokens).float().log_softmax(-1) for variant in (model, deepcopy(model).to(torch.bfloat16))
        )
    kl = (exact.exp() * (exact - rounded)).sum(-1).mean(1)
    return pd.DataFrame({"text": range(len(kl)), "kl": kl.tolist()})
