"""Files: of another kind, unreadable, missing. Nothing in them is run, nor written outside the folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from support import zoo
from support.public_calls import synthetic

from tl_posdisent import load_model
from tl_posdisent.synthetic import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.usefixtures("unchecked")

LINEAR = torch.nn.Linear(2, 2)


def pickled(at: Path, name: str = "evil.safetensors") -> Path:
    """A pickle that leaves a trace when it is loaded."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(at / "run"),)

    torch.save({"weights": Evil()}, at / name)
    return at / name


def folder(at: Path) -> Path:
    """A model as ``save_pretrained`` writes it."""
    zoo.hf_model("llama-gqa").save_pretrained(at / "model")
    return at / "model"


def pickled_weights(at: Path) -> Path:
    path = folder(at)
    (path / "model.safetensors").unlink()
    pickled(path, "pytorch_model.bin")
    return path


def own_code(at: Path) -> Path:
    """A model that brings code, which would leave a trace."""
    path = folder(at)
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "mine.py").write_text(f"import os\nos.mkdir({str(at / 'run')!r})\n")
    return path


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "load_checkpoint: no such file": (lambda at: load_checkpoint(at / "none"), "No such file"),
    "load_checkpoint: a pickle": (lambda at: load_checkpoint(pickled(at)), "header"),
    "save_checkpoint: another module": (lambda at: save_checkpoint(LINEAR, at / "x"), "model must be"),
    "save_checkpoint: a folder in its place": (lambda at: save_checkpoint(synthetic(), at), "directory"),
    "load_model: a dtype in words": (lambda at: load_model(folder(at), dtype="float32"), "dtype must be"),
    "load_model: a dtype of 8 bits": (lambda at: load_model(folder(at), dtype=torch.float8_e4m3fn), "dtype must be"),
    "load_model: weights in a pickle": (lambda at: load_model(pickled_weights(at)), "no file named model.safetensors"),
    "load_model: code of its own": (lambda at: load_model(own_code(at)), "trust_remote_code"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_refused(what: str, tmp_path: Path) -> None:
    """And none of it is run."""
    call, message = REFUSED[what]
    with pytest.raises((ValueError, OSError, SafetensorError), match=message):
        call(tmp_path)
    assert not (tmp_path / "run").exists(), "code of a file was run"
