"""Files: truncated, of another kind, unreadable, missing. Nothing in them is run, nor written outside the folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support import zoo
from support.public_calls import FEW, TASK, synthetic

from tl_posdisent import load_model
from tl_posdisent.synthetic import load_checkpoint, save_checkpoint, train

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]

LINEAR = torch.nn.Linear(2, 2)


def pickled(at: Path, name: str = "evil.safetensors") -> Path:
    """A pickle that leaves a trace when it is loaded."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(at / "run"),)

    torch.save({"weights": Evil()}, at / name)
    return at / name


def cut(path: Path, keep: float = 0.5) -> Path:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    return path


def saved(at: Path) -> Path:
    return save_checkpoint(synthetic(), at / "model.safetensors")


def other(at: Path, **metadata: str) -> Path:
    """A safetensors file of something else."""
    save_file({"x": torch.zeros(3)}, at / "other.safetensors", metadata=metadata or None)
    return at / "other.safetensors"


def folder(at: Path, **changed: str) -> Path:
    """A model as ``save_pretrained`` writes it, and then some of its files changed (removed, where None)."""
    zoo.hf_model("llama-gqa").save_pretrained(at / "model")
    for name, content in changed.items():
        (at / "model" / name.replace("__", ".")).write_text(content)
    return at / "model"


def no_weights(at: Path) -> Path:
    path = folder(at)
    (path / "model.safetensors").unlink()
    return path


def pickled_weights(at: Path) -> Path:
    path = no_weights(at)
    pickled(path, "pytorch_model.bin")
    return path


def cut_weights(at: Path) -> Path:
    path = folder(at)
    cut(path / "model.safetensors")
    return path


def own_code(at: Path) -> Path:
    """A model that brings code, which would leave a trace."""
    path = folder(at)
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "mine.py").write_text(f"import os\nos.mkdir({str(at / 'run')!r})\n")
    return path


def _resumed(at: Path, spoil: Any) -> Any:
    train(synthetic(), TASK, FEW, folder=at, progress=False)
    spoil(at / "state.safetensors")
    return train(synthetic(), TASK, FEW, folder=at, resume=True, progress=False)


def _notes(path: Path, **changed: Any) -> None:
    """Another state with some of its notes changed."""
    with safe_open(path, framework="pt") as file:
        tensors, notes = {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["notes"])  # noqa: SIM118
    save_file(tensors, path, metadata={"notes": json.dumps({**notes, **changed})})


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "load_checkpoint: no such file": (lambda at: load_checkpoint(at / "none"), "path must be.*does not exist"),
    "load_checkpoint: cut short": (lambda at: load_checkpoint(cut(saved(at))), "whole checkpoint"),
    "load_checkpoint: a pickle": (lambda at: load_checkpoint(pickled(at)), "whole checkpoint"),
    "load_checkpoint: notes without a model": (
        lambda at: load_checkpoint(other(at, notes="{}")),
        "checkpoint of a SyntheticModel",
    ),
    "load_checkpoint: a device that is none": (
        lambda at: load_checkpoint(saved(at), device="nowhere"),
        "device must be",
    ),
    "save_checkpoint: another module": (lambda at: save_checkpoint(LINEAR, at / "x"), "model must be"),
    "save_checkpoint: a folder in its place": (lambda at: save_checkpoint(synthetic(), at), "directory"),
    "train: a state cut short": (lambda at: _resumed(at, cut), "whole checkpoint"),
    "train: a state that is a pickle": (
        lambda at: _resumed(at, lambda path: pickled(at, path.name)),
        "whole checkpoint",
    ),
    "train: a state whose step is a word": (lambda at: _resumed(at, lambda path: _notes(path, done="two")), "damaged"),
    "load_model: a path that does not exist": (lambda at: load_model(at / "none"), "name_or_dir must be.*none"),
    "load_model: a name with NUL": (lambda at: load_model("gpt2\x00"), "name_or_dir must be"),
    "load_model: a dtype in words": (lambda at: load_model(folder(at), dtype="float32"), "dtype must be"),
    "load_model: a folder without weights": (lambda at: load_model(no_weights(at)), "cannot load"),
    "load_model: weights cut short": (lambda at: load_model(cut_weights(at)), "cannot load"),
    "load_model: weights in a pickle": (lambda at: load_model(pickled_weights(at)), "cannot load"),
    "load_model: code of its own": (lambda at: load_model(own_code(at)), "cannot load"),
    "load_model: a configuration that is no JSON": (lambda at: load_model(folder(at, config__json="{")), "cannot load"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_refused(what: str, tmp_path: Path) -> None:
    """And none of it is run."""
    call, message = REFUSED[what]
    with pytest.raises((ValueError, OSError), match=message):
        call(tmp_path)
    assert not (tmp_path / "run").exists(), "code of a file was run"


def test_names_in_a_state_file_stay_in_the_folder(tmp_path: Path) -> None:
    train(synthetic(), TASK, FEW, folder=tmp_path, progress=False)
    _notes(tmp_path / "state.safetensors", kept={"1": "../../etc/passwd", "2": "/etc/passwd"})
    run = train(synthetic(), TASK, FEW, folder=tmp_path, resume=True, progress=False)
    assert all(path.parent == tmp_path for path in run.checkpoints.values())


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    path = saved(tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="notes must be"):
        save_checkpoint(synthetic(), path, notes={"x": object()})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
