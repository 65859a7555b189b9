"""The adapter of multi-head latent attention, whose hook_q and hook_k carry rotated vectors (DeepSeek)."""

from __future__ import annotations

from typing import Any

from tl_posdisent.models.reading.hugging_face import causal, kinds_of, window
from tl_posdisent.models.reading.layer import Layer
from tl_posdisent.models.reading.query_key_hooks import LatentLayout
from tl_posdisent.models.reading.rotations import stored_rotation
from tl_posdisent.models.reading.spec import AttentionSpec

LATENT = "MLAAttentionBridge"
"""The class of TransformerLens."""

_KEYS, _SHARED = "kv_b_proj.hook_out", "kv_a_proj_with_mqa.hook_out"  # content of keys and values; rotated slice


def latent_attention(layer: Layer) -> AttentionSpec:
    """Describe a layer of a bridge with multi-head latent attention."""
    original, n_heads = layer.original, layer.model.cfg.n_heads
    content, rotated = original.qk_nope_head_dim, original.qk_rope_head_dim
    complex_table = "DeepseekV2" in type(original).__name__  # one complex number for each pair of neighbours
    sparse = "GlmMoeDsaAttentionBridge" in kinds_of(layer)
    interleaved = not complex_table and (sparse or bool(getattr(original.config, "rope_interleave", False)))
    compressed = getattr(original, "q_lora_rank", None) is not None
    queries = "q_b_proj.hook_out" if compressed else "q_proj.hook_out"
    latent, shared = layer.name("q_a_proj.hook_out") if compressed else None, layer.name(_SHARED)
    before: dict[str, Any] = {
        "q": layer.tap(queries, n_heads, "flat", latent=LatentLayout(content, rotated, None, latent, interleaved)),
        "k": layer.tap(_KEYS, n_heads, "flat", latent=LatentLayout(content, rotated, shared, shared, interleaved)),
    }
    after = {
        f"{which}_rot": layer.tap(f"hook_{which}", n_heads, "head pos", latent=LatentLayout(content, rotated))
        for which in "qk"
    }
    size = content + rotated
    scales = (getattr(original, name, None) for name in ("scaling", "softmax_scale"))
    return layer.spec(
        layer.taps(**before, **after, v=layer.tap("hook_v", n_heads, "head pos")),
        n_kv_heads=n_heads,
        d_head=size,
        causal=causal(layer),
        window=window(layer),
        order=("q", "k", "q_rot", "k_rot", "v"),
        rotary=stored_rotation(layer.model, layer.number, "adjacent" if complex_table else "half"),
        scale=next((float(scale) for scale in scales if scale is not None), size**-0.5),
    )
