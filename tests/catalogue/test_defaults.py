"""torch's default dtype and default device change no result: everything names its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import on_devices, zoo
from support.lanes import slow
from support.on_devices import Place, a_model, with_model
from support.results import assert_same

import tl_posdisent as tp
from tl_posdisent.experiments import choice_scores

KIND = "bridge"
DTYPES = ("float64", "bfloat16", "float16")
DEFAULTS = (*DTYPES, "meta")
NAMES = [name for name in on_devices.NAMES if name != "bridge_from_hf"]


@contextlib.contextmanager
def default(name: str) -> Iterator[None]:
    """torch's default device, or its default dtype, within the block."""
    try:
        if name == "meta":
            torch.set_default_device(name)
        else:
            torch.set_default_dtype(getattr(torch, name))
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def outcome(name: str) -> Any:
    torch.manual_seed(0)
    return on_devices.outcome(name, KIND, Place(), *([a_model(name, KIND, Place())] if with_model(name) else []))


@functools.cache
def expected(name: str) -> Any:
    return outcome(name)


def _case(name: str, set_default: str) -> Any:
    return pytest.param(name, set_default, marks=[pytest.mark.slow] * with_model(name), id=f"{name}-{set_default}")


# Functions of a model take long: each is tried with the dtype in which weights lose most, some with each other default.
OF_MODELS = [name for name in NAMES if with_model(name)]
CASES = [_case(name, x) for name in NAMES for x in DEFAULTS if not with_model(name) or x == "bfloat16"]
CASES += [_case(name, x) for n, x in enumerate(("float64", "float16", "meta")) for name in OF_MODELS[n::9]]


@pytest.mark.parametrize(("name", "set_default"), CASES)
def test_public_functions(name: str, set_default: str) -> None:
    right = expected(name)
    with default(set_default):
        assert_same(outcome(name), right)


@pytest.mark.parametrize("set_default", ["meta", *slow(["bfloat16"])])
def test_controls_and_texts_as_strings(set_default: str) -> None:
    """What makes copies of a model, and what reads its tokenizer."""
    texts = ["We the people of the United States", "in order to form a more perfect union"]
    question = tp.experiments.MultipleChoice(
        context="We the people of the", choices=[" United States", " union of all"], answer=0
    )

    def results() -> list[Any]:
        model, quiet = tp.load_demo_model(), {"progress": False}
        copies = [next(tp.random_control(model, weights=x)) for x in ("random", "shuffled")]
        return [
            *(copy(tp.demo_tokens(length=16)) for copy in (model, *copies)),
            tp.additivity(model, texts, layers=[0], controls=["foreign keys"], **quiet),
            choice_scores(model, question),
        ]

    right = results()
    with default(set_default):
        found = results()
    assert_same(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("set_default", DEFAULTS)
def test_loaded_models(set_default: str, tmp_path: Path) -> None:
    tokens, hf_model = zoo.random_tokens(), zoo.hf_model("llama-gqa")
    hf_model.save_pretrained(tmp_path)
    right = tp.load_model(tmp_path)(tokens)
    with default(set_default):
        model = tp.load_model(tmp_path)
        assert {x.dtype for x in model.parameters()} == {torch.float32}
        torch.testing.assert_close(model(tokens), right)
        torch.testing.assert_close(getattr(tp, f"{KIND}_from_hf")(hf_model)(tokens), right)
