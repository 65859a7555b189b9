"""Models that rotate long texts by other frequencies than short ones: every tool takes those of the text, or refuses.

The other model has the frequencies of the long text at any length, and the same weights: on that text both compute the
same, so that every public function must find the same in both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import pandas as pd
import pytest
import torch
from support import public_calls, zoo
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent import experiments as ex
from tl_posdisent.hooks.hook_list import Hooks

pytestmark = pytest.mark.usefixtures("unchecked")
ORIGINAL, LENGTH = 16, 28  # tokens of the original context, and of the text
TEXTS = zoo.random_tokens(LENGTH)
LONGROPE = {"rope_type": "longrope", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0, "partial_rotary_factor": 0.25}


def _pair(which: str) -> list[Any]:
    """The model, and the one that always rotates as it does on the text."""
    if which == "phi3 longrope":
        factors: list[Any] = [[1.0] * 4, [1.0, 2.0, 3.0, 4.0]]
        rotations = [LONGROPE | {"short_factor": short, "long_factor": factors[1]} for short in factors]
        return [zoo.bridge("phi3", rope_parameters=x, original_max_position_embeddings=ORIGINAL) for x in rotations]
    base = 500.0 * (4.0 * LENGTH / ORIGINAL - 3.0) ** (4 / (4 - 2))  # 4 rotated coordinates
    fixed = DYNAMIC | {"rope_type": "default", "rope_theta": base}
    return [zoo.bridge("neox", rope_parameters=DYNAMIC, max_position_embeddings=ORIGINAL),
            zoo.bridge("neox", rope_parameters=fixed)]  # fmt: skip


@pytest.fixture(scope="module", params=["phi3 longrope", pytest.param("neox dynamic", marks=pytest.mark.slow)])
def models(request: pytest.FixtureRequest) -> list[Any]:
    pair = _pair(request.param)
    with torch.no_grad():
        assert torch.equal(pair[0](TEXTS), pair[1](TEXTS))
        assert not torch.allclose(pair[0](TEXTS[:, :10]), pair[1](TEXTS[:, :10]), atol=0.1)
    return pair


def _arguments(function: Any, model: Any) -> dict[str, Any]:
    """Arguments that fit the text."""
    named = inspect.signature(function).parameters
    drawn = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {
        "tokens": TEXTS,
        "source": TEXTS.flip(1),
        "positions": torch.arange(LENGTH) * 7 % 23,
        "distances": (lambda d: d.clamp(max=3)) if function is tp.remap_distance else [1, 5, 20],
        "heads": [1, 6],
        "length": LENGTH,
        "fractions": [0.5],
        "seeds": [0],
        "question": ex.MultipleChoice(TEXTS[0, : LENGTH - 2], [TEXTS[1, :2], TEXTS[1, 2:4]], 1),
    }
    if function is tp.hooks.patch_vectors:
        spec = tp.read_attention(model, 0)
        sizes = {"q_rot": spec.n_heads, "k_rot": spec.n_kv_heads}
        given |= {name: torch.randn(2, LENGTH, n, spec.d_head, generator=drawn) for name, n in sizes.items()}
    if function is tp.retrieval_heads:
        given |= {"needles": public_calls.needles_of(TEXTS), "heldout": public_calls.needles_of(TEXTS.flip(1))}
    arguments = {name: value for name, value in given.items() if name in named}
    if function in (tp.ablate_heads, tp.additive_substitution):
        arguments["layers"] = 0
    if "heldout" in named and named["heldout"].default is inspect.Parameter.empty:
        arguments["heldout"] = TEXTS
    if function is tp.head_patching:
        arguments["positions"] = [3, 9]  # tokens that are patched one by one
    return arguments


def _numbers(found: Any, model: Any) -> list[Tensor]:
    """All numbers of a result; of hooks, the logits under them."""
    if isinstance(found, pd.DataFrame):
        return [torch.tensor(found[c].astype(float).tolist()) for c in found.select_dtypes("number")]
    if isinstance(found, Tensor):
        return [found.detach().double()]
    if isinstance(found, Hooks):
        with torch.no_grad():
            return [model.run_with_hooks(TEXTS, fwd_hooks=found)]
    if isinstance(found, dict):
        return [x for each in found.values() for x in _numbers(each, model)]
    if isinstance(found, (list, tuple)):
        return [x for each in found for x in _numbers(each, model)]
    if hasattr(found, "to_frame"):
        return _numbers(found.to_frame(), model)
    if is_dataclass(found):
        return [x for each in fields(found) for x in _numbers(getattr(found, each.name), model)]
    return []


_NAMES = [f.__name__ for f in public_calls.functions()]
_OTHERWISE = {
    "read_model": "describes short texts",
    "read_attention": "describes short texts",
    "check_model": "draws its own texts",
    "applied": "takes hooks",
    "longer_context": "gives the model",
    "random_control": "gives a model",
    "report": "a file",
    "show_interventions": "a widget",
    "show_loss_change": "a widget",
    "length_generalization": "compares with the model's own short texts",
    "component_patching": "below",
    "limit_frequencies": "below",
    "lambda_mask": "below",
}


_QUICK = {"capture", "controlled_distance", "content_position_terms", "patch_vectors", "position_patching",
          "remap_distance", "rope_hadamard", "swap_positions"}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow)
        for name in sorted(set(_NAMES) - set(_OTHERWISE))
    ],
)
def test_every_function_takes_the_rotation_of_the_text(name: str, models: list[Any]) -> None:
    (function,) = [f for f in public_calls.functions() if f.__name__ == name]
    if function is tp.head_labels and models[0].cfg.n_ctx < 2 * LENGTH:
        pytest.skip("the context has no room for a sequence of this length and its repetition")
    found, expected = (
        _numbers(public_calls.call(function, model, **_arguments(function, model)), model) for model in models
    )
    assert expected
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)


_VARIANTS: dict[str, Callable[[Any], Any]] = {
    "components of a run at other positions": lambda model: tp.component_patching(
        model, TEXTS, "distance", source_positions=torch.arange(LENGTH) * 7 % 23, heads=[1, 6], progress=False
    ),
    "two axes": lambda model: tp.additive_substitution(model, TEXTS, axes="two", layers=0, progress=False),
    "two axes as hooks": lambda model: tp.hooks.substitute_additive(model, axes="two"),
    "a mask with a ceiling": lambda model: tp.lambda_mask(model, 1, 4, 6),
}


@pytest.mark.parametrize("name", _VARIANTS)
def test_variants_take_the_rotation_of_the_text(name: str, models: list[Any]) -> None:
    found, expected = (_numbers(_VARIANTS[name](model), model) for model in models)
    assert expected
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("mode", ["drop", "freeze"])
def test_bands_that_hold_other_subspaces_are_refused(mode: Any, models: list[Any]) -> None:
    """A band is one of frequencies, and these are others in the long text; all of them, or none, is the same band."""
    frequencies = [tp.read_attention(model, 0).rotary.frequencies for model in models]
    low = float((frequencies[0][1] * frequencies[1][1]).sqrt())  # between the two of the second subspace
    hooks = tp.limit_frequencies(models[0], low, mode=mode)
    with torch.no_grad():
        models[0].run_with_hooks(TEXTS[:, :12], fwd_hooks=hooks)
        with pytest.raises(ValueError, match="leave other subspaces in this text"):
            models[0].run_with_hooks(TEXTS, fwd_hooks=hooks)
    for band in ((0.9, None), (None, 0)):
        found, expected = (_numbers(tp.limit_frequencies(model, *band, mode=mode), model)[0] for model in models)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_padded_text_has_the_rotation_of_the_longest(models: list[Any]) -> None:
    """A text within the original context beside a long one: the model gives both the long text's rotation."""
    model, mask = models[0], torch.ones_like(TEXTS)
    mask[0, :18] = 0
    with torch.no_grad():
        plain = model(TEXTS, attention_mask=mask)
        for hooks in (
            tp.swap_positions(model, lambda p: p),
            tp.position_interpolation(model, 1.0),
            tp.remap_distance(model, lambda d: d),
            tp.lambda_mask(model, 1, LENGTH, LENGTH),
        ):
            got = model.run_with_hooks(TEXTS, fwd_hooks=hooks, attention_mask=mask)
            torch.testing.assert_close(got[0, 18:], plain[0, 18:], rtol=0, atol=3e-4)
            torch.testing.assert_close(got[1], plain[1], rtol=0, atol=3e-4)
