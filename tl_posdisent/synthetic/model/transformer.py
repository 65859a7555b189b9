"""A small transformer with TransformerLens's interface and any position encoding."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.config import TransformerLensConfig
from transformer_lens.hook_points import HookPoint

from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_choice

from .attention import Attention, LatentAttention, causal_cells, hooked
from .config import SyntheticConfig
from .encodings import Encoding, make_encoding

__all__ = ["SyntheticConfig", "SyntheticModel"]

_KINDS = dict.fromkeys(("rope", "absolute_rope", "sinusoidal_rope", "mla", "absolute_mla"), "rotary")
_KINDS |= dict.fromkeys(("sinusoidal", "learned", "random"), "standard") | {"alibi": "alibi", "none": "none"}


class Embed(nn.Module):
    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__()
        self.W_E = nn.Parameter(torch.empty(config.d_vocab, config.d_model))


class Unembed(nn.Module):
    """Map the residual stream to the logits of the classes."""

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__()
        self.W_U = nn.Parameter(torch.empty(config.d_model, config.n_out))
        self.b_U = nn.Parameter(torch.zeros(config.n_out))
        self.hook_in, self.hook_out = HookPoint(), HookPoint()  # [batch, (pos,) d_model or n_out]

    def forward(self, x: Float[Tensor, "*lead d_model"]) -> Float[Tensor, "*lead n_out"]:
        logits: Tensor = self.hook_out(self.hook_in(x) @ self.W_U + self.b_U)
        return logits


class LayerNorm(nn.Module):
    """Layer norm ``w · (x - mean) / √(variance + eps) + b``."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.w = nn.Parameter(torch.ones(d_model))
        self.b = nn.Parameter(torch.zeros(d_model))
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
        """Run the block on the residual stream ``x`` after ``hook_resid_pre``; keys read ``source``, if given."""
        asked = self.ln1(x)
        looked_at = asked if source is None else self.ln_source(source) if self.source_norm else source
        added = F.dropout(self.attn(asked, looked_at, mask), self.dropout_attn, self.training)
        x = self.hook_resid_mid(x + self.hook_attn_out(added))
        added = F.dropout(self.mlp(self.ln2(x)), self.dropout_mlp, self.training)
        resid_post: Tensor = self.hook_resid_post(x + self.hook_mlp_out(added))
        return resid_post


class SyntheticModel(HookedRootModule):  # type: ignore[misc]
    """A pre-norm transformer whose hooks and parameters have HookedTransformer's names and shapes.

    All tools of this package work on it, and so do ``run_with_cache``, ``run_with_hooks`` and ``hooks`` of
    TransformerLens. Attention is fused unless there is a hook at a layer's ``hook_attn_scores`` or ``hook_pattern``.

    Args:
        config: the settings; its ``seed`` determines the weights, and the global random state does not change.

    Attributes:
        config: as given.
        cfg: the same under TransformerLens's names; ``hook_result`` fires only while its ``use_attn_result`` is True.
        encoding: the position encoding, shared by all layers.

    Example:
        >>> import torch
        >>> from tl_posdisent.synthetic import SyntheticConfig, SyntheticModel
        >>> config = SyntheticConfig(n_layers=2, d_model=32, n_heads=4, d_mlp=64, d_vocab=50, n_ctx=24, n_out=7)
        >>> model, tokens = SyntheticModel(config), torch.arange(40).view(2, 20)
        >>> logits, cache = model.run_with_cache(tokens)
        >>> logits.shape, cache["pattern", 1].shape
        (torch.Size([2, 7]), torch.Size([2, 4, 20, 20]))
    """

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__()
        if not isinstance(config, SyntheticConfig):
            raise ArgumentError("config", f"must be a SyntheticConfig, got {type(config).__name__}")
        self.config = config
        sizes = ("d_model", "n_layers", "n_ctx", "n_heads", "d_mlp", "d_vocab")
        self.cfg = TransformerLensConfig(
            **{name: getattr(config, name) for name in sizes},
            d_head=config.head_size,
            device="cpu",
            positional_embedding_type=_KINDS.get(config.encoding, "relative_positional_bias"),
            act_fn=config.activation,
        )
        self.cfg.pad_id, self.cfg.seed, self.cfg.rotary_heads = config.pad_id, config.seed, config.rotary_heads
        self.cfg.attention_dir = "causal" if config.causal else "bidirectional"
        self.embed, self.unembed = Embed(config), Unembed(config)
        self.hook_embed = HookPoint()  # [batch, pos, d_model]
        self.encoding = make_encoding(config)
        if self.encoding.embed(1) is not None:
            self.hook_pos_embed = HookPoint()  # [batch, pos, d_model]
        self.blocks = nn.ModuleList(Block(config, self.encoding, self.cfg) for _ in range(config.n_layers))
        if config.final_norm:
            self.ln_final = LayerNorm(config.d_model, self.cfg.eps)
        self._initialise(torch.Generator().manual_seed(config.seed))
        self.setup()

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Draw the weights as ``SyntheticConfig.initialisation`` says; vectors of tokens and positions are N(0, 1)."""
        as_torch, named = self.config.initialisation == "torch", dict(self.named_parameters())
        scales = {name: _scale(p, name) for name, p in named.items() if name.rpartition(".")[2].startswith("W_")}
        for name, scale in scales.items():
            last = name.rpartition(".")[2]
            if last == "W_pos":
                continue
            drawn = torch.rand if as_torch and last != "W_E" else torch.randn
            values = drawn(named[name].shape, generator=generator)
            if drawn is torch.rand:
                values = 2 * values - 1
            elif last in ("W_O", "W_out"):
                scale *= (2 * self.config.n_layers) ** -0.5
            named[name].copy_(scale * values)
        for name in named if as_torch else ():  # each bias like its matrix, b_Q like W_Q
            if (matrix := name.replace(".b_", ".W_")) != name and matrix in scales:
                values = 2 * torch.rand(named[name].shape, generator=generator) - 1
                named[name].copy_(scales[matrix] * values)
        self.encoding.initialise(generator)

    def forward(
        self,
        tokens: Int[Tensor, "batch pos"],
        *,
        return_type: Literal["logits"] = "logits",
        stop_at_layer: int | None = None,
        checked: bool = False,
    ) -> Tensor:
        """Compute the logits of a batch of texts.

        Args:
            tokens: ids ``[batch, pos]`` (or ``[pos]``, one text).
            return_type: as in HookedTransformer.
            stop_at_layer: return the residual stream ``[batch, pos, d_model]`` before this layer instead.
            checked: True skips the check that ids are in the vocabulary, which waits for a GPU.

        Returns:
            Logits ``[batch, n_out]``, or ``[batch, pos, n_out]`` with ``read_out="token"``.

        Raises:
            ValueError: ids out of range; a text longer than the encoding allows.
        """
        check_choice("return_type", return_type, ["logits"])
        self.check_tokens(tokens, values=not checked)
        tokens = tokens if tokens.ndim == 2 else tokens[None]
        real = None if self.config.pad_id is None else tokens != self.config.pad_id
        mask = self._mask(real, tokens.shape[1], tokens.device)
        x, source = self._embedded(tokens), None
        blocks: Any = self.blocks if stop_at_layer is None else self.blocks[:stop_at_layer]
        for block in blocks:
            x = block.hook_resid_pre(x)
            if source is None and self.config.keys_from == "input":
                source = x
            x = block(x, source, mask)
        if stop_at_layer is not None:
            return x
        return self._read_out(self.ln_final(x) if self.config.final_norm else x, real)

    def check_tokens(self, tokens: Tensor, *, values: bool = True) -> None:
        """Raise unless the tokens are valid for the model; ``values=False`` skips the check that waits for a GPU."""
        if tokens.ndim not in (1, 2) or tokens.numel() == 0 or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ArgumentError(
                "tokens", f"must be integers of shape (batch, pos), got {tokens.dtype} of shape {tuple(tokens.shape)}"
            )
        longest = self.encoding.longest
        if longest is not None and tokens.shape[-1] > longest:
            raise ArgumentError(
                "tokens",
                f"must be at most n_ctx = {longest} long with encoding={self.config.encoding!r}, "
                f"got {tokens.shape[-1]}",
            )
        if values:
            least, most = (int(x) for x in tokens.aminmax())
            if least < 0 or most >= self.config.d_vocab:
                raise ArgumentError("tokens", f"must be ids from 0 to {self.config.d_vocab - 1}, got {least} … {most}")

    def _mask(self, real: Tensor | None, length: int, device: torch.device) -> Tensor | None:
        """Compute the mask (with any bias) once for all layers, as it may be as large as the scores."""
        bias = self.encoding.bias(length)
        visible = None if real is None else visible_keys(real, causal=self.config.causal)
        if bias is None:
            return visible
        if visible is None and self.config.causal:
            visible = causal_cells(length, device)
        return bias[None] if visible is None else torch.where(visible, bias[None], -torch.inf)

    def _embedded(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        x: Tensor = self.hook_embed(F.embedding(tokens, self.embed.W_E))
        positions = self.encoding.embed(tokens.shape[1])
        if positions is not None:
            positions = positions.to(x.dtype)
            x = x + (self.hook_pos_embed(positions.expand_as(x)) if hooked(self.hook_pos_embed) else positions)
        return F.dropout(x, self.config.dropout, self.training and "embed" in self.config.dropout_at)

    def _read_out(self, x: Float[Tensor, "batch pos d_model"], real: Bool[Tensor, "batch pos"] | None) -> Tensor:
        if self.config.read_out == "mean":
            shares = None if real is None else real.to(x.dtype) / real.sum(1, keepdim=True).clamp_min(1)
            x = x.mean(1) if shares is None else (shares[:, None] @ x)[:, 0]
        elif self.config.read_out == "last":
            behind = 0 if real is None else real.flip(1).int().argmax(1) * real.any(1)
            x = x[torch.arange(len(x), device=x.device), x.shape[1] - 1 - behind]
        logits: Tensor = self.unembed(x)
        return logits

    def run_with_cache(
        self, *args: Any, return_cache_object: bool = True, remove_batch_dim: bool = False, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Run the model, and return its output and an ``ActivationCache`` (or a dict), as in HookedTransformer."""
        out, cache = super().run_with_cache(*args, remove_batch_dim=remove_batch_dim, **kwargs)
        return out, ActivationCache(cache, self, has_batch_dim=not remove_batch_dim) if return_cache_object else cache

    def _apply(self, fn: Any, recurse: bool = True) -> SyntheticModel:
        super()._apply(fn, recurse)  # TransformerLens's own tools read the model's device from the configuration
        self.cfg.device = str(self.embed.W_E.device)
        return self

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Choose whether ``hook_result`` fires, with each head's part of the attention output."""
        self.cfg.use_attn_result = use_attn_result


def _scale(matrix: Tensor, name: str) -> float:
    """Return 1 / √n for n inputs that each output sums over; 1 for vectors of tokens."""
    if name.endswith("W_E"):
        return 1.0
    inputs = matrix.shape[:2].numel() if name.endswith("W_O") else matrix.shape[-2]
    return float(inputs**-0.5)


def visible_keys(real: Bool[Tensor, "batch pos"], *, causal: bool) -> Bool[Tensor, "batch 1 query_or_1 pos"]:
    """Return where a query sees a key if padding is hidden.

    Queries in leading padding would see no key; they see all keys up to their own.
    """
    if not causal:
        return (real | ~real.any(1, keepdim=True))[:, None, None]
    leading = real.cumsum(1) == 0
    past = causal_cells(real.shape[1], real.device)
    return (past & (real[:, None] | leading[:, :, None]))[:, None]
