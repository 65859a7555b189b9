"""Every public function that takes a model refuses the same things in the same words, and leaves the model alone.

The functions are found, not listed: a new one is tested from its first day, and one with an argument of its own is told
below what a good value is. What each of them refuses beyond that is tested beside it.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import zoo
from support.public import public_names
from support.untouched import state

import tl_posdisent

TOKENS = zoo.random_tokens()
FOLDER = tempfile.TemporaryDirectory()
GOOD: dict[str, Any] = {
    "tokens": TOKENS,
    "text": TOKENS,
    "path": Path(FOLDER.name, "report.html"),
    "layer": 0,
    "positions": torch.arange(12) * 2,
    "distance": 3,
    "distances": lambda d: d,
    "kind": "order",
    "fraction": 0.5,
    "noise": 0.1,
    "question": tl_posdisent.experiments.MultipleChoice(TOKENS[0], [TOKENS[1, :2], TOKENS[1, 2:4]], 1),
    "clean_tokens": TOKENS,
    "corrupted_tokens": TOKENS.flip(1),
    "metric": lambda logits, tokens: logits[:, -1, 5],
    "q_rot": torch.zeros(2, 12, 8, 8),
    "k_rot": torch.zeros(2, 12, 4, 8),
    "scores": torch.zeros(2, 8, 12, 12),
    "hooks": [],
    "heads": [(0, 1)],
    "component": "distance",
    "length": 12,
    "lengths": [0, 4, 12],
    "n_sink": 1,
    "window": 4,
    "distance_ceiling": 4,
    "factor": 2,
}

Function = Callable[..., Any]


def functions(*parameters: str) -> list[Function]:
    """Public functions of a model that have these parameters."""
    public = list(public_names().values())
    found = []
    for function in filter(inspect.isfunction, public):
        named = inspect.signature(function).parameters
        synthetic = [p.annotation for p in named.values()][:1] == ["SyntheticModel"]  # these take no other models
        if list(named)[:1] == ["model"] and set(parameters) <= set(named) and not synthetic:
            found.append(function)
    return found


def call(function: Function, model: Any, **changed: Any) -> Any:
    """With good values for all else; what comes lazily is asked for its first."""
    arguments = dict(changed)
    for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
        if parameter.default is parameter.empty and name not in arguments:
            assert name in GOOD, f"say in GOOD what a good {name} of {function.__name__} is"
            arguments[name] = GOOD[name]
        elif name == "progress":
            arguments[name] = False
        elif name == "from_tokens":  # or other positions: one of two
            arguments[name] = TOKENS.flip(1)
    result = function(model, **arguments)
    if isinstance(result, Iterator):
        return next(result)
    enters = hasattr(result, "__enter__") and not isinstance(result, Path)
    return result.__enter__() if enters else result


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
def test_wrong_tokens(function: Function, shared_model: Any) -> None:
    refused(function, shared_model("bridge", "llama-gqa"), [({"tokens": x}, message) for x, message in WRONG_TOKENS])


@cases("layers")
def test_wrong_layers(function: Function, shared_model: Any) -> None:
    wrong = [({"layers": x}, "layers must (be|name)") for x in WRONG_NUMBERS]
    refused(function, shared_model("bridge", "llama-gqa"), wrong)


@cases("heads")
def test_wrong_heads(function: Function, shared_model: Any) -> None:
    wrong = [({"heads": x}, "heads must (be|name)") for x in WRONG_NUMBERS]
    refused(function, shared_model("bridge", "llama-gqa"), wrong)


def refused(function: Function, model: Any, wrong: list[tuple[dict[str, Any], str]]) -> None:
    before = state(model)
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            call(function, model, **arguments)
    assert state(model) == before


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
