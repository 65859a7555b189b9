"""What a layer is made of beside attention, with HookedTransformer's names."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from .attention import Attention, LatentAttention, dropout, hooked
from .config import SyntheticConfig
from .encodings import Encoding


class LayerNorm(nn.Module):
    """``w · (x - mean) / √(variance + eps) + b``."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.w, self.b = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model))
        self.hook_scale = HookPoint()  # [batch, pos, 1]
        self.hook_normalized = HookPoint()  # [batch, pos, d_model]

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        if not hooked(self.hook_scale, self.hook_normalized):
            return F.layer_norm(x, self.w.shape, self.w, self.b, self.eps)
        x = x - x.mean(-1, keepdim=True)
        scale = self.hook_scale((x.square().mean(-1, keepdim=True) + self.eps).sqrt())
        normalized: Tensor = self.hook_normalized(x / scale)
        return normalized * self.w + self.b


class MLP(nn.Module):
    """One hidden layer."""

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__()
        self.W_in = nn.Parameter(torch.empty(config.d_model, config.d_mlp))
        self.b_in = nn.Parameter(torch.zeros(config.d_mlp))
        self.W_out = nn.Parameter(torch.empty(config.d_mlp, config.d_model))
        self.b_out = nn.Parameter(torch.zeros(config.d_model))
        self.activation = config.activation
        self.hook_pre, self.hook_post = HookPoint(), HookPoint()  # [batch, pos, d_mlp]

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        pre = self.hook_pre(torch.addmm(self.b_in, x.flatten(0, 1), self.W_in).view(*x.shape[:2], -1))
        post = self.hook_post(F.relu(pre) if self.activation == "relu" else F.gelu(pre))
        return torch.addmm(self.b_out, post.flatten(0, 1), self.W_out).view(*x.shape)


class Block(nn.Module):
    """Attention, then MLP, each on the normalised residual stream."""

    def __init__(self, config: SyntheticConfig, encoding: Encoding, cfg: Any) -> None:
        super().__init__()
        self.dropout_attn, self.dropout_mlp = (
            config.dropout if place in config.dropout_at else 0.0 for place in ("attn_out", "mlp_out")
        )
        self.ln1, self.ln2 = (LayerNorm(config.d_model, cfg.eps) for _ in range(2))
        self.source_norm = config.keys_from == "input" and config.source_norm
        if self.source_norm:
            self.ln_source = LayerNorm(config.d_model, cfg.eps)
        kind = LatentAttention if config.latent else Attention
        self.attn = kind(config, encoding, cfg)
        self.mlp = MLP(config)
        self.hook_attn_out, self.hook_mlp_out = HookPoint(), HookPoint()  # [batch, pos, d_model], as all below
        self.hook_resid_pre, self.hook_resid_mid, self.hook_resid_post = HookPoint(), HookPoint(), HookPoint()

    def forward(self, x: Tensor, source: Tensor | None, mask: Tensor | None) -> Tensor:
        """``x`` is the residual stream after ``hook_resid_pre``; keys read ``source``, or ``x`` too."""
        asked = self.ln1(x)
        looked_at = asked if source is None else self.ln_source(source) if self.source_norm else source
        added = dropout(self.attn(asked, looked_at, mask), self.dropout_attn, self.training)
        x = self.hook_resid_mid(x + self.hook_attn_out(added))
        added = dropout(self.mlp(self.ln2(x)), self.dropout_mlp, self.training)
        resid_post: Tensor = self.hook_resid_post(x + self.hook_mlp_out(added))
        return resid_post
