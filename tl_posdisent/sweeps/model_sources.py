"""Sources of a sweep's models (name, revision, folder, training step): their identity, and how they are loaded."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from tl_posdisent.demo import demo_model
from tl_posdisent.models.loading.load import Backend, load_model
from tl_posdisent.synthetic.training.checkpoints import load_checkpoint
from tl_posdisent.utils.validation import is_integer

Checkpoint = int | str | None
_STEP = re.compile(r"(?:step|checkpoint)[-_]?(\d+)(?:\.safetensors)?")
_READ = ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def checkpoint_steps(folder: str | Path) -> list[int]:
    """List the steps of the checkpoints in a folder, ascending.

    Files ``step-000100.safetensors`` (of the demo model's training, or of ``train``) and folders such as ``step100``
    or ``checkpoint-100`` with a Hugging Face model in each.

    Raises:
        ValueError: no such folder, or none of these in it.

    Example:
        >>> import tempfile, pathlib
        >>> from tl_posdisent.sweeps import checkpoint_steps
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (0, 20, 100):
        ...         pathlib.Path(folder, f"step-{step:06d}.safetensors").touch()
        ...     checkpoint_steps(folder)
        [0, 20, 100]
    """
    if not (found := _steps(Path(folder))):
        raise ValueError(f"folder must have checkpoints (step-000100.safetensors, checkpoint-100/), got {folder}")
    return sorted(found)


def named(model: str | Path, checkpoint: Checkpoint) -> tuple[str, Checkpoint, str]:
    """Model, checkpoint and a hash of what will be loaded (empty for names: their revision says what they are)."""
    if not (checkpoint is None or isinstance(checkpoint, str) or is_integer(checkpoint)):
        raise ValueError(f"checkpoint must be a step, a revision or None, got {checkpoint!r}")
    if model == "demo":
        if checkpoint is not None:
            raise ValueError(f"checkpoint must be None for model='demo', got {checkpoint!r}: name a training's folder")
        return "demo", None, fingerprint(Path(demo_model.__file__).with_name("weights.safetensors"))
    if Path(model).exists():
        return str(Path(model).resolve()), checkpoint, fingerprint(place(Path(model), checkpoint))
    if isinstance(model, Path) or str(model).startswith((".", "/", "~")):
        raise ValueError(f"model must be a name, or a file or folder that exists, got {model}")
    return str(model), f"step{checkpoint}" if isinstance(checkpoint, int) else checkpoint, ""


def step_of(checkpoint: Checkpoint) -> int | None:
    """The training step, where the checkpoint's name says it."""
    match = _STEP.fullmatch(checkpoint) if isinstance(checkpoint, str) else None
    return int(match[1]) if match else checkpoint if isinstance(checkpoint, int) else None


def place(model: Path, checkpoint: Checkpoint) -> Path:
    """The file or folder of the weights."""
    steps = _steps(model)
    if checkpoint is None:
        at = None if steps and not (model / "config.json").is_file() else model
    else:
        at = steps.get(checkpoint) if isinstance(checkpoint, int) else model / checkpoint
    if at is None or not at.exists():
        raise ValueError(f"checkpoint must be one of {sorted(steps)} for {model}, got {checkpoint!r}")
    return at


def fingerprint(at: Path) -> str:
    """A hash of everything that decides what the loaded model computes: weights, configuration, tokenizer."""
    folder = at.parent if at.is_file() else at
    weights = [at] if at.is_file() else sorted(at.glob("*.safetensors"))
    whole = hashlib.sha256()
    for file in [*weights, *(folder / name for name in _READ if (folder / name).is_file())]:
        with file.open("rb") as opened:
            content = hashlib.file_digest(opened, "sha256").hexdigest()
        whole.update(f"{'weights' if file == at else file.name}:{content};".encode())
    return whole.hexdigest()


def load(name: str, checkpoint: Checkpoint, weights: str, *, backend: Backend, dtype: str, device: str | None) -> Any:
    """The model of a job. Only names may use a network; no code that comes with a model is run."""
    kind = DTYPES[dtype]
    if name != "demo" and not weights:
        return _of_hub(name, checkpoint, backend, kind, device)
    if named(name if name == "demo" else Path(name), checkpoint)[2] != weights:
        raise ValueError(f"the weights of {name} (checkpoint {checkpoint}) have changed since this job was made")
    at = None if name == "demo" else place(Path(name), checkpoint)
    if at is not None and at.suffix != ".safetensors":
        return load_model(at, backend=backend, dtype=kind, device=device)
    if at is not None and _is_synthetic(at):
        model: Any = load_checkpoint(at, device=device or "cpu")
    else:
        model = demo_model.load_demo_model(backend=backend, device=device, checkpoint=at)
    return model if kind == torch.float32 else model.to(kind)


def _steps(folder: Path) -> dict[int, Path]:
    found = {}
    for entry in folder.iterdir() if folder.is_dir() else ():
        if (match := _STEP.fullmatch(entry.name)) and (entry.is_dir() or entry.suffix == ".safetensors"):
            found[int(match[1])] = entry
    return found


def _of_hub(name: str, revision: Checkpoint, backend: Backend, dtype: torch.dtype, device: str | None) -> Any:
    if revision is None:
        return load_model(name, backend=backend, dtype=dtype, device=device)
    try:  # into a folder first: TransformerLens would read a tokenizer again by its name, from the main revision
        folder = snapshot_download(name, revision=str(revision), allow_patterns=["*.safetensors", "*.json", *_READ])
        return load_model(folder, backend=backend, dtype=dtype, device=device)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load revision {revision} of {name} (its weights as safetensors): {error}") from error


def _is_synthetic(at: Path) -> bool:
    """Whether ``save_checkpoint`` wrote it, which keeps notes beside the weights."""
    try:
        with safe_open(at, framework="pt") as file:
            return "notes" in (file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise ValueError(f"model must be a whole safetensors file, but {at} cannot be read: {error}") from error
