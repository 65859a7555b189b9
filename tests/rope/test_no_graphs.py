"""No result of the mathematics holds a graph of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tl_posdisent import fit_additive, fit_additive_qk
from tl_posdisent.rope import Moments, Rotary, decompose


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


ROTARY = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64))


LEARNT = normal(12, 2, 4).requires_grad_(), normal(12, 2, 4, seed=1).requires_grad_()


ATTENDED = torch.einsum("ihd,jhd->hij", *LEARNT)


MEASURED: dict[str, Callable[[], Any]] = {
    "fit_additive": lambda: fit_additive(ATTENDED),
    "fit_additive_qk": lambda: fit_additive_qk(*LEARNT, scale=1.0),
    "Moments.from_qk": lambda: Moments.from_qk(*LEARNT, ROTARY).query,
    "decompose": lambda: decompose(Moments.from_qk(*LEARNT, ROTARY), range(4), scale=1.0),
}


@pytest.mark.parametrize("name", MEASURED)
def test_what_is_measured_holds_no_graph(name: str) -> None:
    """Or a table of results would keep every tensor of the model's pass alive."""
    result = MEASURED[name]()
    tensors = [result] if isinstance(result, torch.Tensor) else [x for x in vars(result).values() if torch.is_tensor(x)]
    assert tensors
    assert not any(x.requires_grad for x in tensors)
    if not isinstance(result, torch.Tensor):
        assert result != MEASURED[name]()  # by identity: of two tensors, equality is not one truth value
