"""Additive scores in the place of the real ones, by brute force."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.dense import dense_fitted
from support.intervention_cases import TOKENS, L, close, logits, mixed_of
from torch import Tensor

from tl_posdisent import capture
from tl_posdisent.hooks import substitute_additive
from tl_posdisent.hooks.score_components import split_scores

ADDITIVE = ("distance", "query", "key")
pytestmark = pytest.mark.usefixtures("unchecked")


# --- three axes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gpt2", "bloom"))
def test_three_axes_by_a_dense_fit(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    names = ["blocks.0.attn.hook_attn_scores", "blocks.0.attn.hook_v"]
    with torch.no_grad():
        cache = model.run_with_cache(TOKENS, names_filter=names)[1]
    scores, v = (cache[x].double() for x in names)
    v = v.repeat_interleave(scores.shape[1] // v.shape[2], 2)
    inside = torch.ones(L, L, dtype=torch.bool).tril()
    parts = split_scores(scores, inside)
    fitted = dense_fitted(scores, inside)
    for keep, put_in in {
        ADDITIVE: fitted,
        ("key", "distance"): fitted - parts["query"],
        ("key",): parts["key"],
        ("residual", "distance"): parts["distance"] + parts["residual"],
        (): torch.zeros_like(fitted),
    }.items():
        pattern = put_in.masked_fill(~inside, -torch.inf).softmax(-1)
        expected = torch.einsum("bhqk,bkhd->bhqd", pattern, v).float()
        close(mixed_of(model, substitute_additive(model, keep, layers=[0])), expected)


# --- two axes -------------------------------------------------------------------------------------------------


def table(model: Any, layer: int) -> tuple[Tensor, Tensor, Any]:
    """``W[batch, head, d, i, j]`` in float64, before a soft cap, one distance and subspace at a time; the distances."""
    captured = capture(model, TOKENS, layers=[layer])[0]
    spec, rotary = captured.spec, captured.spec.rotary
    q, k = captured.q.double().transpose(1, 2), captured.k.double().transpose(1, 2)
    k = k.repeat_interleave(spec.n_heads // k.shape[1], 1)
    distances = torch.arange(L)[spec.sees(torch.arange(L))]
    n, out = len(rotary.frequencies), []
    for d in distances.tolist():
        w = q[..., 2 * n :] @ k[..., 2 * n :].mT
        for c, theta in enumerate(rotary.frequencies):
            x, y = (c, c + n) if rotary.pairing == "half" else (2 * c, 2 * c + 1)
            zq, zk = (torch.complex(v[..., x], v[..., y]) for v in (q, k))
            turned = zq[..., :, None] * zk.conj()[..., None, :] * torch.exp(1j * theta * d)
            w = w + turned.real * rotary.attention_factor**2
        out.append(w * spec.scale)
    return torch.stack(out, 2), distances, spec


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "llama-yarn", "gptj", "gemma2", "olmo2"))
def test_two_axes_by_the_whole_table(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    layer = 0 if name in ("llama-gqa", "gemma2") else 1  # Gemma's first layer has a window
    w, distances, spec = table(model, layer)
    i, j = torch.arange(L)[:, None], torch.arange(L)
    at = (i - j).clamp(0, len(distances) - 1)
    means = {"f": w.mean(4), "g": w.mean(2), "m": w.mean((2, 4))}  # [d, i], [i, j], [i]
    f = means["f"].transpose(2, 3)[:, :, i, at]
    own = w.permute(0, 1, 3, 4, 2)[:, :, i, j, at]
    m, mean = means["m"][..., None], means["m"].mean(-1)[..., None, None]
    parts = {"distance": f - m, "query": m - mean, "key": means["g"] - m, "residual": own - f - means["g"] + m}
    with torch.no_grad():
        name = f"blocks.{layer}.attn.hook_v"
        v = model.run_with_cache(TOKENS, names_filter=name)[1][name].double()
    v = v.repeat_interleave(spec.n_heads // v.shape[2], 2)
    for keep in (ADDITIVE, ("distance",), ("key",), ("query", "residual"), ("distance", "key", "residual"), ()):
        scores = mean + sum((parts[x] for x in keep), torch.zeros(1, 1, L, L))
        pattern = spec.capped(scores).masked_fill(~spec.mask(L), -torch.inf).softmax(-1)
        expected = torch.einsum("bhqk,bkhd->bhqd", pattern, v).float()
        close(mixed_of(model, substitute_additive(model, keep, axes="two", layers=[layer]), layer), expected)


@pytest.mark.parametrize("axes", ["three", "two"])
def test_a_padded_text_is_fitted_without_its_padding(axes: Any, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    mask = torch.ones(2, L, dtype=torch.int64)
    mask[0, :4] = 0
    for keep in (ADDITIVE, ("key", "residual")):
        hooks = substitute_additive(model, keep, axes=axes)
        with torch.no_grad(), model.hooks(fwd_hooks=hooks):
            got = model(TOKENS, attention_mask=mask)
        close(got[0, 4:], logits(model, hooks, TOKENS[:1, 4:])[0])
        close(got[1], logits(model, hooks)[1])


def test_two_axes_need_rotary_embeddings(shared_model: Any) -> None:
    model = shared_model("bridge", "gpt2")
    with pytest.raises(ValueError, match="substitute_additive with two axes needs rotary position embeddings"):
        substitute_additive(model, axes="two")
