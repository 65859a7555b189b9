"""A naive transformer: one text, one head, one query at a time, in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.synthetic.model.encodings import alibi_slopes, t5_bucket


@torch.no_grad()
def plain_logits(model: Any, tokens: Tensor) -> Tensor:
    """Compute the logits of a ``SyntheticModel`` from its parameters; padding is allowed at the end."""
    return torch.stack([_one_text(model, text) for text in tokens])


def _one_text(model: Any, text: Tensor) -> Tensor:
    c, w = model.config, {name: p.double() for name, p in model.named_parameters()}
    if c.pad_id is not None and c.read_out != "token":
        text = text[text != c.pad_id]  # padding might as well not be there
    x = w["embed.W_E"][text]
    if c.encoding in ("sinusoidal", "sinusoidal_rope"):
        x = x + torch.stack([_sinusoids(p, c.d_model, c.sinusoids) for p in range(len(text))])
    elif c.encoding == "random":
        x = x + model.encoding.W_pos[: len(text)].double()
    elif c.encoding in ("learned", "absolute_rope", "absolute_mla"):
        name = "encoding.W_pos" if c.encoding == "learned" else "encoding.absolute.W_pos"
        x = x + w[name][: len(text)]
    embedded = x
    for layer in range(c.n_layers):
        here = {name.split(".", 2)[2]: p for name, p in w.items() if name.startswith(f"blocks.{layer}.")}
        asked = _norm(x, here["ln1.w"], here["ln1.b"])
        source = asked
        if c.keys_from == "input":
            source = _norm(embedded, here["ln_source.w"], here["ln_source.b"]) if c.source_norm else embedded
        hidden = text == c.pad_id if c.pad_id is not None else torch.zeros(len(text), dtype=torch.bool)
        x = x + _attention(model, layer, here, asked, source, hidden)
        mlp = _norm(x, here["ln2.w"], here["ln2.b"]) @ here["mlp.W_in"] + here["mlp.b_in"]
        gelu = 0.5 * mlp * (1 + torch.erf(mlp / math.sqrt(2)))
        active = gelu if c.activation == "gelu" else mlp * (mlp > 0)
        x = x + active @ here["mlp.W_out"] + here["mlp.b_out"]
    if c.final_norm:
        x = _norm(x, w["ln_final.w"], w["ln_final.b"])
    x = {"mean": x.mean(0), "last": x[-1], "token": x}[c.read_out]
    return x @ w["unembed.W_U"] + w["unembed.b_U"]


def _attention(model: Any, layer: int, w: dict[str, Tensor], asked: Tensor, source: Tensor, hidden: Tensor) -> Tensor:
    c, length = model.config, len(asked)
    out = torch.zeros_like(asked) + w["attn.b_O"]
    for h in range(c.n_heads):
        q, k, v = _latent(c, w, h, asked, source) if "mla" in c.encoding else _dense(w, h, asked, source)
        if c.encoding.endswith(("rope", "mla")) and (c.rotary_heads is None or h < c.rotary_heads):
            q, k = _turned(q, c.rotary_dim, c.rope_base), _turned(k, c.rotary_dim, c.rope_base)
        for i in range(length):
            seen = [j for j in range(length) if not hidden[j] and (j <= i or not c.causal)]
            scores = torch.stack([q[i] @ k[j] / math.sqrt(c.head_size) + _bias(model, layer, h, i - j) for j in seen])
            out[i] += scores.softmax(0) @ v[seen] @ w["attn.W_O"][h]
    return out


def _dense(w: dict[str, Tensor], h: int, asked: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = asked @ w["attn.W_Q"][h] + w["attn.b_Q"][h]
    return q, source @ w["attn.W_K"][h] + w["attn.b_K"][h], source @ w["attn.W_V"][h] + w["attn.b_V"][h]


def _latent(c: Any, w: dict[str, Tensor], h: int, asked: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def rms(x: Tensor, gain: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    latent_q, latent = asked @ w["attn.W_DQ"], source @ w["attn.W_DKV"]
    if c.latent_norm:
        latent_q, latent = rms(latent_q, w["attn.norm_q.weight"]), rms(latent, w["attn.norm_kv.weight"])
    q = latent_q @ w["attn.W_UQ"][h]
    if c.shared_rotary_query:
        q = torch.cat([latent_q @ w["attn.W_QR"], q], -1)
    k = torch.cat([source @ w["attn.W_KR"], latent @ w["attn.W_UK"][h]], -1)
    return q, k, latent @ w["attn.W_UV"][h]


def _turned(x: Tensor, dim: int, base: float) -> Tensor:
    x, n = x.clone(), dim // 2
    for p in range(len(x)):
        for c in range(n):
            angle = p * base ** (-c / n)
            z = complex(x[p, c], x[p, c + n]) * complex(math.cos(angle), math.sin(angle))
            x[p, c], x[p, c + n] = z.real, z.imag
    return x


def _bias(model: Any, layer: int, h: int, distance: int) -> float | Tensor:
    c = model.config
    if c.encoding == "alibi":
        slope = alibi_slopes(c.n_heads)[h] if c.alibi_slopes == "powers" else math.exp(-h / c.n_heads)
        return -slope * abs(distance)
    if c.encoding == "t5":
        bucket = t5_bucket(torch.tensor(distance), c.t5_buckets, c.t5_max_distance, causal=c.causal)
        return model.encoding.table[h, bucket].double()
    return 0.0


def _sinusoids(position: int, width: int, order: str) -> Tensor:
    angles = [position / 10000 ** (2 * c / width) for c in range(width // 2)]
    pairs = torch.tensor([(math.sin(a), math.cos(a)) for a in angles], dtype=torch.float64)
    return pairs.flatten() if order == "alternating" else pairs.T.flatten()


def _norm(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain + shift
