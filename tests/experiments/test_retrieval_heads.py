"""Retrieval heads: both scores by brute force, knock-outs by plain hooks, and heads that a small model needs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.public_calls import needles_of
from support.small_models import small_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tl_posdisent import bridge_from_hf, head_labels, retrieval_heads
from tl_posdisent.experiments import Needles, RetrievalHeads, needle_texts
from tl_posdisent.utils.errors import ArgumentError

NEEDLES, OTHERS = (needles_of(zoo.random_tokens(length=14, batch=3, seed=seed)) for seed in (4, 5))
FAMILIES = zoo.cases("llama-gqa", "gpt2", "gemma2", "deepseek_v3")
pytestmark = pytest.mark.usefixtures("unchecked")


def found_in(model: Any, **more: Any) -> RetrievalHeads:
    options: dict[str, Any] = {"count": 2, "draws": 3, "progress": False}
    return retrieval_heads(model, NEEDLES, OTHERS, **options | more)


def by_head(table: pd.DataFrame, column: str) -> Tensor:
    return torch.tensor(table.sort_values(["layer", "head"])[column].to_numpy())


def differences(model: Any, needles: Needles, hooks: Any = ()) -> Tensor:
    """Logit of the answer minus that of the decoy, of each text."""
    with torch.no_grad():
        last = model.run_with_hooks(needles.tokens, fwd_hooks=list(hooks))[:, -1].double()
    answers, decoys = needles.words.T
    rows = torch.arange(len(last))
    return last[rows, answers] - last[rows, decoys]


@pytest.mark.parametrize(("kind", "name"), FAMILIES)
def test_attention_by_hand(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    heads = found_in(model).heads
    with torch.no_grad():
        cache = model.run_with_cache(NEEDLES.tokens)[1]
    wanted = []
    for layer in range(model.cfg.n_layers):
        last = cache["pattern", layer][:, :, -1].double()
        texts = [last[n, :, a] - last[n, :, b] for n, (a, b) in enumerate(NEEDLES.places.tolist())]
        wanted.append(torch.stack(texts).mean(0))
    assert torch.allclose(by_head(heads, "attention"), torch.cat(wanted), atol=1e-6)
    assert heads["attention_se"].gt(0).any()


@pytest.mark.parametrize(("kind", "name"), FAMILIES)
def test_copying_is_the_trapezoid_of_slopes(kind: str, name: str, shared_model: Any) -> None:
    """The slope of the metric, in both texts of a pair, where each head's last result moves to that of the other."""
    model = shared_model(kind, name)
    heads = found_in(model).heads
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    with torch.no_grad():
        cache = model.run_with_cache(NEEDLES.tokens)[1]
    swapped = torch.arange(len(NEEDLES.tokens)).view(-1, 2).flip(1).flatten()
    share = torch.zeros(n_layers, n_heads, requires_grad=True)

    def moved(x: Tensor, hook: Any, layer: int) -> Tensor:
        z = cache["z", layer][:, -1]
        by_head = (z[swapped] - z).reshape(len(z), n_heads, -1) * share[layer][:, None]
        return torch.cat([x[:, :-1], x[:, -1:] + by_head.reshape(x[:, -1:].shape)], 1)

    hooks = [(f"blocks.{layer}.attn.hook_z", partial(moved, layer=layer)) for layer in range(n_layers)]
    with torch.enable_grad():
        last = model.run_with_hooks(NEEDLES.tokens, fwd_hooks=hooks)[:, -1]
        answers, decoys = NEEDLES.words.T
        rows = torch.arange(len(last))
        (slope,) = torch.autograd.grad((last[rows, answers] - last[rows, decoys]).mean(), share)
    assert torch.allclose(by_head(heads, "copying"), -slope.double().flatten(), atol=1e-5, rtol=1e-3)
    assert slope.abs().max() > 1e-4


def test_copying_is_the_fall_where_a_result_comes_from_the_other_text(shared_model: Any) -> None:
    """The sign of the heads with the largest and smallest, in runs with that exchange; sizes are estimates."""
    model = shared_model("bridge", "llama-gqa")
    heads = found_in(model).heads
    with torch.no_grad():
        cache = model.run_with_cache(NEEDLES.tokens)[1]
    swapped = torch.arange(len(NEEDLES.tokens)).view(-1, 2).flip(1).flatten()
    plain = differences(model, NEEDLES)

    def exchanged(z: Tensor, hook: Any, layer: int, head: int) -> Tensor:
        z = z.clone()
        z[:, -1, head] = cache["z", layer][swapped, -1, head]
        return z

    ends = [*heads.head(3).itertuples(), *heads.tail(3).itertuples()]
    for row in ends:
        hook = partial(exchanged, layer=int(row.layer), head=int(row.head))
        now = differences(model, NEEDLES, [(f"blocks.{row.layer}.attn.hook_z", hook)])
        assert row.copying * (plain - now).mean() > 0
    assert ends[0].copying > 0 > ends[-1].copying


def test_exchanged_texts_of_pairs_have_the_same_scores(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    order = torch.arange(len(NEEDLES.tokens)).view(-1, 2).flip(1).flatten()
    other = Needles.from_places(NEEDLES.tokens[order], NEEDLES.places[order])
    first, second = (retrieval_heads(model, x, OTHERS, count=1, progress=False) for x in (NEEDLES, other))
    for column in ("copying", "attention", "copying_se", "attention_se"):
        assert torch.allclose(by_head(first.heads, column), by_head(second.heads, column), atol=1e-6)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_knockouts_by_plain_hooks(kind: str, name: str, count: int, shared_model: Any) -> None:
    model = shared_model(kind, name)
    found = found_in(model, count=count, by="attention")
    with torch.no_grad():
        cache = model.run_with_cache(NEEDLES.tokens)[1]

    def ablated(z: Tensor, hook: Any, head: int) -> Tensor:
        z = z.clone()
        z[:, :, head] = cache[hook.name].double().mean((0, 1))[head].to(z.dtype)
        return z

    whole = found.knockout[found.knockout["depth"].isna()].set_index("ablated")
    assert whole.index.tolist() == ["none", "top", "random"]
    for ablated_heads, heads in (("none", []), ("top", found.top(count))):
        values = differences(model, OTHERS, [(f"blocks.{x}.attn.hook_z", partial(ablated, head=h)) for x, h in heads])
        pairs = values.view(-1, 2).mean(1)
        row = whole.loc[ablated_heads]
        assert row["difference"] == pytest.approx(pairs.mean().item(), abs=1e-5)
        assert row["se"] == pytest.approx(pairs.std().item() / len(pairs) ** 0.5, abs=1e-5)
        assert row["right"] == pytest.approx((values > 0).double().mean().item())
        there = found.knockout.query("ablated == @ablated_heads").set_index("depth")["difference"]
        for place in (2, 7):
            assert there[place / 13] == pytest.approx(values[OTHERS.places[:, 0] == place].mean().item(), abs=1e-5)


def test_one_draw_has_no_spread(shared_model: Any) -> None:
    found = found_in(shared_model("bridge", "llama-gqa"), count=1, draws=1)
    assert found.knockout.set_index("ablated").loc["random", "sd"].isna().all()


def test_one_pair_has_no_errors(shared_model: Any) -> None:
    model, pair = shared_model("bridge", "llama-gqa"), needles_of(zoo.random_tokens(length=14, batch=1))
    several = found_in(model)
    scored = retrieval_heads(model, pair, OTHERS, count=2, draws=3, progress=False)
    assert set(several.heads) - set(scored.heads) == {"copying_se", "attention_se"}
    ablated = retrieval_heads(model, NEEDLES, pair, count=2, draws=3, progress=False)
    assert set(several.knockout) - set(ablated.knockout) == {"se"}


def test_the_first_heads_are_at_most_half_of_each_layer(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    found = found_in(model)
    n_layers = model.cfg.n_layers
    most = found.top(4 * n_layers)
    assert sorted(layer for layer, _ in most) == sorted([*range(n_layers)] * 4)
    in_order = [*zip(found.heads["layer"], found.heads["head"], strict=True)]
    assert most[:1] == in_order[:1]
    assert found.heads["copying"].is_monotonic_decreasing
    with pytest.raises(ArgumentError, match="n must be an integer from 0 to"):
        found.top(4 * n_layers + 1)
    with pytest.raises(ArgumentError, match="count must be an integer from 1 to"):
        found_in(model, count=4 * n_layers + 1)


def test_refusals(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    with pytest.raises(ArgumentError, match="model must have a tokenizer"):
        needle_texts(model, length=100)
    with pytest.raises(ArgumentError, match="heldout must be Needles"):
        retrieval_heads(model, NEEDLES, [3])
    outside = Needles.from_places(NEEDLES.tokens + 1000, NEEDLES.places)
    with pytest.raises(ArgumentError, match="needles must"):
        retrieval_heads(model, outside, OTHERS, progress=False)
    with pytest.raises(ArgumentError, match="model must be causal"):
        retrieval_heads(small_model(encoding="rope", causal=False), NEEDLES, OTHERS, count=1)


VOCAB, PERIOD = 24, 12


def repeated(period: int) -> Tensor:
    """Different tokens, again and again."""
    return torch.randperm(VOCAB)[:period].repeat(VOCAB // period + 1)[:VOCAB]


def induction_texts(n: int) -> Needles:
    """Different tokens and one of them again; the other text of a pair exchanges it with another token."""
    texts, places = list[Tensor](), list[list[int]]()
    for _ in range(n):
        first, second = (torch.randperm(PERIOD // 2 - 1)[:2] * 2 + 1).tolist()
        tokens = torch.randperm(VOCAB)[:PERIOD]
        exchanged = tokens.clone()
        exchanged[[first, second]] = tokens[[second, first]]
        texts += [torch.cat([x, tokens[first, None]]) for x in (tokens, exchanged)]
        places += [[first + 1, second + 1], [second + 1, first + 1]]
    return Needles.from_places(torch.stack(texts), torch.tensor(places))


@pytest.mark.slow
def test_a_model_that_learned_to_retrieve_needs_its_retrieval_heads() -> None:
    """Two layers trained on repeated tokens: previous-token heads, then induction heads."""
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    hf = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, initializer_range=0.05, **size))
    optimizer = torch.optim.AdamW(hf.parameters(), lr=3e-3, betas=(0.9, 0.98))
    for _ in range(300):
        batch = torch.stack([repeated(int(torch.randint(4, 13, ()))) for _ in range(32)])
        logits = hf(batch).logits[:, PERIOD:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, PERIOD + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model = bridge_from_hf(hf.eval())
    first, second = induction_texts(16), induction_texts(16)
    found = retrieval_heads(model, first, second, count=2, draws=4, progress=False)
    whole = found.knockout[found.knockout["depth"].isna()].set_index("ablated")
    assert whole.loc["none", "right"] > 0.9
    assert {layer for layer, _ in found.top(2)} == {1}  # only a second layer can follow what the first one put there
    labels = head_labels(model, length=10, seeds=0, progress=False)
    by_label = labels.set_index(["layer", "head"])["induction"]
    assert set(found.top(2)) == set(by_label.nlargest(2).index)
    assert whole.loc["top", "difference"] < whole.loc["random", "difference"] - 1
    assert whole.loc["top", "p"] < 0.01
    untrained = bridge_from_hf(LlamaForCausalLM(hf.config).eval())
    chance = retrieval_heads(untrained, first, second, count=2, draws=4, progress=False)
    assert chance.heads["attention"].abs().max() < 0.1
