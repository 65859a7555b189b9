"""What the tools of the mathematics refuse, and that none of their results holds a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tl_posdisent import fit_additive, fit_additive_qk
from tl_posdisent.additive import score_correlation
from tl_posdisent.rope import (
    Moments,
    Rotary,
    decompose,
    interaction_bound,
    interaction_by_subspace,
    positional_symbolic_qk,
    rope_capacity,
    subspace_patterns_qk,
    toeplitz_share,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


ROTARY = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64))
MOMENTS = Moments.from_qk(normal(12, 2, 4), normal(12, 2, 4, seed=1), ROTARY)


def controlled(tool: Any = decompose, distances: Any = range(4), **more: Any) -> Callable[[], Any]:
    return lambda: tool(MOMENTS, distances, **{"scale": 1.0, **more})


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a component that was not asked for": (
        lambda: controlled(interaction_by_subspace)().share("query:key"),
        "component must be 'distance:key' or 'distance:query:key', got 'query:key'",
    ),
    "an unknown component": (
        controlled(interaction_by_subspace, components=["place"]),
        "components must be 'distance', 'query', 'key', 'distance:query', .* got 'place'",
    ),
    "one word for components": (
        controlled(interaction_by_subspace, components="distance"),
        "components must be a sequence of components, got the one word 'distance'",
    ),
    "no components": (controlled(interaction_by_subspace, components=[]), "components must name at least one"),
    "component of a bound": (
        controlled(interaction_bound, component="place"),
        "component must be 'distance', .*'place'",
    ),
    "component of shares": (lambda: controlled()().share("place"), "component must be 'distance', .* got 'place'"),
    "no moments": (lambda: decompose({}, range(4), scale=1.0), "moments must be Moments .* got dict"),
    "words for distances": (controlled(distances=["far"]), "distances must be finite real numbers"),
    "a table of distances": (controlled(distances=torch.ones(2, 2)), r"distances must be one-dim.* shape \(2, 2\)"),
    "truth values for distances": (controlled(distances=torch.tensor([True])), "distances must be finite real numbers"),
    "complex distances": (controlled(distances=[1j]), "distances must be finite real numbers"),
    "too few weights": (controlled(weights=[1.0]), "weights must be one per distance, got 1 weights for 4 distances"),
    "negative weights": (
        controlled(weights=[1.0, 1, 1, -1]),
        "weights must be non-negative with",
    ),
    "no weight": (controlled(weights=[0.0] * 4), "weights must be non-negative with"),
    "several scales": (controlled(scale=torch.ones(2)), r"scale must be a finite number, got a Tensor of shape \(2,\)"),
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
