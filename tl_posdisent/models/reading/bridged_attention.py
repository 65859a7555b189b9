"""The adapter of a TransformerBridge's layers that show their scores: TransformerLens computes them itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tl_posdisent.models.reading.hugging_face import causal, kinds_of, window
from tl_posdisent.models.reading.layer import BIASED, BY_HEAD, ORDER, Layer
from tl_posdisent.models.reading.rotations import rotary_module, stored_rotation
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.rope.rotary import Rotary

_BIASED = {"BloomAttentionBridge", "MPTALiBiAttentionBridge", "ALiBiJointQKVAttentionBridge"}
_SEPARATE, _JOINT = "PositionEmbeddingsAttentionBridge", "JointQKVPositionEmbeddingsAttentionBridge"
BRIDGED = {_SEPARATE, "JointQKVAttentionBridge"}
"""Classes of TransformerLens that compute scores; the others derive from these."""


def bridged_attention(layer: Layer) -> AttentionSpec:
    """Describe a layer of a bridge that shows its scores."""
    n_heads, n_kv_heads = layer.model.cfg.n_heads, layer.n_kv_heads
    heads = {"q": n_heads, "k": n_kv_heads}
    facts: dict[str, Any] = {"causal": causal(layer), "window": window(layer)}
    values = layer.tap("hook_v", n_kv_heads)
    if (problem := _problem(layer)) is not None:
        return layer.spec(layer.taps(v=values), problem=problem, **facts)
    norm = getattr(layer.attn, "_qk_norm_phase", None)
    name, layout, order = "hook_{}", "pos head", ORDER
    if norm is not None:
        name, layout, order = "hook_{}_normed", "flat" if norm == "pre_reshape" else "head pos", ("v", *ORDER)
    vectors = {which: layer.tap(name.format(which), n, layout) for which, n in heads.items()}
    if (multiplier := getattr(layer.original, "key_multiplier", 1.0)) != 1:  # Falcon H1, behind the hook
        vectors["k"] = replace(vectors["k"], norm=_Factor(multiplier))
    rotary = _rotation(layer)
    if rotary is not None and _SEPARATE in kinds_of(layer):
        vectors |= {f"{which}_rot": layer.tap(f"hook_rot_{which}", n) for which, n in heads.items()}
    cap = getattr(layer.original, "attn_logit_softcapping", None)
    return layer.spec(
        layer.taps(v=values, **vectors),
        rotary=rotary,
        scale=_scale(layer),
        soft_cap=None if cap is None else float(cap),
        order=order,
        **facts,
    )


def _problem(layer: Layer) -> str | None:
    """Return why scores are not those of queries and keys at hooks before the rotation, or None."""
    if _BIASED & kinds_of(layer):
        return BIASED
    if getattr(layer.attn.config, "qk_norm_after_rope", False):
        return "it normalises its queries and keys after the rotation, with weights"
    if getattr(getattr(layer.original, "config", None), "clip_qkv", None) is not None:
        return "it clips its queries and keys, and has no hook behind that"
    if getattr(getattr(rotary_module(layer.model, layer.number), "inv_freq", None), "ndim", 1) > 1:
        return BY_HEAD
    return None


def _rotation(layer: Layer) -> Rotary | None:
    kinds, cfg = kinds_of(layer), layer.attn.config
    if "CodeGenAttentionBridge" in kinds:
        return layer.tables.of_gptj(layer.model, layer.number)
    if _JOINT in kinds:
        return stored_rotation(layer.model, layer.number)
    if _SEPARATE not in kinds or _without_positions(layer):
        return None
    adjacent = any(getattr(cfg, name, False) for name in ("rotary_adjacent_pairs", "rotary_interleaved_cos_sin"))
    return stored_rotation(layer.model, layer.number, "adjacent" if adjacent else "half")


def _without_positions(layer: Layer) -> bool:
    """Say whether this layer does not rotate in a model that does (SmolLM3, EXAONE 4, Cohere 2)."""
    says = getattr(layer.attn, "_is_nope_layer", None)
    return says() if callable(says) else not getattr(layer.original, "use_rope", True)


def _scale(layer: Layer) -> float:
    kinds = kinds_of(layer)
    default: float = layer.d_head**-0.5
    if "CodeGenAttentionBridge" in kinds:
        return 1 / float(layer.original.scale_attn)
    if _SEPARATE in kinds:
        return float(getattr(layer.original, "scaling", default))
    by_layer = _JOINT not in kinds and getattr(layer.attn.config, "scale_attn_by_inverse_layer_idx", False)
    return default / (layer.number + 1) if by_layer else default


@dataclass(frozen=True)
class _Factor:
    """What multiplies keys."""

    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.factor * x
