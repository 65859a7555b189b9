"""Every public function on a device: the numbers of the CPU, wherever its tensors are, and with that device as default.

The device is imitated (``support.accelerator``): it refuses what CUDA refuses.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import on_devices, zoo
from support.accelerator import NAME, imitated
from support.on_devices import FUNCTIONS, NAMES, Place, arguments, has_tensors, moved, with_model
from support.public_calls import call, takes_synthetic
from support.results import assert_same

pytestmark = pytest.mark.tl4

DEVICE, OTHER = f"{NAME}:0", f"{NAME}:1"
KIND = "hooked" if zoo.TL_MAJOR < 4 else "bridge"
# torch's engine makes backward passes on the first imitated device alone.
BACKWARD = {"head_effects", "where_or_what"}


def called(name: str, device: str, *model: Any, **other: Any) -> Any:
    """The function with its model and tensors on a device, and ``other`` arguments; hooks are run."""
    return on_devices.outcome(name, KIND, Place(device), *model, **other)


def a_model(name: str, device: str) -> Any:
    return on_devices.a_model(name, KIND, Place(device))


@functools.cache
def expected(name: str) -> Any:
    return called(name, "cpu")


CASES = [pytest.param(name, marks=[pytest.mark.slow] * with_model(name)) for name in NAMES]
TENSORS = {name: [p for p, x in arguments(name).items() if has_tensors(x)] for (name,) in (x.values for x in CASES)}
SEVERAL = [
    (name, [p], device) for name, ps in TENSORS.items() if not with_model(name) for p in ps for device in ("cpu", OTHER)
]
SEVERAL += [(name, ps, "cpu") for name, ps in TENSORS.items() if with_model(name) and ps]


class Refused(Exception):
    """Refused in words."""


@contextlib.contextmanager
def refusal(words: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if re.fullmatch(words, str(error)):
            raise Refused from error
        raise


@contextlib.contextmanager
def as_default(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def on_two_devices(name: str) -> bool:
    return with_model(name) and not takes_synthetic(FUNCTIONS[name])


@pytest.mark.parametrize("name", [x for x in CASES if not on_two_devices(x.values[0])])
def test_on_a_device(name: str) -> None:
    right = expected(name)
    with imitated():
        assert_same(called(name, DEVICE), right)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_with_a_default_device(name: str) -> None:
    right = expected(name)
    device = DEVICE if with_model(name) else "cpu"
    with imitated():
        model = [a_model(name, device)] if with_model(name) else []  # of which random weights depend on the default
        with as_default(DEVICE):
            assert_same(called(name, device, *model), right)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "some", "device"), SEVERAL)
def test_arguments_elsewhere(name: str, some: list[str], device: str) -> None:
    """One tensor on another device than the others; of functions of a model, all on another device than the model."""
    right = expected(name)
    other = {p: moved(arguments(name)[p], Place(device)) for p in some}
    with imitated(), contextlib.suppress(Refused), refusal(r"\w+(, \w+)* and \w+ must be on the same device, got .*"):
        assert_same(called(name, DEVICE, **other), right)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [x.values[0] for x in CASES if on_two_devices(x.values[0]) and x.values[0] not in BACKWARD]
)
def test_a_model_on_two_devices(name: str) -> None:
    """Its logits are where its last layer is, and tokens where its first; what bears that bears one device."""
    model, right = zoo.hooked("llama"), expected(name)
    with imitated():
        model.cfg.device, model.cfg.n_devices = DEVICE, 2
        for part in (model.embed, model.hook_embed, model.blocks[0]):
            part.to(DEVICE)
        for part in (model.blocks[1], model.ln_final, model.unembed):
            part.to(OTHER)
        assert_same(called(name, DEVICE, model), right)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_without_float64(name: str) -> None:
    """As on MPS: what needs float64 refuses the device in words."""
    right = expected(name)
    with imitated():
        model = [a_model(name, DEVICE)] if with_model(name) else []
    with imitated(no_float64=True):
        given = {}
        for p, value in arguments(name).items():
            given[p] = value
            with contextlib.suppress(TypeError):  # float64 itself stays where it is
                given[p] = moved(value, Place(DEVICE))
        with contextlib.suppress(Refused), refusal(r"\w+ must be on the CPU or a CUDA device, got .*"):
            found = call(FUNCTIONS[name], *model, **given)
            assert_same(on_devices.after_a_run(found, Place(DEVICE), *model), right)
