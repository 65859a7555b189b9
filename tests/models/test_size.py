"""The number of parameters is that of the Hugging Face model, whatever the class that carries it."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import zoo

from tl_posdisent import load_demo_model
from tl_posdisent.demo import demo_hf_model
from tl_posdisent.models.size import count_parameters

pytestmark = pytest.mark.tl4

HOOKED = [name for name in zoo.HOOKED_NAMES if name != "bloom"]  # it has positions that nothing reads
TIED = ("llama-gqa", "neox", "gpt2", "phi3", "gemma3", "falcon", "bloom", "qwen3", "opt")


def few_or_slow(names: Iterable[str]) -> Any:
    few = ("llama-gqa", "neox", "gpt2")
    marked = [name if name in few else pytest.param(name, marks=pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", marked)


def distinct(model: torch.nn.Module) -> int:
    return sum(x.numel() for x in {id(x): x for x in model.parameters()}.values())


@few_or_slow((*zoo.BRIDGE_NAMES, *zoo.HYBRID_NAMES))
def test_a_bridge_has_the_parameters_of_its_model(name: str) -> None:
    expected, model = distinct(zoo.hf_model(name)), zoo.bridge(name)
    state = torch.random.get_rng_state()
    assert count_parameters(model) == expected
    assert distinct(model) > expected or zoo.TL_MAJOR > 3 or name in ("gptj", "phi")  # which have a bias there
    assert torch.equal(torch.random.get_rng_state(), state)


@few_or_slow(TIED)
def test_tied_embeddings_count_once(name: str) -> None:
    tied, untied = (zoo.hf_model(name, tie_word_embeddings=tie) for tie in (True, False))
    assert distinct(untied) - distinct(tied) == untied.get_input_embeddings().weight.numel()
    assert count_parameters(zoo.as_bridge(tied)) == distinct(zoo.hf_model(name, tie_word_embeddings=True))
    assert count_parameters(zoo.as_bridge(untied)) == distinct(zoo.hf_model(name, tie_word_embeddings=False))


@few_or_slow(HOOKED)
def test_a_hooked_transformer_has_its_own(name: str) -> None:
    """Those of its model, and biases of 0 that it adds, and other norms; where embeddings are tied, one copy."""
    model, expected = zoo.hooked(name), distinct(zoo.hf_model(name))
    zeros = sum(x.numel() for x in model.parameters() if x.count_nonzero() == 0)
    assert count_parameters(model) == distinct(model)
    assert count_parameters(model) - zeros == pytest.approx(expected, rel=0.01)


def test_a_model_that_cannot_be_made_again_is_not_counted() -> None:
    """The bridge may have added parameters, so those that are there are not the answer."""

    class Needy(torch.nn.Module):
        def __init__(self, config: Any, more: int) -> None:
            super().__init__()
            self.config, self.weight = config, torch.nn.Parameter(torch.zeros(more))

    wrapped = Needy({}, 7)
    model = SimpleNamespace(original_model=wrapped, parameters=wrapped.parameters)
    with pytest.raises(ValueError, match=r"model must be of a class that builds it .*; Needy failed: .*'more'"):
        count_parameters(model)
    assert count_parameters(load_demo_model(backend="bridge")) == distinct(demo_hf_model())
