"""Small synthetic models with large random weights, and all position encodings."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from tl_posdisent.synthetic import SyntheticConfig, SyntheticModel
from tl_posdisent.synthetic.model.config import EncodingName

ENCODINGS = get_args(EncodingName)
every_encoding = pytest.mark.parametrize("encoding", ENCODINGS)
both_directions = pytest.mark.parametrize("causal", [True, False])


def small_model(seed: int = 0, **changed: Any) -> SyntheticModel:
    """Build a model in which every parameter changes the logits."""
    small = {"n_layers": 2, "d_model": 24, "n_heads": 3, "d_mlp": 32, "d_vocab": 20, "n_ctx": 16, "n_out": 5}
    model = SyntheticModel(SyntheticConfig(**(small | {"seed": seed} | changed)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 1.0 if name in ("encoding.table",) else 0.3
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return model.eval()
