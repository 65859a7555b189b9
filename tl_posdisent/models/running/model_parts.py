"""Parts of a model: its blocks, modules, device, dtype, and names of hooks."""

from __future__ import annotations

import inspect
from os import PathLike
from typing import Any

import torch

from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import shown

FIRST_HOOK = "hook_embed"  # the first hook of a forward pass, in all model classes


def hook_name(layer: int, short: str) -> str:
    """Return the full name of an attention hook: ``hook_name(3, "hook_q")`` is ``"blocks.3.attn.hook_q"``."""
    return f"blocks.{layer}.attn.{short}"


def n_layers(model: Any) -> int:
    """Return the number of layers, or raise an ``ArgumentError`` if this is not a TransformerLens model."""
    n = getattr(getattr(model, "cfg", None), "n_layers", None)
    # Look up statically first: a bridge rebuilds the list of its hook points at each access.
    has_hooks = inspect.getattr_static(model, "hook_dict", None) is not None or hasattr(model, "hook_dict")
    if not isinstance(n, int) or not has_hooks:
        raise ArgumentError(
            "model",
            "must be a HookedTransformer, a TransformerBridge or another model with TransformerLens's hooks, "
            f"got {_not_hooked(model)}",
        )
    blocks = getattr(model, "blocks", ())
    if len(blocks) != n:
        raise ArgumentError(
            "model",
            f"must have one block for each of its {n} layers, at model.blocks, got {len(blocks)} in "
            f"{getattr(model.cfg, 'architecture', None) or type(model).__name__}. Encoders and decoders, and models "
            "that run blocks several times in a pass (HRM-Text), are not supported",
        )
    return n


def _not_hooked(model: Any) -> str:
    """Say what came in a model's place, and how it becomes one."""
    from transformers import PreTrainedModel  # which takes seconds to import

    if isinstance(model, (str, PathLike)):
        return f"{shown(model)}: load it, load_model({shown(model)})"
    if isinstance(model, PreTrainedModel):
        return f"{type(model).__name__}, a model of transformers: pass bridge_from_hf(model)"
    return type(model).__name__


def architecture(model: Any) -> str:
    """Return the architecture's name, for messages."""
    for name in ("original_architecture", "architecture"):
        value = getattr(model.cfg, name, None)
        if isinstance(value, str) and value:
            return value
    return type(model).__name__


def user_hooks(model: Any) -> list[str]:
    """Return the names of the hook points on which the user has put hooks."""
    names = {point: name for name, point in model.hook_dict.items()}  # of a point with aliases, the last one
    return [name for point, name in names.items() if any(not handle.is_permanent for handle in point.fwd_hooks)]


def device_of(model: Any) -> torch.device:
    """Return the device on which the model takes its tokens."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def check_weights(model: Any) -> None:
    """Raise an ``ArgumentError`` if the model's weights are not in memory."""
    if device_of(model).type == "meta":
        raise ArgumentError("model", "must have weights, but its parameters are meta tensors: load them first")


def dtype_of(model: Any) -> torch.dtype:
    """Return the dtype of the model's weights."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def modules(model: Any) -> list[torch.nn.Module]:
    """List all modules of a model, each once.

    The ``modules()`` of a bridge does not list all modules of the model that it wraps.
    """
    waiting = [x for x in (model, getattr(model, "original_model", None)) if isinstance(x, torch.nn.Module)]
    found: dict[int, torch.nn.Module] = {}
    while waiting:  # torch's own modules() makes a name for every part, which takes ten times as long
        part = waiting.pop()
        if id(part) not in found:
            found[id(part)] = part
            waiting += [x for x in reversed(part._modules.values()) if x is not None]
    return list(found.values())
