"""Checkpoints of synthetic models: weights and settings in one safetensors file, without pickle."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from tl_posdisent.models.loading.load import check_device
from tl_posdisent.synthetic.model.config import SyntheticConfig
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.files import as_path, whole_file


def save_checkpoint(model: SyntheticModel, path: str | Path) -> Path:
    """Save the weights and the settings of a synthetic model to a safetensors file, atomically.

    The tensors have the names of ``model.state_dict()``; the settings are JSON in the metadata ``notes``.

    Args:
        model: any ``SyntheticModel``.
        path: where to save, also the return value. Folders are created; an existing file is replaced.

    Raises:
        ValueError: another kind of model, or not a path.
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
    notes = json.dumps({"model": dataclasses.asdict(model.config)})
    content = save({name: x.detach().cpu() for name, x in model.state_dict().items()}, metadata={"notes": notes})
    path = as_path("path", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(content)
    return path


def load_checkpoint(path: str | Path, *, device: str | torch.device = "cpu") -> SyntheticModel:
    """Load a synthetic model that ``save_checkpoint`` saved, in evaluation mode.

    Raises:
        ValueError: not a path, or a device that torch cannot use; a safetensors file of something else.
        OSError, SafetensorError: a file that is missing or damaged.

    Example:
        >>> from tl_posdisent.synthetic import load_checkpoint
        >>> load_checkpoint("nowhere.safetensors")
        Traceback (most recent call last):
        FileNotFoundError: No such file or directory: nowhere.safetensors
    """
    path = as_path("path", path)
    check_device(device)
    with safe_open(path, framework="pt") as file:
        notes = json.loads((file.metadata() or {}).get("notes", "{}"))
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    if "model" not in notes:
        raise ArgumentError("path", f"must be a checkpoint of a SyntheticModel, got {path}")
    settings: Any = {name: tuple(x) if isinstance(x, list) else x for name, x in notes["model"].items()}
    model = SyntheticModel(SyntheticConfig(**settings))
    model.load_state_dict(weights)
    model.to(device).eval()
    return model
