"""The functions that a user of a GPU tries first, with model and tensors on a device: the numbers of the CPU, there.

The device is imitated (``support.accelerator``): it refuses what CUDA refuses.
"""

from __future__ import annotations

import pytest
from support import on_devices, zoo
from support.accelerator import NAME, imitated
from support.on_devices import NAMES, Place, with_model
from support.results import assert_same

KIND = "hooked" if zoo.TL_MAJOR < 4 else "bridge"


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * with_model(name)) for name in NAMES])
def test_on_a_device(name: str) -> None:
    expected = on_devices.outcome(name, KIND, Place())
    with imitated():
        assert_same(on_devices.outcome(name, KIND, Place(f"{NAME}:0")), expected)
