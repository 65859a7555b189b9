"""Checkpoints in safetensors: weights and the state of a training run as tensors and JSON, without pickles."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from tl_posdisent.models.loading.load import check_device
from tl_posdisent.synthetic.model.config import SyntheticConfig
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.utils.files import whole_file

WEIGHTS = "weights"


def save_checkpoint(model: SyntheticModel, path: str | Path, notes: Mapping[str, Any] | None = None) -> Path:
    """Save the weights and the configuration of a synthetic model to a safetensors file, atomically.

    Args:
        model: any ``SyntheticModel``.
        path: returned. Folders are made, a file there is replaced.
        notes: saved in the file as well: any JSON-compatible mapping.

    Raises:
        ValueError: another model; notes that JSON cannot hold.
        OSError: the file cannot be written; one that was there before remains.

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
        raise ValueError(f"model must be a SyntheticModel, got {type(model).__name__}")
    return write(path, {WEIGHTS: model.state_dict()}, {**(notes or {}), "model": dataclasses.asdict(model.config)})


def load_checkpoint(path: str | Path, *, device: str | torch.device = "cpu") -> SyntheticModel:
    """Load a synthetic model that ``save_checkpoint`` or ``train`` saved, in evaluation mode.

    Raises:
        ValueError: a missing or damaged file, or no checkpoint; a device that torch cannot use.

    Example:
        >>> from tl_posdisent.synthetic import load_checkpoint
        >>> load_checkpoint("nowhere.safetensors")
        Traceback (most recent call last):
        ValueError: path must be a checkpoint, but nowhere.safetensors does not exist
    """
    device = check_device(device) or "cpu"
    tensors, notes = read(path)
    try:
        shape: Any = {name: tuple(x) if isinstance(x, list) else x for name, x in notes["model"].items()}
        model = SyntheticModel(SyntheticConfig(**shape))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"path must be a checkpoint of a SyntheticModel, got {path}: {error!r}") from error
    put(model, tensors.get(WEIGHTS, {}), path)
    model.to(device).eval()
    return model


def put(model: nn.Module, weights: Mapping[str, Tensor], path: str | Path) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()  # of all that do not
        raise ValueError(f"weights in {path} must fit the model: {first}") from error


def write(path: str | Path, groups: Mapping[str, Mapping[str, Tensor]], notes: Mapping[str, Any]) -> Path:
    """Write groups of named tensors and notes into one file, atomically."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"{g}/{name}": x.detach().cpu().clone() for g, group in groups.items() for name, x in group.items()}
    try:
        metadata = {"notes": json.dumps(notes)}
    except (TypeError, ValueError) as error:
        raise ValueError(f"notes must be what JSON can hold: {error}") from error
    content = save(tensors, metadata=metadata)
    with whole_file(path) as file:
        file.write(content)
    return path


def read(path: str | Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """What ``write`` wrote, or a ValueError."""
    if not Path(path).is_file():
        raise ValueError(f"path must be a checkpoint, but {path} does not exist")
    groups: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            notes = json.loads((file.metadata() or {})["notes"])
            for key in file.keys():  # noqa: SIM118 - no dict
                group, _, name = key.partition("/")
                groups.setdefault(group, {})[name] = file.get_tensor(key)
        if not isinstance(notes, dict):
            raise ValueError(f"its notes are a {type(notes).__name__}")
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise ValueError(f"path must be a whole checkpoint, but {path} cannot be read: {error}") from error
    return groups, notes
