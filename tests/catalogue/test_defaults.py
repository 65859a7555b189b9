"""torch's default dtype and default device change no result, sample or weight: everything names its own."""

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
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.experiments import choice_scores
from tl_posdisent.synthetic import Brackets, Reversal, SyntheticConfig, SyntheticModel, TriggerCount, TriggerDistance
from tl_posdisent.synthetic import preset as preset_of
from tl_posdisent.synthetic.model.config import EncodingName

KIND = "bridge"
DTYPES = ("float64", "bfloat16", "float16")
DEFAULTS = (*DTYPES, "meta")
NAMES = [name for name in on_devices.NAMES if name != "bridge_from_hf"]
TASKS = {
    "distance": TriggerDistance(d_vocab=40),
    "distinct": TriggerDistance(d_vocab=80, repeats=False),
    "count": TriggerCount(d_vocab=7, n_triggers=3, min_count=0, max_count=5, min_length=5, max_length=9, n_ctx=12),
    "reversal": Reversal(),
    "balanced": Brackets(),
    "depth": Brackets(question="depth"),
}
SIZES: dict[str, Any] = {"n_layers": 1, "d_model": 48, "n_heads": 3, "d_mlp": 32, "d_vocab": 20, "n_ctx": 16}


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


def state(model: torch.nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("set_default", DEFAULTS)
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_samples(task: Any, set_default: str) -> None:
    def drawn() -> list[Any]:
        drawn = [*task.batch(300, seed=3), *vars(task.split(60, 20, seed=1)).values()]
        return [*drawn, getattr(task, "from_length", 0.0)]

    right = drawn()
    with default(set_default):
        found = drawn()
    for a, b in zip(found, right, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("set_default", DEFAULTS)
@pytest.mark.parametrize("initialisation", ["scaled", "torch"])
@pytest.mark.parametrize("encoding", EncodingName.__args__)
def test_weights(encoding: Any, initialisation: Any, set_default: str) -> None:
    """Float32, and the same numbers in every bit; also of the tables of an encoding."""
    config = SyntheticConfig(**SIZES, n_out=5, encoding=encoding, initialisation=initialisation, seed=1)
    right = state(SyntheticModel(config))
    with default(set_default):
        found = state(SyntheticModel(config))
    assert found.keys() == right.keys()
    for name, x in right.items():
        assert x.dtype == found[name].dtype == torch.float32
        assert torch.equal(x, found[name]), name


@pytest.mark.parametrize("set_default", ["float64", "bfloat16"])
@pytest.mark.parametrize("of", ["small", "medium", "paper"])
def test_weights_of_presets(of: Any, set_default: str) -> None:
    preset = preset_of(of)
    for encoding in preset.encodings:
        for task in preset.tasks:
            right = state(preset.model(encoding, task, seed=2, n_layers=1))
            with default(set_default):
                found = state(preset.model(encoding, task, seed=2, n_layers=1))
            assert all(torch.equal(x, found[name]) for name, x in right.items())
