"""Checkpoints of synthetic models: weights, configuration and notes in one safetensors file, without pickle."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tl_posdisent.models.loading.load import check_device
from tl_posdisent.synthetic.model.config import SyntheticConfig
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.files import whole_file


def save_checkpoint(model: SyntheticModel, path: str | Path, notes: Mapping[str, Any] | None = None) -> Path:
    """Save the weights and the configuration of a synthetic model to a safetensors file, atomically.

    The tensors have the names of ``model.state_dict()``; configuration and notes are JSON in the metadata ``notes``.

    Args:
        model: any ``SyntheticModel``.
        path: where to save, also the return value. Folders are created; an existing file is replaced.
        notes: a JSON-compatible mapping that is saved in the same file.

    Raises:
        ValueError: another kind of model; notes that are not JSON-compatible.
        OSError: the file cannot be written; an existing file is kept.

    Example:
        >>> import tempfile, torch
        >>> from tl_posdisent.synthetic import load_checkpoint, preset, save_checkpoint
        >>> model, tokens = preset("small").model("rope", "count", seed=1), torch.arange(8)[None]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = load_checkpoint(save_checkpoint(model, f"{folder}/model.safetensors"))
        >>> torch.equal(model(tokens), again(tokens))
        True
    """
    if not isinstance(model, SyntheticModel):
        raise ArgumentError("model", f"must be a SyntheticModel, got {type(model).__name__}")
    try:
        metadata = {"notes": json.dumps({**(notes or {}), "model": dataclasses.asdict(model.config)})}
    except (TypeError, ValueError) as error:
        raise ArgumentError("notes", f"must be JSON-compatible: {error}") from error
    content = save({name: x.detach().cpu() for name, x in model.state_dict().items()}, metadata=metadata)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(content)
    return path


def load_checkpoint(path: str | Path, *, device: str | torch.device = "cpu") -> SyntheticModel:
    """Load a synthetic model that ``save_checkpoint`` or ``train`` saved, in evaluation mode.

    Raises:
        ValueError: a file that is missing, damaged or not a checkpoint; a device that torch cannot use.

    Example:
        >>> from tl_posdisent.synthetic import load_checkpoint
        >>> load_checkpoint("nowhere.safetensors")
        Traceback (most recent call last):
        tl_posdisent.utils.errors.ArgumentError: path must be a checkpoint, but nowhere.safetensors does not exist
    """
    device = check_device(device) or "cpu"
    weights, notes = _read(path)
    try:
        shape: Any = {name: tuple(x) if isinstance(x, list) else x for name, x in notes["model"].items()}
        model = SyntheticModel(SyntheticConfig(**shape))
    except (AttributeError, KeyError, TypeError) as error:
        raise ArgumentError("path", f"must be a checkpoint of a SyntheticModel, got {path}: {error!r}") from error
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()  # the first of possibly many mismatches
        raise ValueError(f"weights in {path} must fit the model: {first}") from error
    model.to(device).eval()
    return model


def _read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and notes; raise ValueError if the file is missing or damaged."""
    if not Path(path).is_file():
        raise ArgumentError("path", f"must be a checkpoint, but {path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            notes = json.loads((file.metadata() or {})["notes"])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if not isinstance(notes, dict):
            raise ValueError(f"its notes are a {type(notes).__name__}")
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise ArgumentError("path", f"must be a whole checkpoint, but {path} cannot be read: {error}") from error
    return weights, notes
