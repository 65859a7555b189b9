"""Parts of scores inside a forward pass: they add up, each is what it is called, and dropping one drops that one."""

from __future__ import annotations

from itertools import combinations
from typing import Any, get_args

import pytest
import torch
from support import zoo
from support.dense import dense_fitted
from support.intervention_cases import close, logits
from torch import Tensor

from tl_posdisent import capture
from tl_posdisent.hooks import drop_component
from tl_posdisent.hooks.score_components import ScorePart, keep_parts, split_scores, split_two_axis

PARTS = get_args(ScorePart)
# Scores edited; z recomputed; no rotation: learned, ALiBi; soft cap and window; multi-head latent attention.
ALL_KINDS = zoo.cases("llama-gqa", "gpt2", "gptj", "bloom", "gemma2", "deepseek_v3")
each_kind = pytest.mark.parametrize(("kind", "name"), ALL_KINDS)
pytestmark = pytest.mark.usefixtures("unchecked")


def masks(length: int) -> dict[str, Tensor]:
    """As models have them: shared, of a window, and of texts of which some are padded."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    padded = torch.stack([causal, causal.clone(), causal.clone()])[:, None].expand(3, 4, length, length).clone()
    padded[1, :, :, :5] = False  # on the left: its first queries see nothing
    padded[2, :, 9:] = False  # on the right
    return {"causal": causal, "full": torch.ones_like(causal), "window": causal.triu(-3), "padded": padded}


def random_scores(length: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 4, length, length, generator=generator, dtype=torch.float64).to(dtype) * 3 + 7


@pytest.mark.parametrize("which", ["causal", "full", "window", "padded"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parts_add_up_and_are_what_they_are_called(which: str, dtype: torch.dtype) -> None:
    inside = masks(13)[which]
    scores = random_scores(13, dtype).masked_fill(~inside, torch.finfo(dtype).min)
    parts = split_scores(scores, inside)
    assert all(part.dtype == torch.float64 and part.shape == scores.shape for part in parts.values())
    total = sum(parts.values())
    assert (total - scores.double())[inside.expand(scores.shape)].abs().max() < 1e-12
    assert all(bool((part[~inside.expand(scores.shape)] == 0).all()) for part in parts.values())
    cells = inside.expand(scores.shape)
    for text in range(3):
        for head in range(4):
            i, j = cells[text, head].nonzero(as_tuple=True)
            for name, group in (("distance", i - j), ("query", i), ("key", j), ("mean", 0 * i)):
                values = parts[name][text, head, i, j]
                for g in group.unique():
                    assert values[group == g].std(correction=0) < 1e-12, name
                assert name == "mean" or abs(values.mean()) < 1e-12
    # What the fit leaves has no distance, query or key part of its own: the fit is one by least squares.
    expected = dense_fitted(torch.where(cells, scores.double(), 0.0), cells)
    assert (parts["residual"] - torch.where(cells, scores.double() - expected, 0.0)).abs().max() < 1e-8


@pytest.mark.parametrize("which", ["causal", "padded"])
@pytest.mark.parametrize("keep", [keep for n in range(5) for keep in combinations(PARTS, n)], ids="+".join)
def test_kept_parts_are_their_sum(which: str, keep: tuple[ScorePart, ...]) -> None:
    inside = masks(13)[which]
    scores = random_scores(13).masked_fill(~inside, -torch.inf)
    parts = split_scores(scores, inside)
    expected = parts["mean"] + sum((parts[name] for name in keep), torch.zeros(()))
    cells = inside.expand(scores.shape)
    assert (keep_parts(scores, inside, keep) - expected)[cells].abs().max() < 1e-12
    if len(keep) == 4:
        assert keep_parts(scores, inside, keep) is scores


def test_gradients_take_the_fit_for_constant() -> None:
    inside = masks(7)["causal"]
    scores = random_scores(7).requires_grad_()
    (gradient,) = torch.autograd.grad(keep_parts(scores, inside, ("query", "residual"))[..., inside].sum(), scores)
    assert torch.equal(gradient, inside.double().expand(gradient.shape))


@each_kind
def test_a_softmax_does_not_see_the_query_part(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    plain = logits(model, [])
    close(logits(model, drop_component(model, "query")), plain)
    for part in ("distance", "key", "residual"):
        assert (logits(model, drop_component(model, part)) - plain).abs().max() > 0.1, part


def test_a_sink_sees_it(shared_model: Any) -> None:
    model = shared_model("bridge", "gpt_oss")
    assert (logits(model, drop_component(model, "query")) - logits(model, [])).abs().max() > 0.1


def test_scores_that_are_not_finite_are_refused(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")

    def broken(x: Tensor, hook: Any) -> Tensor:
        return x.index_put(tuple(torch.tensor(i) for i in (0, 3, 5, 2)), torch.tensor(torch.nan))

    with pytest.raises(ValueError, match=r"scores of layer 1 of \w+ contain NaN or inf"):
        logits(model, [("blocks.1.attn.hook_attn_scores", broken), *drop_component(model, "key")])


def test_the_query_component_of_two_axes_has_mean_0(shared_model: Any) -> None:
    """Over the queries, as a soft cap sees; the softmax alone would cancel what it is about."""
    (layer,) = capture(shared_model("bridge", "llama-gqa"), zoo.random_tokens(), layers=[0])
    parts = split_two_axis(layer.spec, layer.q, layer.spec.per_query_head(layer.k), layer.spec.mask(12))
    assert parts.query.mean(-2).abs().max() < 1e-5 < parts.query.abs().max()
