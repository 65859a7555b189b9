"""The adapter of HookedTransformer, and of other models that have its modules and names (HookedEncoder, synthetic)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from tl_posdisent.models.reading.layer import BIASED, BY_HEAD, Layer
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.rope.rotary import Pairing, Rotary

_BIASES = ("alibi", "relative_positional_bias")


def hooked_attention(layer: Layer) -> AttentionSpec:
    """Describe a layer of a HookedTransformer."""
    attn, cfg = layer.attn, layer.model.cfg
    n_kv_heads = cfg.n_heads if getattr(cfg, "ungroup_grouped_query_attention", False) else layer.n_kv_heads
    heads = {"q": cfg.n_heads, "k": n_kv_heads}
    facts: dict[str, Any] = {
        "n_kv_heads": n_kv_heads,
        "causal": cfg.attention_dir == "causal",
        "window": cfg.window_size if getattr(attn, "attn_type", None) == "local" else None,
    }
    values = layer.tap("hook_v", n_kv_heads)
    if (problem := _problem(attn, cfg)) is not None:
        return layer.spec(layer.taps(v=values), problem=problem, **facts)
    rotary, cap = _rotation(layer), getattr(cfg, "attn_scores_soft_cap", None)
    vectors = {which: layer.tap(f"hook_{which}", n, norm=_norm(attn, which)) for which, n in heads.items()}
    if rotary is not None:
        vectors |= {f"{which}_rot": layer.tap(f"hook_rot_{which}", n) for which, n in heads.items()}
    return layer.spec(
        layer.taps(v=values, **vectors),
        rotary=rotary,
        scale=1 / float(attn.attn_scale) if hasattr(attn, "attn_scale") else layer.d_head**-0.5,
        soft_cap=float(cap) if cap is not None and cap > 0 else None,
        **facts,
    )


def _problem(attn: Any, cfg: Any) -> str | None:
    """Return why scores are not those of queries and keys that one rotation turns, or None."""
    if cfg.positional_embedding_type in _BIASES:
        return BIASED
    if getattr(cfg, "rotary_heads", None) not in (None, 0, cfg.n_heads):
        return "its scores are not scale * <q, k> of one rotation: it rotates only some of its heads"
    if getattr(getattr(attn, "rotary_cos", None), "ndim", 2) > 2:
        return BY_HEAD
    return None


def _rotation(layer: Layer) -> Rotary | None:
    attn, cfg = layer.attn, layer.model.cfg
    cos = getattr(attn, "rotary_cos", None)
    if not isinstance(cos, Tensor) or cos.shape[-1] == 0 or getattr(cfg, "rotary_heads", None) == 0:
        return None
    pairing: Pairing = "adjacent" if getattr(cfg, "rotary_adjacent_pairs", False) else "half"
    return layer.tables.rotation(cos, attn.rotary_sin, pairing)


def _norm(attn: Any, which: str) -> _JoinedNorm | None:
    """Return the norm of queries or keys, behind which there is no hook."""
    norm = getattr(attn, f"{which}_norm", None)
    if norm is None:
        return None
    each_head = norm.w.numel() == attn.cfg.d_head  # OLMo 2 normalises all heads together
    return _JoinedNorm(norm, (0, 2) if each_head else (2, 3))


@dataclass(frozen=True)
class _JoinedNorm:
    """A norm that the model applies to vectors with some of their axes joined."""

    norm: Any
    joined: tuple[int, int]

    def __call__(self, x: Tensor) -> Float[Tensor, "batch pos head d_head"]:
        normed: Tensor = self.norm(x.flatten(*self.joined))
        return normed.view_as(x)
