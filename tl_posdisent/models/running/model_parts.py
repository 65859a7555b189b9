"""Parts and state of a model: its blocks, modules, device, dtype, names of hooks, and what a user may change in it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from tl_posdisent.utils.errors import ArgumentError

FIRST_HOOK = "hook_embed"  # the first hook of a forward pass, in all model classes


def hook_name(layer: int, short: str) -> str:
    """Return the full name of an attention hook: ``hook_name(3, "hook_q")`` is ``"blocks.3.attn.hook_q"``."""
    return f"blocks.{layer}.attn.{short}"


def n_layers(model: Any) -> int:
    """Return the number of layers, or raise an ``ArgumentError`` if this is not a TransformerLens model."""
    n = getattr(getattr(model, "cfg", None), "n_layers", None)
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise ArgumentError(
            "model",
            "must not be compiled: torch would recompile it for every set of hooks. Give the model that "
            "torch.compile was given, which is compiled._orig_mod (one compiled in place must be loaded again)",
        )
    # Look up statically first: a bridge rebuilds the list of its hook points at each access.
    has_hooks = inspect.getattr_static(model, "hook_dict", None) is not None or hasattr(model, "hook_dict")
    if not isinstance(n, int) or not has_hooks:
        raise ArgumentError(
            "model",
            "must be a HookedTransformer, a TransformerBridge or another model with TransformerLens's hooks, "
            f"got {type(model).__name__}",
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


def implementation(attn: Any) -> Any:
    """Return the attention implementation of a Hugging Face layer (eager, sdpa …); None for other models."""
    config = getattr(getattr(attn, "original_component", None), "config", None)
    return getattr(config, "_attn_implementation", None)


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


# --- the state of a model


def model_state(model: Any) -> dict[str, Any]:
    """Collect what a reading depends on and a user may change.

    Of the buffers, it includes only HookedTransformer's rotary tables: other models overwrite some of theirs for each
    text, and hooks that act on a running text check its tables.
    """
    parts = modules(model)
    _check_compiled_parts(parts)
    parameters = [p for part in parts for p in part._parameters.values() if p is not None]
    return {
        "dtypes": {p.dtype for p in parameters},
        "device": {p.device for p in parameters},
        "modules": tuple(map(id, parts)),
        "rotary tables": _rotary_tables(parts),
        "attention implementation": _implementations(model),
        "grouping of keys": bool(getattr(model.cfg, "ungroup_grouped_query_attention", False)),
        "settings": _settings(model),
        "permanent hooks": {
            (part.name, handle.hook.id)
            for part in parts
            if "fwd_hooks" in vars(part)  # a hook point; a bridge rebuilds its hook_dict, which takes longer
            for handle in vars(part)["fwd_hooks"]
            if handle.is_permanent
        },
    }


def _check_compiled_parts(parts: Sequence[torch.nn.Module]) -> None:
    """Refuse parts compiled by torch: hooks that are added after their first run have no effect in them."""
    for part in parts:
        inside = "_orig_mod" in part._modules or getattr(part, "_compiled_call_impl", None) is not None
        if inside or hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable"):
            of = type(part._modules.get("_orig_mod", part)).__name__
            raise ArgumentError(
                "model",
                f"must not have compiled parts, got a compiled {of}: hooks that are added after its first run "
                "would not act in it. Load the model again, and do not call torch.compile on its parts",
            )


def _implementations(model: Any) -> set[Any]:
    """Collect the attention implementations (eager, sdpa …) of all layers; empty if not a Hugging Face model."""
    return {implementation(block.attn) for block in model.blocks if hasattr(block, "attn")} - {None}


def _settings(model: Any) -> list[Any]:
    """Collect numbers, flags and strings of the model's configs and attention layers: scales, windows, soft caps …"""
    config = getattr(getattr(model, "original_model", None), "config", None)
    holders = [model.cfg, config, getattr(config, "text_config", None)]
    for block in model.blocks:
        attn = getattr(block, "attn", None)
        holders += [attn, getattr(attn, "original_component", None)]
    return [
        {
            name: x if isinstance(x, (bool, int, float, str)) else repr(x)
            for name, x in vars(each).items()
            if (isinstance(x, (bool, int, float, str)) or name == "rope_parameters")
            and name[0] != "_"  # modules' private state
            and name not in ("training", "use_cache")
        }
        for each in holders
        if each is not None
    ]


def _rotary_tables(parts: Sequence[torch.nn.Module]) -> list[bytes]:
    """Return two rows of each table of HookedTransformer, which determine its frequencies whatever its length."""
    names = ("rotary_sin", "rotary_cos")
    tables = [part._buffers[name] for part in parts for name in names if part._buffers.get(name) is not None]
    by_device: dict[torch.device, list[torch.Tensor]] = {}  # synchronise once per device
    for table in tables:
        if table is not None and not table.is_meta:
            by_device.setdefault(table.device, []).append(table[1:3].detach().flatten().double())
    return [torch.cat(rows).cpu().numpy().tobytes() for rows in by_device.values()]
