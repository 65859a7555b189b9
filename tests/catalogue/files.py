"""Rows about files: truncated, of another kind, unreadable, gone; and names that lead elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support import zoo

from tl_posdisent import load_model
from tl_posdisent.rope import Moments
from tl_posdisent.sweeps import Job, Text, checkpoint_steps, failures, jobs, sweep
from tl_posdisent.sweeps.storage import failure_of, part_of
from tl_posdisent.synthetic import load_checkpoint, save_checkpoint, train

from .given import FEW, LINEAR, TASK, moments, synthetic
from .row import Row, gives, refused


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


def saved_moments(at: Path) -> Path:
    moments().to_file(at / "moments.safetensors")
    return at / "moments.safetensors"


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


def unharmed(at: Path, load: Any) -> Any:
    """What is loaded, and the certainty that nothing of it ran."""
    try:
        return load()
    finally:
        assert not (at / "run").exists(), "code of a file was run"


def _resumed(at: Path, spoil: Any) -> Any:
    train(synthetic(), TASK, FEW, folder=at, progress=False)
    spoil(at / "state.safetensors")
    return train(synthetic(), TASK, FEW, folder=at, resume=True, progress=False)


def _notes(path: Path, **changed: Any) -> None:
    """Another state with some of its notes changed."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors, notes = {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["notes"])  # noqa: SIM118
    save_file(tensors, path, metadata={"notes": json.dumps({**notes, **changed})})


def _names_stay_inside(at: Path) -> bool:
    """Names of checkpoints are looked for in the folder, whatever a state file from elsewhere says."""
    train(synthetic(), TASK, FEW, folder=at, progress=False)
    _notes(at / "state.safetensors", kept={"1": "../../etc/passwd", "2": "/etc/passwd"})
    run = train(synthetic(), TASK, FEW, folder=at, resume=True, progress=False)
    return all(path.parent == at for path in run.checkpoints.values())


def _replaced_or_kept(at: Path) -> bool:
    """A checkpoint that cannot be written leaves the one before."""
    path, model = saved(at), synthetic()
    before = path.read_bytes()
    try:
        save_checkpoint(model, path, notes={"x": object()})
    except ValueError:
        return path.read_bytes() == before and [p.name for p in at.iterdir()] == [path.name]
    return False


def _climbing_job(at: Path) -> bool:
    """Whatever a model or text is called, results lie in the sweep's folder under their hash."""
    job = Job("../../../etc/x", "../y", "", Text.of("../../z"), "additivity", "{}")
    places = (part_of(at, job), failure_of(at, job))
    return [path.parent for path in places] == [at / "parts", at / "failed"] and all(".." not in p.name for p in places)


def _damaged_part(at: Path) -> bool:
    (job,) = jobs("demo", ("additivity", {"layers": [0]}), Text.of("demo", length=12))
    whole = sweep([job], out=at, progress=False)
    cut(part_of(at, job))
    return sweep([job], out=at, progress=False).equals(whole)


ROWS: list[Row] = [
    refused(
        "load_checkpoint", "no such file", lambda at: load_checkpoint(at / "none"), "path must be", "does not exist"
    ),
    refused("load_checkpoint", "a folder", lambda at: load_checkpoint(at), "path must be"),
    refused("load_checkpoint", "an empty file", lambda at: load_checkpoint(cut(saved(at), 0)), "whole checkpoint"),
    refused("load_checkpoint", "cut short", lambda at: load_checkpoint(cut(saved(at))), "whole checkpoint"),
    refused("load_checkpoint", "cut by a byte", lambda at: load_checkpoint(cut(saved(at), 0.9999)), "whole checkpoint"),
    refused(
        "load_checkpoint", "a pickle", lambda at: unharmed(at, lambda: load_checkpoint(pickled(at))), "whole checkpoint"
    ),
    refused("load_checkpoint", "of another kind", lambda at: load_checkpoint(other(at)), "whole checkpoint"),
    refused(
        "load_checkpoint",
        "notes that are a list",
        lambda at: load_checkpoint(other(at, notes="[1]")),
        "whole checkpoint",
    ),
    refused(
        "load_checkpoint",
        "notes without a model",
        lambda at: load_checkpoint(other(at, notes="{}")),
        "checkpoint of a SyntheticModel",
    ),
    refused(
        "load_checkpoint",
        "notes of a model that cannot be",
        lambda at: load_checkpoint(other(at, notes='{"model": {"n_layers": -1}}')),
        "checkpoint",
    ),
    refused(
        "load_checkpoint",
        "a device that is none",
        lambda at: load_checkpoint(saved(at), device="nowhere"),
        "device must be",
    ),
    refused(
        "save_checkpoint",
        "another module",
        lambda at: save_checkpoint(LINEAR, at / "x"),
        "model must be",
    ),
    refused(
        "save_checkpoint",
        "notes that JSON cannot hold",
        lambda at: save_checkpoint(synthetic(), at / "x", {"x": object()}),
        "notes must be",
    ),
    refused(
        "save_checkpoint",
        "a folder in its place",
        lambda at: save_checkpoint(synthetic(), at),
        "directory",
        error=IsADirectoryError,
    ),
    gives("save_checkpoint", "what cannot be written leaves what was there", lambda at: _replaced_or_kept(at)),
    refused("train", "a state cut short", lambda at: _resumed(at, cut), "whole checkpoint"),
    refused(
        "train",
        "a state that is a pickle",
        lambda at: unharmed(at, lambda: _resumed(at, lambda path: pickled(at, path.name))),
        "whole checkpoint",
    ),
    refused(
        "train",
        "a state whose step is a word",
        lambda at: _resumed(at, lambda path: _notes(path, done="two")),
        "damaged",
    ),
    refused(
        "train",
        "a state whose task is a list",
        lambda at: _resumed(at, lambda path: _notes(path, task=[1])),
        "must hold this training",
    ),
    gives("train", "a state with names that lead elsewhere", lambda at: _names_stay_inside(at)),
    refused("Moments", "no such file", lambda at: Moments.from_file(at / "none"), "none", error=FileNotFoundError),
    refused("Moments", "a folder", lambda at: Moments.from_file(at), "safetensors"),
    refused("Moments", "cut short", lambda at: Moments.from_file(cut(saved_moments(at))), "truncated"),
    refused(
        "Moments", "a pickle", lambda at: unharmed(at, lambda: Moments.from_file(pickled(at))), "no safetensors file"
    ),
    refused("Moments", "of another kind", lambda at: Moments.from_file(other(at)), "does not hold Moments"),
    refused(
        "Moments",
        "about that is a list",
        lambda at: Moments.from_file(other(at, tl_posdisent="[1]")),
        "does not hold Moments",
    ),
    refused(
        "Moments",
        "without its tensors",
        lambda at: Moments.from_file(other(at, tl_posdisent='{"kind": "Moments", "version": 1}')),
        "damaged Moments",
    ),
    refused("load_model", "an empty folder", lambda at: load_model(at), "cannot load"),
    refused(
        "load_model", "a path that does not exist", lambda at: load_model(at / "none"), "name_or_dir must be", "none"
    ),
    refused(
        "load_model",
        "a relative path that does not exist",
        lambda at: load_model("./none"),
        "name_or_dir must be",
        "none",
    ),
    refused("load_model", "a file", lambda at: load_model(saved(at)), "name_or_dir must be"),
    refused("load_model", "an empty name", lambda at: load_model(""), "name_or_dir must be"),
    refused("load_model", "a number", lambda at: load_model(3), "name_or_dir must be", "int"),
    refused("load_model", "a name with NUL", lambda at: load_model("gpt2\0"), "name_or_dir must be"),
    refused("load_model", "a dtype in words", lambda at: load_model(folder(at), dtype="float32"), "dtype must be"),
    refused("load_model", "a dtype of integers", lambda at: load_model(folder(at), dtype=torch.int8), "dtype must be"),
    refused("load_model", "a folder without weights", lambda at: load_model(no_weights(at)), "cannot load"),
    refused("load_model", "weights cut short", lambda at: load_model(cut_weights(at)), "cannot load"),
    refused(
        "load_model",
        "weights in a pickle",
        lambda at: unharmed(at, lambda: load_model(pickled_weights(at))),
        "cannot load",
    ),
    refused("load_model", "code of its own", lambda at: unharmed(at, lambda: load_model(own_code(at))), "cannot load"),
    refused(
        "load_model",
        "a configuration that is no JSON",
        lambda at: load_model(folder(at, config__json="{")),
        "cannot load",
    ),
    refused(
        "load_model",
        "a tokenizer that is no JSON",
        lambda at: load_model(folder(at, tokenizer__json="{")),
        "cannot load",
    ),
    refused("checkpoint_steps", "no such folder", lambda at: checkpoint_steps(at / "none"), "none"),
    refused("failures", "no such folder", lambda at: failures(at / "none"), "out must be the folder"),
    refused("sweep", "no jobs", lambda at: sweep([], out=at, progress=False), "jobs must be"),
    gives("sweep", "a part cut short is done again", lambda at: _damaged_part(at)),
    gives("Job", "a model's name that climbs", lambda at: _climbing_job(at)),
]
