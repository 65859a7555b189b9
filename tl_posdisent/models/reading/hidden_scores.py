"""The adapter of a TransformerBridge's layers that show no scores: Hugging Face's code computes their attention.

They show queries, keys, values, pattern and result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.models.reading.hugging_face import causal, fused, window
from tl_posdisent.models.reading.layer import ORDER, Layer
from tl_posdisent.models.reading.query_key_hooks import Tap
from tl_posdisent.models.reading.rotations import stored_rotation
from tl_posdisent.models.reading.spec import AttentionSpec, Taps
from tl_posdisent.rope.rotary import Pairing, Rotary


@dataclass(frozen=True)
class _Facts:
    """What the code of one class of Hugging Face does that its modules and configuration do not say.

    Attributes:
        pairing: of the rotation; ``sign`` is -1 where it goes the other way.
        rotates_windows: whether only layers with a sliding window rotate.
        norm_after: whether queries and keys are normalised after the rotation, by a norm without weights.
        gate: what is applied to the gate that multiplies the result of the heads.
        scale: the scale where it is not the module's ``scaling``.
        order: the order in which hooks of vectors fire.
    """

    pairing: Pairing = "half"
    sign: float = 1.0
    rotates_windows: bool = False
    norm_after: bool = False
    gate: Callable[[Tensor], Tensor] | None = None
    scale: float | None = None
    order: tuple[str, ...] = ORDER


_FACTS = {
    "AfmoeAttention": _Facts(rotates_windows=True, gate=torch.sigmoid, order=("v", "gate", "q", "k")),
    "GPTJAttention": _Facts("adjacent"),
    "GPTNeoSelfAttention": _Facts(scale=1.0),
    "LagunaAttention": _Facts(gate=torch.nn.functional.softplus, order=("v", "q", "k", "gate")),
    "Llama4TextAttention": _Facts("adjacent"),
    "NanoChatAttention": _Facts(sign=-1.0, norm_after=True),
    "NativeAttention": _Facts("adjacent"),
}


def hidden_scores(layer: Layer) -> AttentionSpec:
    """Describe a layer of a bridge that shows no scores."""
    facts = _FACTS.get(type(layer.original).__name__, _Facts())
    mask: dict[str, Any] = {"causal": causal(layer), "window": window(layer)}
    if (problem := _problem(layer)) is not None:
        return layer.spec(Taps(z=layer.name("hook_z")), problem=problem, **mask)
    lender = _lender(layer)
    keys = lender or layer
    n_heads, n_kv_heads = (
        getattr(owner.attn, which).original_component.out_features // layer.d_head
        for owner, which in ((layer, "q"), (keys, "k"))
    )
    vectors = {
        "q": _normed(layer, "q", n_heads, facts),
        "k": _normed(keys, "k", n_kv_heads, facts),
        "v": keys.tap("v_norm.hook_out" if keys.name("v_norm.hook_out") else "hook_v", n_kv_heads),
    }
    if facts.gate is not None:
        vectors["gate"] = layer.tap("gate.hook_out", n_heads, "flat", norm=facts.gate)
    if facts.norm_after:
        vectors["q_rot"] = layer.tap("q_norm.hook_out", n_heads, "head pos")
        vectors["k_rot"] = keys.tap("k_norm.hook_out", n_kv_heads, "head pos")
    return layer.spec(
        replace(layer.taps(**vectors), scores=None, keys_of=None if lender is None else lender.number),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        rotary=_rotation(layer, facts),
        scale=_scale(layer, facts),
        order=facts.order,
        **mask,
    )


def _problem(layer: Layer) -> str | None:
    """Return why the layer does not show what is needed, or None."""
    if "q" not in getattr(layer.attn, "submodules", ()):
        return "TransformerLens has no hooks of its queries and keys for this architecture"
    if fused(layer):
        return (
            "neither hook_attn_scores nor hook_pattern fires: its attention runs in a fused kernel. Load the model "
            'with attn_implementation="eager"'
        )
    return None


def _lender(layer: Layer) -> Layer | None:
    """Return the layer to whose keys and values this one attends, or None for its own (Gemma 4)."""
    if not getattr(layer.original, "is_kv_shared_layer", False):
        return None
    earlier = (replace(layer, number=number) for number in reversed(range(layer.number)))
    return next(
        other
        for other in earlier
        if not other.original.is_kv_shared_layer and other.original.layer_type == layer.original.layer_type
    )


def _normed(layer: Layer, which: str, n_heads: int, facts: _Facts) -> Tap:
    """Return the hook of queries or keys after their norm and before the rotation."""
    norm = getattr(layer.original, "qk_norm", None)
    if norm is None and facts.norm_after:
        norm = getattr(layer.original, f"{which}_norm")
    if norm is not None:  # after the rotation, and the same before it
        return layer.tap(f"hook_{which}", n_heads, norm=getattr(norm, "original_component", norm))
    if layer.name(f"{which}_norm.hook_out") is None:
        return layer.tap(f"hook_{which}", n_heads)
    all_heads = getattr(layer.attn, f"{which}_norm").original_component.weight.numel() > layer.d_head  # OLMo
    return layer.tap(f"{which}_norm.hook_out", n_heads, "flat" if all_heads else "pos head")


def _rotation(layer: Layer, facts: _Facts) -> Rotary | None:
    without_window = facts.rotates_windows and window(layer) is None
    if without_window or not getattr(layer.original, "use_rope", True):
        return None
    name = type(layer.original).__name__
    if name == "GPTJAttention":
        return layer.tables.of_gptj(layer.model, layer.number)
    if name == "NativeAttention":  # TransformerLens's own
        table = layer.model.original_model.rotary
        return None if table is None else layer.tables.rotation(table.cos_cached, table.sin_cached, facts.pairing)
    return stored_rotation(layer.model, layer.number, facts.pairing, facts.sign)


def _scale(layer: Layer, facts: _Facts) -> float:
    if facts.scale is not None:
        return facts.scale
    if (divisor := getattr(layer.original, "scale_attn", None)) is not None:
        return 1 / float(divisor)
    return float(getattr(layer.original, "scaling", layer.d_head**-0.5))
