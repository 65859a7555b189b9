"""Attention of Hugging Face models written out in float64, pair by pair, from their projections and configurations.

Nothing here comes from the package or from TransformerLens. A change of distances, of frequencies or of scores is a
change of one line, so logits under interventions have an oracle also where a model's own code computes the attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, floor, log, pi
from types import MethodType
from typing import Any

import torch
from torch import Tensor


def same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Parts:
    """What a layer's attention multiplies: queries, keys and values ``[batch, pos, head, d_head]``, and the rest."""

    q: Tensor
    k: Tensor
    v: Tensor
    theta: Tensor  # radians per position of each plane, with its sign; empty without rotation
    scale: float
    adjacent: bool = False
    window: int | None = None
    chunk: int | None = None
    after: Callable[[Tensor], Tensor] = same  # a norm after the rotation
    gate: Tensor | None = None


@dataclass(frozen=True)
class Change:
    """A change of the attention: functions of layer and of the quantity, which they return changed."""

    distances: Callable[[int, Tensor], Tensor] = lambda layer, d: d  # [head, query, key]
    theta: Callable[[int, Tensor], Tensor] = lambda layer, x: x  # [plane], or [head, plane]
    dropped: Callable[[int, Tensor], Tensor] = lambda layer, x: torch.zeros_like(x, dtype=torch.bool)  # [plane]
    rest: float = 1.0  # factor of the coordinates that do not rotate
    scores: Callable[[int, Tensor, Tensor], Tensor] = lambda layer, s, mask: s  # [batch, head, query, key]
    z: Callable[[int, Tensor], Tensor] = lambda layer, z: z  # [batch, query, head, d_head]


def rms(x: Tensor, norm: Any = None, eps: float = 1e-6) -> Tensor:
    """Root-mean-square norm, with the weight and epsilon of a module."""
    eps = next((getattr(norm, name) for name in ("eps", "variance_epsilon") if hasattr(norm, name)), eps)
    weight = getattr(norm, "weight", None)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x if weight is None else x * weight


def powers(base: float, dim: int) -> Tensor:
    return base ** -(torch.arange(0, dim, 2).double() / dim)


def _heads(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (-1, size))


NONE = torch.empty(0).double()


def _gemma4(attn: Any, x: Tensor, lent: dict[str, Any]) -> Parts:
    config, size = attn.config, attn.head_dim
    local = config.layer_types[attn.layer_idx] == "sliding_attention"
    rope = config.rope_parameters[config.layer_types[attn.layer_idx]]
    theta = powers(rope["rope_theta"], size)
    if rope["rope_type"] == "proportional":
        theta[int(rope["partial_rotary_factor"] * size // 2) :] = 0
    q = rms(_heads(attn.q_proj(x), size), attn.q_norm)
    if hasattr(attn, "k_proj"):
        k = _heads(attn.k_proj(x), size)
        v = k if attn.v_proj is None else _heads(attn.v_proj(x), size)
        lent[attn.layer_type] = rms(k, attn.k_norm), rms(v, attn.v_norm)
    k, v = lent[attn.layer_type]  # of the last layer of this kind that has its own
    return Parts(q, k, v, theta, 1.0, window=config.sliding_window if local else None)


def _llama4(attn: Any, x: Tensor, lent: dict[str, Any]) -> Parts:
    config, size = attn.config, attn.head_dim
    q, k, v = (_heads(project(x), size) for project in (attn.q_proj, attn.k_proj, attn.v_proj))
    if config.no_rope_layers[attn.layer_idx]:
        after = partial(rms, eps=config.rms_norm_eps) if config.use_qk_norm else same
        theta = powers(config.rope_parameters["rope_theta"], size)
        return Parts(q, k, v, theta, size**-0.5, adjacent=True, chunk=config.attention_chunk_size, after=after)
    return Parts(q, k, v, NONE, size**-0.5)  # its queries are scaled in longer texts alone


def _olmo_hybrid(attn: Any, x: Tensor, lent: dict[str, Any]) -> Parts:
    size, rope = attn.head_dim, attn.config.rope_parameters or {}
    q, k = (rms(project(x), norm) for project, norm in ((attn.q_proj, attn.q_norm), (attn.k_proj, attn.k_norm)))
    theta = powers(rope["rope_theta"], size) if rope.get("rope_theta") else NONE
    return Parts(_heads(q, size), _heads(k, size), _heads(attn.v_proj(x), size), theta, size**-0.5)


def _afmoe(attn: Any, x: Tensor, lent: dict[str, Any]) -> Parts:
    config, size = attn.config, attn.head_dim
    local = config.layer_types[attn.layer_idx] == "sliding_attention"
    q, k, v, gate = (_heads(project(x), size) for project in (attn.q_proj, attn.k_proj, attn.v_proj, attn.gate_proj))
    theta = powers(config.rope_parameters["rope_theta"], size) if local else NONE
    window = config.sliding_window if local else None
    q, k = rms(q, attn.q_norm), rms(k, attn.k_norm)
    return Parts(q, k, v, theta, size**-0.5, window=window, gate=1 / (1 + (-gate).exp()))


def _laguna(attn: Any, x: Tensor, lent: dict[str, Any]) -> Parts:
    config, size = attn.config, attn.head_dim
    kind = config.layer_types[attn.layer_idx]
    q, k, v = (_heads(project(x), size) for project in (attn.q_proj, attn.k_proj, attn.v_proj))
    rope = config.rope_parameters[kind]
    theta = powers(rope["rope_theta"], int(size * rope.get("partial_rotary_factor", 1.0)))
    window = config.sliding_window if kind == "sliding_attention" else None
    gate = (1 + attn.g_proj(x).exp()).log()[..., None]  # one for each head
    return Parts(rms(q, attn.q_norm), rms(k, attn.k_norm), v, theta, size**-0.5, window=window, gate=gate)


def _nanochat(attn: Any, x: Tensor, lent: dict[str, Any]) -> Parts:
    size = attn.head_dim
    q, k, v = (_heads(project(x), size) for project in (attn.q_proj, attn.k_proj, attn.v_proj))
    theta = -powers(attn.config.rope_parameters["rope_theta"], size)  # it rotates the other way
    return Parts(q, k, v, theta, size**-0.5, after=partial(rms, eps=attn.config.rms_norm_eps))


def _latent(attn: Any, x: Tensor, lent: dict[str, Any]) -> Parts:
    """Multi-head latent attention: a slice of each query rotates, and one slice of keys that all heads share."""
    config, rope = attn.config, attn.config.rope_parameters
    content, rotated = config.qk_nope_head_dim, config.qk_rope_head_dim
    q = attn.q_proj(x) if config.q_lora_rank is None else attn.q_b_proj(rms(attn.q_a_proj(x), attn.q_a_layernorm))
    q = _heads(q, content + rotated)
    latent, shared = attn.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, rotated], -1)
    k, v = _heads(attn.kv_b_proj(rms(latent, attn.kv_a_layernorm)), content + config.v_head_dim).split(
        [content, config.v_head_dim], -1
    )
    q = torch.cat([q[..., content:], q[..., :content]], -1)
    k = torch.cat([shared[:, :, None].expand(*k.shape[:3], -1), k], -1)
    theta, scale = powers(rope["rope_theta"], rotated), (content + rotated) ** -0.5
    if rope["rope_type"] == "yarn":
        theta, scale = _yarn(theta, rope), scale * (0.1 * rope["mscale_all_dim"] * log(rope["factor"]) + 1) ** 2
    adjacent = type(attn).__name__ == "DeepseekV2Attention" or config.rope_interleave
    return Parts(q, k, v, theta, scale, adjacent=adjacent)


def _yarn(theta: Tensor, rope: dict[str, Any]) -> Tensor:
    """Interpolate between unscaled and scaled frequencies (arXiv 2309.00071), by the planes' turns in training."""
    n, base, length = len(theta), rope["rope_theta"], rope["original_max_position_embeddings"]
    low, high = (n * log(length / (turns * 2 * pi)) / log(base) for turns in (rope["beta_fast"], rope["beta_slow"]))
    low, high = max(floor(low), 0), min(ceil(high), 2 * n - 1)
    scaled = ((torch.arange(n).double() - low) / max(high - low, 1e-3)).clamp(0, 1)
    return theta * (1 - scaled) + theta / rope["factor"] * scaled


_PARTS = {
    **dict.fromkeys(("DeepseekV2Attention", "DeepseekV3Attention", "Glm4MoeLiteAttention", "YoutuAttention"), _latent),
    "Gemma4TextAttention": _gemma4,
    "Llama4TextAttention": _llama4,
    "OlmoHybridAttention": _olmo_hybrid,
    "AfmoeAttention": _afmoe,
    "LagunaAttention": _laguna,
    "NanoChatAttention": _nanochat,
}


def scores_of(parts: Parts, distances: Tensor, theta: Tensor, dropped: Tensor) -> Tensor:
    """Scores of every query with every key at these distances ``[head, query, key]``, ``theta [head or 1, plane]``."""
    group, n = parts.q.shape[2] // parts.k.shape[2], theta.shape[-1]
    q, k = parts.q, parts.k.repeat_interleave(group, 2)
    planes = torch.arange(2 * n).view(n, 2) if parts.adjacent else torch.arange(2 * n).view(2, n).T
    q = q.clone()
    first, second = q[..., planes[:, 0]], q[..., planes[:, 1]]
    angle = distances[..., None] * theta[:, None, None, :]  # [head, query, key, plane]
    turned = (
        q.transpose(1, 2)[:, :, :, None].expand(*([-1] * 3), k.shape[1], -1).clone()
    )  # [batch, head, query, key, d]
    first, second = (x.transpose(1, 2)[:, :, :, None] for x in (first, second))
    turned[..., planes[:, 0]] = first * angle.cos() - second * angle.sin()
    turned[..., planes[:, 1]] = first * angle.sin() + second * angle.cos()
    turned = parts.after(turned)
    turned[..., planes[dropped].flatten()] = 0
    return parts.scale * torch.einsum("bhqkd,bkhd->bhqk", turned, parts.after(k))


def mask_of(parts: Parts) -> Tensor:
    i = torch.arange(parts.q.shape[1])
    d, mask = i[:, None] - i, i[:, None] >= i
    if parts.window is not None:
        mask = mask & (d < parts.window)
    return mask if parts.chunk is None else mask & (i[:, None] // parts.chunk == i // parts.chunk)


def attend(parts: Parts, layer: int, change: Change) -> tuple[Tensor, Tensor]:
    """Return z ``[batch, query, head, d_head]`` and the scores."""
    n_heads, i = parts.q.shape[2], torch.arange(parts.q.shape[1]).double()
    distances = change.distances(layer, (i[:, None] - i).expand(n_heads, -1, -1))
    theta = change.theta(layer, parts.theta)
    theta = theta[None] if theta.ndim == 1 else theta
    mask = mask_of(parts)
    weights = torch.ones(parts.q.shape[-1]).double()
    weights[2 * len(parts.theta) :] = change.rest
    parts = replace(parts, q=parts.q * weights)
    scores = change.scores(layer, scores_of(parts, distances, theta, change.dropped(layer, parts.theta)), mask)
    pattern = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    v = parts.v.repeat_interleave(n_heads // parts.v.shape[2], 2)
    z = torch.einsum("bhqk,bkhd->bqhd", pattern, v)
    return change.z(layer, z if parts.gate is None else z * parts.gate), scores


@contextlib.contextmanager
def written_out(model: Any, change: Change = Change()) -> Iterator[dict[int, tuple[Parts, Tensor]]]:
    """Let a Hugging Face model in float64 compute its attention here; yields what each layer multiplied, and scores."""
    lent: dict[str, Any] = {}
    seen: dict[int, tuple[Parts, Tensor]] = {}
    layers = [part for part in model.modules() if type(part).__name__ in _PARTS]

    def forward(attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        parts = _PARTS[type(attn).__name__](attn, hidden_states, lent)
        z, scores = attend(parts, attn.layer_idx, change)
        seen[attn.layer_idx] = parts, scores
        return attn.o_proj(z.flatten(2)), None

    for attn in layers:
        attn.forward = MethodType(forward, attn)
    try:
        with torch.no_grad():
            yield seen
    finally:
        for attn in layers:
            del attn.forward
