"""Sources of a sweep's models (name, revision, folder, training step): their identity, and how they are loaded."""

from __future__ import annotations

import hashlib
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tl_posdisent.demo.demo_model import BOS, demo_hf_model, demo_tokenizer, load_demo_model, load_weights
from tl_posdisent.models.loading.load import (
    Backend,
    bridge_from_hf,
    check_backend,
    has_hooked,
    hooked_from_hf,
    load_model,
)
from tl_posdisent.synthetic.training.checkpoints import load_checkpoint
from tl_posdisent.utils.validation import is_integer

Checkpoint = int | str | None
_STEP = re.compile(r"(?:step|checkpoint)[-_]?(\d+)(?:\.safetensors)?")
_READ = ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


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
    found = _steps(Path(folder))
    if not found:
        raise ValueError(f"folder must hold checkpoints (step-000100.safetensors, checkpoint-100/), got {folder}")
    return sorted(found)


def named(model: str | Path, checkpoint: Checkpoint) -> tuple[str, Checkpoint, str]:
    """Model, checkpoint and a hash of what will be loaded (empty for names: their revision says what they are).

    Raises:
        ValueError: a folder or file that is not there; a checkpoint that is not in it; one of a model that has none.
    """
    if not (checkpoint is None or isinstance(checkpoint, str) or is_integer(checkpoint)):
        raise ValueError(f"checkpoint must be a step, a revision or None, got {checkpoint!r}")
    if model == "demo":
        if checkpoint is not None:
            raise ValueError(
                f"checkpoint must be None for the demo model, got {checkpoint!r}: name a training's folder"
            )
        files = [resources.files("tl_posdisent.demo") / name for name in ("weights.safetensors", *_READ[:2])]
        return "demo", None, hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
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
    """The file or folder that holds the weights."""
    if checkpoint is None:
        if model.is_dir() and _steps(model) and not (model / "config.json").is_file():
            raise ValueError(f"checkpoint must be one of {sorted(_steps(model))} for {model}, got None")
        return model
    at = _steps(model).get(checkpoint) if isinstance(checkpoint, int) else model / checkpoint
    if at is None or not at.exists():
        raise ValueError(f"checkpoint must be one of {sorted(_steps(model))} for {model}, got {checkpoint!r}")
    return at


def fingerprint(at: Path) -> str:
    """A hash of everything that decides what the loaded model computes: weights, configuration, tokenizer."""
    folder = at.parent if at.is_file() else at
    weights = [at] if at.is_file() else sorted(at.glob("*.safetensors"))
    whole = hashlib.sha256()
    for file in [*weights, *(folder / name for name in _READ if (folder / name).is_file())]:
        name, content = "weights" if file == at else file.name, hashlib.sha256()
        with file.open("rb") as opened:
            while block := opened.read(2**22):
                content.update(block)
        whole.update(f"{name}:{content.hexdigest()};".encode())
    return whole.hexdigest()


def load(name: str, checkpoint: Checkpoint, weights: str, *, backend: Backend, dtype: str, device: str | None) -> Any:
    """The model of a job. Names alone may ask a network; no code that comes with a model is run.

    Raises:
        ValueError: weights that have changed since the job was made; what ``load_model`` and ``load_checkpoint``
            refuse.
    """
    check_backend(backend)
    kind = dtype_of(dtype)
    if name != "demo" and not weights:
        return _of_hub(name, checkpoint, backend, kind, device)
    if named(name if name == "demo" else Path(name), checkpoint)[2] != weights:
        raise ValueError(f"the weights of {name} (checkpoint {checkpoint}) have changed since this job was made")
    at = None if name == "demo" else place(Path(name), checkpoint)
    if at is not None and at.is_dir():
        return load_model(at, backend=backend, dtype=kind, device=device)
    if at is None:
        model = load_demo_model(backend=backend, device=device)
    elif _is_synthetic(at):
        model = load_checkpoint(at, device=device or "cpu")
    else:
        model = _in_lens(*_of_demo_training(at), backend, device)
    return model if kind == torch.float32 else model.to(kind)


def dtype_of(name: str) -> torch.dtype:
    """By its name."""
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def _steps(folder: Path) -> dict[int, Path]:
    entries = folder.iterdir() if folder.is_dir() else ()
    matches = ((_STEP.fullmatch(entry.name), entry) for entry in entries)
    return {
        int(match[1]): entry for match, entry in matches if match and (entry.is_dir() or entry.suffix == ".safetensors")
    }


def _of_hub(name: str, revision: Checkpoint, backend: Backend, dtype: torch.dtype, device: str | None) -> Any:
    if revision is None:
        return load_model(name, backend=backend, dtype=dtype, device=device)
    try:  # into a folder first: TransformerLens would read a tokenizer again by its name, from the main revision
        folder = snapshot_download(name, revision=str(revision), allow_patterns=["*.safetensors", "*.json", *_READ])
        return load_model(folder, backend=backend, dtype=dtype, device=device)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load revision {revision} of {name} (its weights as safetensors): {error}") from error


def _in_lens(hf_model: Any, tokenizer: Any, backend: Backend, device: str | None) -> Any:
    """As ``load_model`` does with a folder."""
    if device is not None:
        hf_model.to(device)
    if backend == "hooked" or (backend == "auto" and has_hooked()):
        try:
            return hooked_from_hf(hf_model, tokenizer=tokenizer)
        except ValueError:
            if backend == "hooked":
                raise
    return bridge_from_hf(hf_model, tokenizer=tokenizer)


def _is_synthetic(at: Path) -> bool:
    """Whether ``save_checkpoint`` wrote it, which keeps notes beside the weights."""
    try:
        with safe_open(at, framework="pt") as file:
            return "notes" in (file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise ValueError(f"model must be a whole safetensors file, but {at} cannot be read: {error}") from error


def _of_demo_training(at: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A checkpoint of ``examples/train_demo_model.py``, with the configuration and tokenizer beside it or the
    demo model's own."""
    # Not above: this code takes a quarter of a second to import, and most who import the package never need it.
    from transformers import LlamaConfig, LlamaForCausalLM

    config, tokens = at.with_name("config.json"), at.with_name("tokenizer.json")
    hf_model, tokenizer = demo_hf_model(trained=False), demo_tokenizer()
    if config.is_file():
        with torch.random.fork_rng(devices=[]):
            hf_model = LlamaForCausalLM(LlamaConfig.from_dict(json.loads(config.read_text(encoding="utf-8"))))
    if tokens.is_file():
        same = {name: getattr(tokenizer, name) for name in ("name_or_path", "clean_up_tokenization_spaces")}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_file(str(tokens)),
            bos_token=BOS,
            eos_token=BOS,
            pad_token=BOS,
            add_bos_token=True,
            **same,
        )
    try:
        load_weights(hf_model, at)
    except (RuntimeError, KeyError) as error:
        raise ValueError(f"{at} does not hold weights of the demo model's architecture: {error}") from error
    return hf_model.eval(), tokenizer
