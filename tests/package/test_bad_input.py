"""Every public function that takes a model refuses the same things in the same words, and leaves the model alone.

The functions are found, not listed: a new one is tested from its first day, and one with an argument of its own is told
in `support/public_calls.py` what a good value is. What each of them refuses beyond that is tested beside it.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support import zoo
from support.public_calls import TOKENS, Function, call, functions
from support.untouched import state

import tl_posdisent


def cases(*parameters: str) -> Any:
    found = functions(*parameters)
    assert found
    return pytest.mark.parametrize("function", found, ids=lambda function: function.__name__)


pytestmark = pytest.mark.usefixtures("unchecked")


@cases()
def test_other_models(function: Function) -> None:
    """Those of Hugging Face too, which are not wrapped in silence."""
    for model in (torch.nn.Linear(2, 2), zoo.hf_model("llama"), None, "gpt2", object):
        kind = type(model).__name__
        message = f"model must be a HookedTransformer, a TransformerBridge or another model .* got {kind}"
        with pytest.raises(ValueError, match=message):
            call(function, model)


WRONG_TOKENS = [
    (TOKENS.float(), "tokens must be text or an integer tensor of shape .* got torch.float32"),
    (TOKENS * 1j, "tokens must be text or an integer tensor of shape .* got torch.complex64"),
    (TOKENS > 30, r"tokens must have shape .* got torch.bool of shape \(2, 12\)"),
    (TOKENS.tolist(), "tokens must be text or an integer tensor of shape .* got list"),
    (None, "tokens must be text or an integer tensor of shape .* got NoneType"),
    (TOKENS[None], r"tokens must have shape \(pos,\) or \(batch, pos\) .* got torch.int64 of shape \(1, 2, 12\)"),
    (TOKENS[0, 0], r"tokens must have shape .* got torch.int64 of shape \(\)"),
    (TOKENS[:, :1], r"tokens must have shape .* at least two positions, got torch.int64 of shape \(2, 1\)"),
    (TOKENS[:0], r"tokens must have shape .* got torch.int64 of shape \(0, 12\)"),
    (TOKENS + 58, r"tokens must be ids from 0 to 60, got \d+ … \d+"),
    (TOKENS - 30, r"tokens must be ids from 0 to 60, got -\d+ … \d+"),
    ("a text", "tokens were given as text, but the model has no tokenizer: pass token ids"),
    (["a text", "and one"], "tokens were given as text, but the model has no tokenizer: pass token ids"),
]
WRONG_NUMBERS = [[8], [-9], [True], [0.0], ["0"], "0", [], [1, 1]]  # of layers and of heads


@cases("tokens")
def test_wrong_tokens(function: Function, shared_reading: Any) -> None:
    optional = inspect.signature(function).parameters["tokens"].default is None
    wrong = [({"tokens": x}, message) for x, message in WRONG_TOKENS if not (optional and x is None)]
    refused(function, shared_reading("bridge", "llama-gqa"), wrong)


@cases("layers")
def test_wrong_layers(function: Function, shared_reading: Any) -> None:
    wrong = [({"layers": x}, "layers must (be|name)") for x in WRONG_NUMBERS]
    refused(function, shared_reading("bridge", "llama-gqa"), wrong)


@cases("heads")
def test_wrong_heads(function: Function, shared_reading: Any) -> None:
    wrong = [({"heads": x}, "heads must (be|name)") for x in WRONG_NUMBERS]
    refused(function, shared_reading("bridge", "llama-gqa"), wrong)


def refused(function: Function, reading: Any, wrong: list[tuple[dict[str, Any], str]]) -> None:
    """The first by the model itself, and then by its reading, which costs no forward passes."""
    model = reading.model
    before = state(model)
    reads = function.__module__.startswith("tl_posdisent.models")
    given = [model, *[model if reads else reading] * (len(wrong) - 1)]
    for one, (arguments, message) in zip(given, wrong, strict=True):
        with pytest.raises(ValueError, match=message):
            call(function, one, **arguments)
    assert state(model) == before


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
@cases()
def test_good_input_leaves_no_trace_either(function: Function, kind: str, name: str, shared_model: Any) -> None:
    """Nor do the values in ``GOOD`` stand in the way of the refusals above."""
    model = shared_model(kind, name)
    with torch.no_grad():
        plain = model(TOKENS)
    before = state(model)
    arguments = {"distances": [1, 2]} if "distances" in inspect.signature(function).parameters else {}
    if function is tl_posdisent.remap_distance:
        arguments = {}
    if function is tl_posdisent.hooks.applied:
        with function(model, []):
            pass
    else:
        result = call(function, model, **arguments)
        del result
    assert state(model) == before
    with torch.no_grad():
        assert torch.equal(model(TOKENS), plain)
