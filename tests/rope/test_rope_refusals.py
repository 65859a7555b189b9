"""What all tools of the mathematics refuse, and that none of their results holds a graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tl_posdisent import fit_additive, fit_additive_qk
from tl_posdisent.additive import score_correlation
from tl_posdisent.rope import (
    Moments,
    Rotary,
    decompose,
    from_complex,
    interaction_bound,
    interaction_by_subspace,
    positional_symbolic_qk,
    rope_capacity,
    rotary_from_table,
    rotate,
    subspace_patterns_qk,
    to_complex,
    toeplitz_share,
)
from tl_posdisent.rope.toeplitz import product_spectrum


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


ROTARY = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64))


def some_moments() -> Moments:
    return Moments.from_qk(normal(12, 2, 4), normal(12, 2, 4, seed=1), ROTARY)


MOMENTS = some_moments()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a component that was not asked for": (
        lambda: interaction_by_subspace(MOMENTS, range(4), scale=1.0, components=["distance:key"]).share("query:key"),
        "component must be 'distance:key', got 'query:key'",
    ),
    "one word for components": (
        lambda: interaction_by_subspace(MOMENTS, range(4), scale=1.0, components="distance"),
        "components must be a sequence of components, got the one word 'distance'",
    ),
    "no components": (
        lambda: interaction_by_subspace(MOMENTS, range(4), scale=1.0, components=[]),
        "components must name at least one",
    ),
    "values of a table": (lambda: decompose(MOMENTS, range(4), scale=1.0).to_frame(values="sum"), "values must be"),
    "rows of a table": (lambda: interaction_bound(MOMENTS, range(4), scale=1.0).to_frame(rows="cell"), "rows must be"),
    "no moments": (lambda: decompose({}, range(4), scale=1.0), "moments must be Moments .* got dict"),
    "words for distances": (lambda: decompose(MOMENTS, ["far"], scale=1.0), "distances must be finite real numbers"),
    "a factor of nothing": (
        lambda: Rotary(ROTARY.frequencies, attention_factor=0.0),
        "attention_factor must be a",
    ),
    "angles in whole numbers": (
        lambda: Rotary(ROTARY.frequencies, angle_dtype=torch.int64),
        "angle_dtype must be",
    ),
    "real subspaces": (lambda: from_complex(normal(3, 2, 2), normal(3, 2, 0), ROTARY), "got torch.float64 of shape"),
    "a list for the rest": (lambda: from_complex(to_complex(normal(3, 2, 4), ROTARY)[0], [], ROTARY), "list"),
    "too few axes": (
        lambda: rotate(normal(3, 4), torch.arange(3), ROTARY),
        r"x must have shape \(\*batch, pos, hea",
    ),
    "a base for a rotation": (
        lambda: rotate(normal(3, 2, 4), torch.arange(3), 10000),
        "must be a Rotary, got int",
    ),
    "an array for vectors": (
        lambda: to_complex(normal(3, 2, 4).numpy(), ROTARY),
        "torch.Tensor, got ndarray",
    ),
    "a folder for a file": (lambda: Moments.from_file(Path.cwd()), "is no safetensors file, but a folder"),
    "whole numbers for cosines": (
        lambda: rotary_from_table(torch.ones(4, 2, dtype=torch.int64), torch.ones(4, 2)),
        "cos must be a floating point torch.Tensor, got torch.int64",
    ),
    "vectors of other widths": (lambda: product_spectrum(normal(3, 2), normal(3, 4)), "q and k must have shapes"),
    "sparse scores": (lambda: fit_additive(normal(4, 4).to_sparse()), "scores must be dense .* call to_dense"),
    "scores without values": (lambda: fit_additive(torch.empty(4, 4, device="meta")), "meta tensor, which has no val"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.usefixtures("unchecked")
def test_refusals_say_what_is_needed(what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        call()


LEARNT = normal(12, 2, 4).requires_grad_(), normal(12, 2, 4, seed=1).requires_grad_()


ATTENDED = torch.einsum("ihd,jhd->hij", *LEARNT)


MEASURED: dict[str, Callable[[], Any]] = {
    "fit_additive": lambda: fit_additive(ATTENDED),
    "fit_additive_qk": lambda: fit_additive_qk(*LEARNT, scale=1.0),
    "toeplitz_share": lambda: toeplitz_share(ATTENDED),
    "score_correlation": lambda: score_correlation(ATTENDED, ATTENDED * 2),
    "Moments.from_qk": lambda: Moments.from_qk(*LEARNT, ROTARY).query,
    "decompose": lambda: decompose(Moments.from_qk(*LEARNT, ROTARY), range(4), scale=1.0),
    "interaction_by_subspace": lambda: interaction_by_subspace(Moments.from_qk(*LEARNT, ROTARY), range(4), scale=1.0),
    "interaction_bound": lambda: interaction_bound(Moments.from_qk(*LEARNT, ROTARY), range(4), scale=1.0),
    "subspace_patterns_qk": lambda: subspace_patterns_qk(*LEARNT, ROTARY, range(4), scale=1.0),
    "positional_symbolic_qk": lambda: positional_symbolic_qk(*LEARNT, ROTARY),
    "rope_capacity": lambda: rope_capacity(ROTARY, range(8), LEARNT[0][:8, 0, 0]),
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
