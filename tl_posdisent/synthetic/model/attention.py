"""Attention with HookedTransformer's names: fused, or computed step by step if a hook reads the scores or pattern."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from .config import SyntheticConfig
from .encodings import Encoding


def hooked(*points: HookPoint) -> bool:
    """Say whether a hook reads or changes the activations at these points."""
    return any(point._forward_hooks or point._forward_pre_hooks or point._backward_hooks for point in points)


def causal_cells(length: int, device: torch.device) -> Bool[Tensor, "query key"]:
    """Return a mask that is True where a key does not follow the query."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


class Attention(nn.Module):
    """Attention in which each head has its own matrices for queries, keys and values.

    Parameters are those of HookedTransformer: ``W_Q, W_K, W_V [head, d_model, d_head]``, ``W_O [head, d_head,
    d_model]`` and their biases. The encoding belongs to the model and is shared by all layers; it is not part of this
    module's state.
    """

    def __init__(self, config: SyntheticConfig, encoding: Encoding, cfg: Any) -> None:
        super().__init__()
        self.cfg = cfg
        self.causal, self.scale = config.causal, config.head_size**-0.5
        self.dropout = config.dropout if "pattern" in config.dropout_at else 0.0
        self.shared = (encoding,)  # in a tuple, so that it is not registered as a submodule
        self._make_projections(config)
        self.W_O = nn.Parameter(torch.empty(config.n_heads, config.head_size, config.d_model))
        self.b_O = nn.Parameter(torch.zeros(config.d_model))
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()  # [batch, pos, head, d_head]
        if encoding.rotates:
            self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint()  # [batch, pos, head, d_head]
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()  # [batch, head, query, key]
        self.hook_z, self.hook_result = HookPoint(), HookPoint()  # [batch, pos, head, d_head or d_model]

    def _make_projections(self, config: SyntheticConfig) -> None:
        matrix, bias = (config.n_heads, config.d_model, config.head_size), (config.n_heads, config.head_size)
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.empty(matrix)) for _ in range(3))
        self.b_Q, self.b_K, self.b_V = (nn.Parameter(torch.zeros(bias)) for _ in range(3))

    @property
    def rotary_cos(self) -> Float[Tensor, "pos columns"] | None:
        """Cosines of the rotation by position, under HookedTransformer's name; None without rotation."""
        return getattr(self.shared[0], "rotary_cos", None)

    @property
    def rotary_sin(self) -> Float[Tensor, "pos columns"] | None:
        return getattr(self.shared[0], "rotary_sin", None)

    def forward(
        self, x: Float[Tensor, "batch pos d_model"], source: Float[Tensor, "batch pos d_model"], mask: Tensor | None
    ) -> Float[Tensor, "text pos d_model"]:  # a hook at z may change the number of texts
        """Compute attention with queries from ``x`` and keys and values from ``source``.

        ``mask`` broadcasts to ``[batch, head, query, key]``: True where a query sees a key, or numbers to add to the
        scores, with ``-inf`` for hidden keys; if the model is causal, it must hide keys after the query. None hides
        only these (in a model that is not causal, none).
        """
        q, k, v = self.vectors(x, source)
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v)
        if self.shared[0].rotates:
            rotate = self.shared[0].rotate
            q, k = self.hook_rot_q(rotate(q)), self.hook_rot_k(rotate(k))
        q, k, v = (vectors.transpose(1, 2) for vectors in (q, k, v))
        if hooked(self.hook_attn_scores, self.hook_pattern):
            z = self._stepwise(q, k, v, mask)
        else:
            bias = mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
            p, causal = self.dropout if self.training else 0.0, self.causal and mask is None
            z = F.scaled_dot_product_attention(q, k, v, bias, p, is_causal=causal, scale=self.scale)
        return self._out(self.hook_z(z.transpose(1, 2)))

    def _stepwise(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.transpose(-1, -2) * self.scale
        if mask is None and self.causal:
            mask = causal_cells(q.shape[2], q.device)
        if mask is not None:
            scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
        pattern: Tensor = self.hook_pattern(self.hook_attn_scores(scores).softmax(-1))
        return F.dropout(pattern, self.dropout, self.training) @ v

    def vectors(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values ``[batch, pos, head, d_head]``."""
        asked, keyed = (y.flatten(0, 1) for y in (x, source))
        parts = (asked, self.W_Q, self.b_Q), (keyed, self.W_K, self.b_K), (keyed, self.W_V, self.b_V)
        q, k, v = (torch.addmm(b.flatten(), y, _side_by_side(w)).view(*x.shape[:2], *b.shape) for y, w, b in parts)
        return q, k, v

    def _out(self, z: Float[Tensor, "text pos head d_head"]) -> Float[Tensor, "text pos d_model"]:
        if self.cfg.use_attn_result:
            result: Tensor = self.hook_result(torch.einsum("bphd,hdm->bphm", z, self.W_O))
            return result.sum(2) + self.b_O
        return torch.addmm(self.b_O, z.flatten(2).flatten(0, 1), self.W_O.flatten(0, 1)).view(*z.shape[:2], -1)


class LatentAttention(Attention):
    """Multi-head latent attention (arXiv 2405.04434): keys and values share a small latent, queries have another one.

    ``q = [RoPE(W_QR c_q), W_QC c_q]``, ``k = [RoPE(W_KR x), W_KC c_kv]``, ``v = W_V c_kv`` with the normalised
    latents ``c_q = norm(W_DQ x)`` and ``c_kv = norm(W_DKV x)``. The rotated coordinates come first in each head, and
    those of the keys are the same for all heads. There is no ``W_K``, because no single key matrix acts on the residual
    stream. The norms are optional, and all heads can share the rotated part of the queries, too.
    """

    def _make_projections(self, config: SyntheticConfig) -> None:
        heads, size, rotated = config.n_heads, config.head_size, config.rotary_dim
        self.rotated, self.shared_query, self.latent_norm = rotated, config.shared_rotary_query, config.latent_norm
        self.W_DQ = nn.Parameter(torch.empty(config.d_model, config.query_latent))
        self.W_DKV = nn.Parameter(torch.empty(config.d_model, config.key_latent))
        self.W_KR = nn.Parameter(torch.empty(config.d_model, rotated))
        of_head = size - rotated if self.shared_query else size
        self.W_UQ = nn.Parameter(torch.empty(heads, config.query_latent, of_head))
        if self.shared_query:
            self.W_QR = nn.Parameter(torch.empty(config.query_latent, rotated))
        self.W_UK = nn.Parameter(torch.empty(heads, config.key_latent, size - rotated))
        self.W_UV = nn.Parameter(torch.empty(heads, config.key_latent, size))
        if self.latent_norm:
            sizes = (config.query_latent, config.key_latent)
            self.norm_q, self.norm_kv = (nn.RMSNorm(n, eps=1e-6) for n in sizes)
        self.hook_q_latent, self.hook_kv_latent = HookPoint(), HookPoint()  # [batch, pos, latent]

    def vectors(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values ``[batch, pos, head, d_head]``, before rotation."""
        heads, size = len(self.W_UV), self.W_UV.shape[-1]
        rotated = self.rotated
        asking = x @ self.W_DQ
        latent, shared = (source @ torch.cat([self.W_DKV, self.W_KR], 1)).split([self.W_DKV.shape[1], rotated], -1)
        if self.latent_norm:
            asking, latent = _normalised(asking, self.norm_q), _normalised(latent, self.norm_kv)
        of_queries, of_keys = self.hook_q_latent(asking), self.hook_kv_latent(latent)
        q = (of_queries @ _side_by_side(self.W_UQ)).unflatten(-1, (heads, -1))
        if self.shared_query:
            q = torch.cat([(of_queries @ self.W_QR)[:, :, None].expand(-1, -1, heads, -1), q], -1)
        up = torch.cat([_side_by_side(self.W_UK), _side_by_side(self.W_UV)], 1)
        content, v = (of_keys @ up).split([heads * (size - rotated), heads * size], -1)
        content, v = content.unflatten(-1, (heads, -1)), v.unflatten(-1, (heads, size))
        k = torch.cat([shared[:, :, None].expand(-1, -1, heads, -1), content], -1)
        return q, k, v


def _side_by_side(w: Float[Tensor, "head rows columns"]) -> Float[Tensor, "rows all_columns"]:
    """Concatenate the matrices of all heads to one matrix."""
    return w.transpose(0, 1).flatten(1)


def _normalised(x: Float[Tensor, "*lead size"], norm: nn.RMSNorm) -> Float[Tensor, "*lead size"]:
    """Normalise ``x`` in its own dtype, which differs from the gain's under autocast."""
    return F.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)
