"""Trainings that are killed, or out of disk: the checkpoints that were finished are whole.

For real: other processes, signals, limits of the operating system.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.processes import started, wait_until
from support.short_training import HOW, STEPS, TASK, fresh, train_in

from tl_posdisent.synthetic import load_checkpoint, save_checkpoint, train
from tl_posdisent.utils.files import UNFINISHED

pytestmark = pytest.mark.slow


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints; each of them can be read."""
    paths = sorted(folder.glob("step-*.safetensors"))
    for path in paths:
        load_checkpoint(path)
    return [int(path.stem.removeprefix("step-")) for path in paths]


def test_killed_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """Whatever was finished before is whole, and has the weights of an undisturbed training."""
    with started(train_in, tmp_path) as process:
        wait_until((tmp_path / "step-000002.safetensors").exists, process)
        wait_until(lambda: list(tmp_path.glob(f".step-*{UNFINISHED}")), process)
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    steps = saved_steps(tmp_path)
    assert 2 <= len(steps) < STEPS, "killed too late to mean anything"
    assert steps == list(range(1, len(steps) + 1))
    whole = train(fresh(), TASK, HOW, folder=tmp_path / "whole", progress=False)
    for step in steps:
        killed, expected = (
            load_checkpoint(folder / f"step-{step:06d}.safetensors") for folder in (tmp_path, tmp_path / "whole")
        )
        assert all(torch.equal(a, b) for a, b in zip(killed.parameters(), expected.parameters(), strict=True))
    assert list(whole.checkpoints) == list(range(1, STEPS + 1))


@pytest.fixture
def largest_file() -> Iterator[Callable[[int], None]]:
    """Sets how many bytes a file of this process may have: beyond, writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_files_that_cannot_grow(largest_file: Callable[[int], None], tmp_path: Path) -> None:
    """The training ends in the system's error, with the model's mode; a file that exists is kept."""
    model, path = fresh().eval(), save_checkpoint(fresh(), tmp_path / "model.safetensors")
    before = path.read_bytes()
    largest_file(10_000)
    with pytest.raises(OSError, match="File too large"):
        train(model, TASK, HOW, folder=tmp_path / "run", progress=False)
    assert not model.training
    with pytest.raises(OSError, match="File too large"):
        save_checkpoint(model, path)
    assert path.read_bytes() == before
    assert not [*(tmp_path / "run").iterdir(), *tmp_path.glob(f".*{UNFINISHED}")]
