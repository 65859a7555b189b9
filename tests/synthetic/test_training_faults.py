"""Trainings that are killed, interrupted, or out of disk: what was finished is whole, and the end is the same.

For real: other processes, signals, limits of the operating system.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from support.processes import started, wait_until
from support.short_training import HOW, SHAPE, STEPS, TASK, fresh, go_on
from torch import Tensor

from tl_posdisent.synthetic import (
    SyntheticConfig,
    SyntheticModel,
    load_checkpoint,
    save_checkpoint,
    train,
)
from tl_posdisent.utils.files import UNFINISHED

pytestmark = pytest.mark.slow

Start = Callable[..., BaseProcess]


def weights(model: SyntheticModel) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Tensor]:
    return weights(train(fresh(), TASK, HOW, progress=False).model)


@pytest.fixture
def start() -> Iterator[Start]:
    """Another process that trains in a folder, or goes on there."""
    with contextlib.ExitStack() as running:
        yield lambda folder, **options: running.enter_context(started(go_on, folder, **options))


def kept(folder: Path) -> list[int]:
    """Steps of the checkpoints; each of them can be read."""
    paths = sorted(folder.glob("step-*.safetensors"))
    for path in paths:
        load_checkpoint(path)
    return [int(path.stem.removeprefix("step-")) for path in paths]


def finish(folder: Path, undisturbed: dict[str, Tensor]) -> None:
    """Gone on with, it ends where the undisturbed training ended, to the last bit."""
    model = train(fresh(), TASK, HOW, folder=folder, resume=True, progress=False).model
    assert all(torch.equal(x, undisturbed[name]) for name, x in model.state_dict().items())
    assert kept(folder) == list(range(STEPS + 1))
    assert all(torch.equal(x, undisturbed[name]) for name, x in _last(folder).items())
    assert not list(folder.glob(f"*{UNFINISHED}"))


def _last(folder: Path) -> dict[str, Tensor]:
    return weights(load_checkpoint(folder / f"step-{STEPS:06d}.safetensors"))


@pytest.mark.parametrize("what", ["step-*", "state.*"])
def test_killed_while_a_file_is_written(
    what: str, start: Start, undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    """Killed as soon as there is an unfinished file of the kind; whatever was finished before is whole."""
    process = start(tmp_path)
    wait_until((tmp_path / "step-000002.safetensors").exists, process)
    wait_until(lambda: list(tmp_path.glob(f".{what}{UNFINISHED}")), process)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    done = kept(tmp_path)
    assert 3 <= len(done) <= STEPS, "killed too late to mean anything"
    assert done == list(range(len(done)))
    finish(tmp_path, undisturbed)


def test_a_second_training_in_a_folder_is_refused(
    start: Start, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By another process and by this one; the first one's checkpoints stay its own, and killed, it leaves no lock."""
    errors = tmp_path_factory.mktemp("errors") / "stderr"
    process = start(tmp_path)
    wait_until((tmp_path / "step-000001.safetensors").exists, process)
    os.kill(process.pid, signal.SIGSTOP)
    other, before = _seed_4(), sorted(tmp_path.iterdir())
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"folder must be a folder that no other process writes to, .* training"):
            train(other, TASK, HOW, folder=tmp_path, resume=resume, progress=False)
    assert sorted(tmp_path.iterdir()) == before
    assert all(torch.equal(x, y) for x, y in zip(other.parameters(), _seed_4().parameters(), strict=True))
    second = start(tmp_path, stderr=errors)
    second.join()
    assert second.exitcode == 1
    assert "another training is running there" in errors.read_text(encoding="utf-8")
    process.kill()
    process.join()
    train(fresh(), TASK, HOW, folder=tmp_path, resume=True, progress=False)


def _seed_4() -> SyntheticModel:
    return SyntheticModel(SyntheticConfig(**SHAPE), seed=4)


@pytest.fixture
def largest_file() -> Iterator[Callable[[int], None]]:
    """Sets how many bytes a file of this process may have: beyond, writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_files_that_cannot_grow(
    largest_file: Callable[[int], None], undisturbed: dict[str, Tensor], tmp_path: Path
) -> None:
    """A state is three times as large as a checkpoint: the one fits, the other does not."""
    train(fresh(), TASK, HOW, folder=tmp_path, stop_at=2, progress=False)
    state = (tmp_path / "state.safetensors").read_bytes()
    largest_file(len(state) // 2)
    model = fresh()
    model.eval()
    with pytest.raises(OSError, match="File too large"):
        train(model, TASK, HOW, folder=tmp_path, resume=True, progress=False)
    assert not model.training
    assert (tmp_path / "state.safetensors").read_bytes() == state
    assert kept(tmp_path) == [0, 1, 2, 3]
    assert not list(tmp_path.glob(f"*{UNFINISHED}"))
    largest_file(10_000)
    before = (tmp_path / "step-000003.safetensors").read_bytes()
    with pytest.raises(OSError, match="File too large"):
        save_checkpoint(model, tmp_path / "step-000003.safetensors")
    assert (tmp_path / "step-000003.safetensors").read_bytes() == before
    largest_file(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    finish(tmp_path, undisturbed)
