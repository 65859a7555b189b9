"""A transformer written down naively: one text, one head, one query at a time, in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.synthetic.model.encodings import alibi_slopes, t5_bucket


@torch.no_grad()
def plain_logits(model: Any, tokens: Tensor) -> Tensor:
    """What a ``SyntheticModel`` should compute, from its parameters alone; texts padded at the end if at all."""
    return torch.stack([_one_text(model, text) for text in tokens])


def _one_text(model: Any, text: Tensor) -> Tensor:
    c, w = model.config, {name: p.double() for name, p in model.named_parameters()}
    if c.pad_id is not None and c.read_out != "token":
        text = text[text != c.pad_id]  # padding might as well not be there
    x = w["embed.W_E"][text]
    if c.encoding == "sinusoidal":
        x = x + model.encoding.table[: len(text)].double()
    elif c.encoding in ("learned", "absolute_rope"):
        name = "encoding.W_pos" if c.encoding == "learned" else "encoding.absolute.W_pos"
        x = x + w[name][: len(text)]
    embedded = x
    for layer in range(c.n_layers):
        here = {name.split(".", 2)[2]: p for name, p in w.items() if name.startswith(f"blocks.{layer}.")}
        asked = _norm(x, here["ln1.w"], here["ln1.b"])
        source = asked
        if c.keys_from == "input":
            source = _norm(embedded, here["ln_source.w"], here["ln_source.b"])
        hidden = text == c.pad_id if c.pad_id is not None else torch.zeros(len(text), dtype=torch.bool)
        x = x + _attention(model, layer, here, asked, source, hidden)
        mlp = _norm(x, here["ln2.w"], here["ln2.b"]) @ here["mlp.W_in"] + here["mlp.b_in"]
        gelu = 0.5 * mlp * (1 + torch.erf(mlp / math.sqrt(2)))
        x = x + gelu @ here["mlp.W_out"] + here["mlp.b_out"]
    x = _norm(x, w["ln_final.w"], w["ln_final.b"])
    x = {"mean": x.mean(0), "last": x[-1], "token": x}[c.read_out]
    return x @ w["unembed.W_U"] + w["unembed.b_U"]


def _attention(model: Any, layer: int, w: dict[str, Tensor], asked: Tensor, source: Tensor, hidden: Tensor) -> Tensor:
    c, length = model.config, len(asked)
    out = torch.zeros_like(asked) + w["attn.b_O"]
    for h in range(c.n_heads):
        q, k, v = _latent(c, w, h, asked, source) if c.encoding == "mla" else _dense(w, h, asked, source)
        if c.encoding in ("rope", "absolute_rope", "mla") and (c.rotary_heads is None or h < c.rotary_heads):
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

    latent_q, latent = (
        rms(x @ w[f"attn.W_{name}"], w[f"attn.norm_{norm}.weight"])
        for x, name, norm in ((asked, "DQ", "q"), (source, "DKV", "kv"))
    )
    k = torch.cat([source @ w["attn.W_KR"], latent @ w["attn.W_UK"][h]], -1)
    return latent_q @ w["attn.W_UQ"][h], k, latent @ w["attn.W_UV"][h]


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
        return -alibi_slopes(c.n_heads)[h] * abs(distance)
    if c.encoding == "relative":
        return model.encoding.table[layer, h, distance + c.n_ctx - 1].double()
    if c.encoding == "t5":
        bucket = t5_bucket(torch.tensor(distance), c.t5_buckets, c.t5_max_distance, causal=c.causal)
        return model.encoding.table[h, bucket].double()
    return 0.0


def _norm(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain + shift
