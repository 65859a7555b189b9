"""Laws of each intervention by itself: the oracle, other heads and layers, gradients, half precision, errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import TOKENS, TOOLS, TOOLS_FOR_ANY_LENGTH, case, edited, every_way, logits, mixed_of
from support.lanes import slow
from support.untouched import state
from torch import Tensor

from tl_posdisent.hooks import applied

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]
EVERY_TOOL = pytest.mark.parametrize("tool", TOOLS)
FITTED = ["three axes", "two axes", "attention", "component", "scores"]  # in whose gradients the fit is a constant
# Edits of the rotation, which are exact where it is.
ROTATING = ["swap", "dummy", "remap", "interpolate", "freeze", "drop", "noise", "lambda", "vectors"]


@every_way
def test_every_tool_is_the_oracles_on_its_heads(kind: str, name: str, shared_model: Any) -> None:
    """Other heads, also those that share their keys, are the same to the last bit."""
    model = shared_model(kind, name)
    plain = mixed_of(model, [])
    for tool, make in TOOLS.items():
        for heads in (list(range(8)), [2, 3], [1, 6])[:: 1 if name == "llama-gqa" else 2]:
            hooks = make(model, layers=[0], heads=heads)
            expected, got = edited(model, [case(tool, model, heads)]), mixed_of(model, hooks)
            others = [h for h in range(8) if h not in heads]
            assert (got - expected)[:, heads].abs().max() < 1e-4, (tool, heads)
            assert torch.equal(got[:, others], plain[:, others]), (tool, heads)
            assert (got - plain)[:, heads].abs().amax((0, 2, 3)).min() > 1e-3, (tool, heads)


@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool not in ("vectors", "scores")])  # these name a layer
def test_only_the_chosen_layers_change(tool: str, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    late = TOOLS[tool](model, layers=[1], heads=[3, 6])
    assert torch.equal(mixed_of(model, late), mixed_of(model, []))
    assert not torch.equal(mixed_of(model, late, 1), mixed_of(model, [], 1))


@EVERY_TOOL
def test_an_intervention_is_a_value(tool: str, shared_model: Any) -> None:
    """Nothing of it can be set once it is made."""
    interventions = TOOLS[tool](shared_model("bridge", "llama-gqa"), layers=[0]).interventions
    for value in (*interventions, *(x.edit for x in interventions)):
        for field in dataclasses.fields(value):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, field.name, getattr(value, field.name))
    assert interventions


@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool not in FITTED])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_gradients_are_finite_differences(kind: str, name: str, tool: str) -> None:
    model = zoo.load(kind, name)
    parameter = next(p for p in model.parameters() if p.shape[0] == zoo.VOCAB)  # the embedding
    with applied(model, TOOLS[tool](model, layers=[0], heads=[1, 6])):
        (gradient,) = torch.autograd.grad(model(TOKENS).double().pow(2).mean(), parameter)
        step = 1e-3 * gradient / gradient.norm()
        with torch.no_grad():
            parameter.add_(step)
            up = model(TOKENS).double().pow(2).mean()
            parameter.sub_(2 * step)
            down = model(TOKENS).double().pow(2).mean()
    torch.testing.assert_close((up - down) / (2 * step.norm()), gradient.norm().double(), rtol=2e-2, atol=0)


@EVERY_TOOL
@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow([torch.float16])])
def test_half_precision_is_as_near_as_its_rounding(tool: str, dtype: torch.dtype, shared_model: Any) -> None:
    exact = shared_model("bridge", "llama-gqa")
    model = zoo.as_bridge(zoo.hf_model("llama-gqa").to(dtype))
    rounding = (logits(exact, []) - logits(model, []).float()).norm()
    for heads in (list(range(8)), [1, 6]):
        got = logits(model, TOOLS[tool](model, layers=[0], heads=heads))
        assert got.dtype == dtype
        assert (got.float() - logits(exact, TOOLS[tool](exact, layers=[0], heads=heads))).norm() < 3 * rounding


@EVERY_TOOL
def test_after_an_error_the_model_is_as_before(tool: str, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    plain, before = logits(model, []), state(model)

    def stop(x: Tensor, hook: Any) -> None:
        raise ValueError("stop")

    hooks = TOOLS[tool](model, layers=[0], heads=[1])
    for where in ("blocks.0.attn.hook_pattern", "blocks.1.attn.hook_z"):
        with pytest.raises(ValueError, match="stop"):
            logits(model, [*hooks, (where, stop)])
        assert state(model) == before
        assert torch.equal(logits(model, []), plain)


@pytest.mark.parametrize("tool", [tool for tool in ROTATING if tool in TOOLS_FOR_ANY_LENGTH])
@pytest.mark.parametrize(("kind", "name"), [("bridge", name) for name in ("gpt2", "bloom")])
def test_models_without_rotary_are_refused(kind: str, name: str, tool: str, shared_model: Any) -> None:
    with pytest.raises(ValueError, match=r"needs rotary position embeddings .* but layer 0 of"):
        TOOLS_FOR_ANY_LENGTH[tool](shared_model(kind, name))
