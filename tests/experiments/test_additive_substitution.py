"""Additive scores in the place of the real ones: by brute force, by algebra, and what the table says of a run."""

from __future__ import annotations

from itertools import combinations
from typing import Any, get_args

import pandas as pd
import pytest
import torch
from support import zoo
from support.dense import dense_fitted
from support.intervention_cases import TOKENS, L, close, logits, mixed_of
from support.untouched import state
from torch import Tensor

from tl_posdisent import additive_substitution, capture
from tl_posdisent.hooks import substitute_additive
from tl_posdisent.hooks.ablate import ablate_heads
from tl_posdisent.hooks.score_components import ScorePart, split_scores

PARTS = get_args(ScorePart)
ADDITIVE = ("distance", "query", "key")
pytestmark = pytest.mark.usefixtures("unchecked")


def run(model: Any, **options: Any) -> pd.DataFrame:
    return additive_substitution(model, TOKENS, progress=False, **options)


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


# --- the table ------------------------------------------------------------------------------------------------


def figures(model: Any, hooks: list[Any]) -> tuple[float, float]:
    """Loss and divergence from the untouched model, by other means."""
    clean, changed = logits(model, []).double(), logits(model, hooks).double()
    loss = torch.nn.functional.cross_entropy(changed[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    p, q = (torch.distributions.Categorical(logits=x[:, :-1]) for x in (clean, changed))
    return loss.item(), torch.distributions.kl_divergence(p, q).mean().item()


@pytest.mark.parametrize(
    ("kind", "name", "axes"),
    [
        ("bridge", "llama-gqa", "three"),
        pytest.param("hooked", "llama-gqa", "two", marks=pytest.mark.slow),
        pytest.param("bridge", "gpt2", "three", marks=pytest.mark.slow),
    ],
)
def test_every_row_is_the_run_that_it_says(kind: str, name: str, axes: Any, shared_model: Any) -> None:
    model = shared_model(kind, name)
    before, plain = state(model), figures(model, [])
    rows = run(model, axes=axes, seed=3)
    assert state(model) == before
    assert len(rows) == 3 * (16 + 2 + 1) + 15
    for row in [*rows.iloc[::13].itertuples(), *rows.iloc[-18::2].itertuples()]:
        layers = None if row.scope == "all" else [int(row.layer)]
        heads = [int(row.head)] if row.scope == "head" else None
        assert pd.isna(row.layer) == (row.scope == "all")
        assert pd.isna(row.head) == (row.scope != "head")
        if row.put_in == "shuffled fit":
            continue
        if row.put_in == "zero":
            hooks = ablate_heads(model, [(x, h) for x in layers or (0, 1) for h in heads or range(8)])
        else:
            keep = () if row.keep == "mean" else row.keep.split("+")
            hooks = substitute_additive(model, keep, axes=axes, layers=layers, heads=heads)
        loss, kl = figures(model, hooks)
        assert row.loss == pytest.approx(loss, abs=1e-4)
        assert row.kl == pytest.approx(kl, abs=1e-4)
        assert row.change == pytest.approx(loss - plain[0], abs=1e-4)
    everything = rows[rows["keep"] == "+".join(PARTS)]
    assert len(everything) == 1
    assert everything[["change", "kl"]].abs().max().max() < 1e-6
    subsets = rows[(rows["scope"] == "all") & (rows["put_in"] == "fit")]["keep"]
    expected = {"+".join(keep) or "mean" for n in range(5) for keep in combinations(PARTS, n)}
    assert len(subsets) == 16
    assert set(subsets) == expected
    # Without a sink nobody sees the query part.
    loss = rows[(rows["scope"] == "all") & (rows["put_in"] == "fit")].set_index("keep")["loss"]
    assert loss["distance+key"] == pytest.approx(loss["distance+query+key"], abs=1e-4)
    assert abs(loss["distance"] - loss["key"]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["three", "two"])
def test_the_shuffled_fit_is_that_of_a_shuffled_text(axes: Any, shared_model: Any) -> None:
    """Of a text of three there are two: the first token stays where it is. Both occur, and no other."""
    model, text = shared_model("bridge", "llama-gqa"), TOKENS[:1, :3]
    name, possible = "blocks.0.attn.hook_attn_scores", []
    for tokens in (text, text[:, [0, 2, 1]]):
        with torch.no_grad(), model.hooks(fwd_hooks=substitute_additive(model, axes=axes, layers=[0])):
            fitted = model.run_with_cache(tokens, names_filter=name)[1][name]
        changed = logits(model, [(name, lambda x, hook, fitted=fitted: fitted)], text).double()
        possible.append(torch.nn.functional.cross_entropy(changed[0, :-1], text[0, 1:]).item())
    assert abs(possible[0] - possible[1]) > 1e-3
    tables = [
        additive_substitution(model, text, axes=axes, layers=[0], seed=seed, progress=False) for seed in (0, 1, 0)
    ]
    pd.testing.assert_frame_equal(tables[0], tables[2])
    rows = pd.concat(tables)
    got = rows.query("scope == 'layer' and put_in == 'shuffled fit'")["loss"].tolist()
    nearest = {min((abs(loss - x), n) for n, x in enumerate(possible)) for loss in got}
    assert {n for _, n in nearest} == {0, 1}
    assert max(error for error, _ in nearest) < 1e-5
    others = rows[rows["put_in"] != "shuffled fit"]  # the seed is none of their business
    assert others.groupby(["scope", "head", "put_in", "keep"], dropna=False)["loss"].std().max() == 0


def test_controls_do_not_change_the_other_rows(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    whole, zero, none = (run(model, layers=[1], controls=some) for some in (("shuffled fit", "zero"), "zero", ()))
    for some, left_out in ((zero, ["shuffled fit"]), (none, ["shuffled fit", "zero"])):
        expected = whole[~whole["put_in"].isin(left_out)].reset_index(drop=True)
        pd.testing.assert_frame_equal(some, expected, rtol=1e-5, atol=1e-6)


def test_two_axes_need_rotary_embeddings(shared_model: Any) -> None:
    model = shared_model("bridge", "gpt2")
    for tool in (substitute_additive, lambda m, axes: additive_substitution(m, TOKENS, axes=axes)):
        with pytest.raises(ValueError, match="with two axes needs rotary position embeddings"):
            tool(model, axes="two")
