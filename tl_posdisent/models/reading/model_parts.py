"""Parts of a model: modules, device, dtype, names of hooks."""

from __future__ import annotations

from typing import Any

import torch


def hook_name(layer: int, short: str) -> str:
    """Return the full name of an attention hook: ``hook_name(3, "hook_q")`` is ``"blocks.3.attn.hook_q"``."""
    return f"blocks.{layer}.attn.{short}"


def device_of(model: Any) -> torch.device:
    """Return the device on which the model takes its tokens: of offloaded weights, the one they are loaded onto."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return device if device.type != "meta" else offloaded_from(model) or device


def offloaded_from(model: Any) -> torch.device | None:
    """Return the device on which a model computes whose weights accelerate offloads between passes; None for others."""
    hooks = (getattr(part, "_hf_hook", None) for part in modules(model))
    found = (getattr(hook, "execution_device", None) for hook in hooks if getattr(hook, "offload", False))
    return next((torch.device(device) for device in found if device is not None), None)


def dtype_of(model: Any) -> torch.dtype:
    """Return the dtype of the model's weights."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def is_quantised(model: Any) -> bool:
    """Say whether the model's weights are quantised, so that its kernels may round to 16 bits whatever its dtype is."""
    wrapped = getattr(model, "original_model", None)
    stated = any(getattr(x, "is_quantized", False) is True for x in (model, wrapped))  # set by transformers
    return stated or any(not p.is_floating_point() for p in model.parameters())


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
