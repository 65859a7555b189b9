"""Every head ablated alone: the numbers of the plain loop, whatever the model shares between blocks and texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import log
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.tolerance import rounding
from support.untouched import state
from torch import Tensor, nn

from tl_posdisent import ablate_heads, head_ablation
from tl_posdisent.synthetic import SyntheticConfig, SyntheticModel

pytestmark = pytest.mark.usefixtures("unchecked")
TOKENS = zoo.random_tokens(length=9, batch=3)
SOME = [1, 6]
LOSS = log(61)  # of models with random weights and this vocabulary


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """One number for each text."""
    flat = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return flat.view(len(tokens), -1).mean(1)


def mass(output: Tensor, tokens: Tensor) -> Tensor:
    """For any output."""
    return output.flatten(1).double().square().mean(1)


def loop(
    model: Any, metric: Any = loss, tokens: Tensor = TOKENS, mode: str = "zero", heads: Iterable[int] = range(8)
) -> Tensor:
    """The plain way."""
    values = []
    for layer in range(model.cfg.n_layers):
        for head in heads:
            reference = tokens if mode == "mean" else None
            hooks = ablate_heads(model, [(layer, head)], mode=mode, reference=reference, seed=4)
            with torch.no_grad(), model.hooks(fwd_hooks=hooks):
                values.append(float(metric(model(tokens), tokens).double().mean()))
    return torch.tensor(values, dtype=torch.float64)


def agree(table: pd.DataFrame, values: Tensor) -> None:
    """Both are means of a metric of float32 logits."""
    atol = rounding(values, 2)
    torch.testing.assert_close(torch.tensor(table["value"].to_numpy()), values, rtol=0, atol=atol)
    assert values.std() > 10 * atol  # there is something to agree about


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "bloom", "gemma2", "gpt_oss", "deepseek_v3"))
@pytest.mark.parametrize("mode", ["zero", "mean", "resample"])
def test_the_numbers_of_the_plain_loop(kind: str, name: str, mode: Any, shared_model: Any) -> None:
    model = shared_model(kind, name)
    table = head_ablation(model, TOKENS, mode=mode, seed=4, progress=False)
    n = model.cfg.n_layers
    assert table[["layer", "head"]].values.tolist() == [[layer, head] for layer in range(n) for head in range(8)]
    agree(table, loop(model, mode=mode))
    with torch.no_grad():
        baseline = float(loss(model(TOKENS), TOKENS).mean())
    assert table["baseline"].tolist() == pytest.approx([baseline] * len(table), abs=rounding(baseline))
    assert (table["effect"] == table["value"] - table["baseline"]).all()


@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_a_list_of_heads_in_any_order(mode: Any, shared_reading: Any) -> None:
    """Rows are in the order of layers and heads, with the numbers that they have among all heads."""
    reading = shared_reading("bridge", "llama-gqa")
    whole = head_ablation(reading, TOKENS, mode=mode, progress=False).set_index(["layer", "head"])["value"]
    pairs = [(1, 6), (0, 3), (1, 1), (0, 1)]
    for chosen in ({"heads": pairs}, {"heads": sorted(pairs)}, {"layers": [1, 0], "heads": [6, 1, 3]}):
        some = head_ablation(reading, TOKENS, mode=mode, **chosen, progress=False).set_index(["layer", "head"])["value"]
        assert list(some.index) == sorted(some.index)
        assert some.tolist() == pytest.approx(whole.loc[some.index].tolist(), abs=rounding(LOSS, 2))


def test_another_text_to_resample_from_must_be_as_long(shared_reading: Any) -> None:
    mask = torch.ones_like(TOKENS)
    mask[1, :3] = 0
    with pytest.raises(ValueError, match="texts of equal length"):
        head_ablation(shared_reading("bridge", "llama-gqa"), TOKENS, attention_mask=mask, mode="resample")


def test_hooks_of_the_user_stay_in_force() -> None:
    """Also those that mix the texts of a batch."""
    model = zoo.load("bridge", "llama-gqa")
    plain = loop(model, heads=SOME)

    def third_text_halved(x: Tensor, hook: Any) -> Tensor:
        return torch.cat([x[:2], 0.5 * x[2:3], x[3:]])

    point = model.hook_dict["blocks.0.hook_resid_post"]
    for hook in (lambda x, hook: 0.7 * x + 0.3 * x.flip(0), third_text_halved):
        point.add_hook(hook)
        table = head_ablation(model, TOKENS, heads=SOME, progress=False)
        agree(table, loop(model, heads=SOME))
        assert (torch.tensor(table["value"].to_numpy()) - plain).abs().max() > 1e-3
        model.reset_hooks()


# --- models whose blocks or texts share something ------------------------------------------------------------------


def stream(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def after(part: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Change what a part of a model returns, behind the hooks of TransformerLens."""

    def put(module: Any, args: Any, output: Any) -> Any:
        changed = change(stream(output))
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    part.register_forward_hook(put)


def with_trait(trait: str) -> Any:
    """A model whose blocks or texts share more than they show."""
    model, secret = zoo.load("bridge", "llama-gqa"), dict[str, Any]()
    first, second = (block.attn for block in model.blocks)

    def full(x: Tensor) -> Tensor:
        if len(x) > 5:
            raise torch.OutOfMemoryError
        return x

    def keys(x: Tensor) -> Tensor:  # of an earlier block, as Gemma 4 has them
        return x + secret.pop("keys")

    if trait == "proud":
        after(first, lambda x: x - x.mean(0))  # the texts of a batch see each other
    if trait == "full":
        after(second, full)
    if trait == "keys":
        after(first, lambda x: secret.update(keys=x) or x)
        after(second, keys)
    if trait == "noisy":
        second.dropping = nn.Dropout(0.5).eval()
        after(second, lambda x: second.dropping(x))
    return model


@pytest.mark.parametrize("trait", ["proud", "full", "keys", "noisy"])
def test_models_whose_blocks_or_texts_share_something(trait: str) -> None:
    model = with_trait(trait)
    for tokens in (TOKENS, TOKENS[:1])[: 1 if trait == "proud" else 2]:  # for whom a single text is nothing at all
        table = head_ablation(model, tokens, mass, heads=SOME, progress=False)
        agree(table, loop(model, mass, tokens, heads=SOME))


def test_any_output_for_a_metric_that_knows_it() -> None:
    """A class for each text, and what is no tensor."""
    sizes = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_mlp": 64, "d_vocab": 61, "n_ctx": 24, "n_out": 7}
    model = SyntheticModel(SyntheticConfig(**sizes, seed=1)).eval()
    expected = head_ablation(model, TOKENS, mass, progress=False)
    model.register_forward_hook(lambda module, args, output: {"classes": output})
    found = head_ablation(model, TOKENS, lambda x, t: mass(x["classes"], t), progress=False)
    pd.testing.assert_frame_equal(found, expected)


@pytest.mark.parametrize("part", ["block", "attention"])
def test_what_a_block_reads_from_an_earlier_one_past_the_stream(part: str) -> None:
    """A skip from layer 1 to layer 3 of six: not into the last block, so that this alone shows nothing."""
    model, tokens, kept = zoo.bridge("llama-gqa", num_hidden_layers=6), TOKENS[:1], dict[str, Tensor]()
    giver, taker = (model.blocks[n] if part == "block" else model.blocks[n].attn for n in (1, 3))

    giver.register_forward_hook(lambda module, args, output: kept.update(given=stream(output)))
    after(taker, lambda x: x + 0.7 * kept["given"])
    agree(head_ablation(model, tokens, heads=SOME, progress=False), loop(model, tokens=tokens, heads=SOME))


def test_an_unembedding_that_has_no_memory_for_many_texts() -> None:
    model = zoo.load("bridge", "llama-gqa")

    def limit(module: Any, args: Any) -> None:
        if len(args[0]) > 2:
            raise torch.OutOfMemoryError

    expected = loop(model, tokens=TOKENS[:2], heads=SOME)
    model.unembed.register_forward_pre_hook(limit)
    agree(head_ablation(model, TOKENS[:2], heads=SOME, progress=False), expected)


@pytest.mark.parametrize("options", [{}, {"keys_from": "input", "encoding": "mla"}, {"causal": True}])
def test_synthetic_models(options: dict[str, Any]) -> None:
    sizes = {"n_layers": 3, "d_model": 32, "n_heads": 4, "d_mlp": 64, "d_vocab": 61, "n_ctx": 24, "n_out": 7}
    model = SyntheticModel(SyntheticConfig(**sizes, seed=1, **options)).eval()
    agree(head_ablation(model, TOKENS, mass, progress=False), loop(model, mass, heads=range(4)))
    with pytest.raises(ValueError, match=r"model must return logits .* got shape \(3, 7\) .* pass metric="):
        head_ablation(model, TOKENS, progress=False)


# --- metrics and state ---------------------------------------------------------------------------------------------


def test_a_metric_gets_logits_and_tokens_once_for_every_head(shared_model: Any) -> None:
    model, seen, values = shared_model("bridge", "llama-gqa"), list[Any](), list[float]()

    def metric(logits: Tensor, tokens: Tensor) -> float:
        seen.append((logits.shape, torch.equal(tokens, TOKENS)))
        values.append(float(loss(logits, tokens).mean()))
        return values[-1]

    found = head_ablation(model, TOKENS, metric, heads=[6, 1], progress=False)
    assert seen == [((3, 9, 61), True)] * (1 + 2 * model.cfg.n_layers)
    assert found["value"].tolist() == values[1:]


def test_a_head_that_fails_is_a_row_of_nan(shared_model: Any) -> None:
    """The others are as without it; where all fail, the error is raised."""
    model, calls = shared_model("bridge", "llama-gqa"), []

    def metric(logits: Tensor, tokens: Tensor) -> Tensor:
        calls.append(1)
        return loss(logits, tokens) * (torch.nan if len(calls) == 4 else 1)  # the baseline, heads 0, 1 and 2

    with pytest.warns(UserWarning, match=r"1 of the heads .* L0H2: ArgumentError: metric must return finite numbers"):
        table = head_ablation(model, TOKENS, metric, layers=0, progress=False)
    expected = head_ablation(model, TOKENS, layers=0, progress=False)
    expected.loc[2, ["value", "effect"]] = torch.nan
    pd.testing.assert_frame_equal(table, expected, atol=rounding(LOSS, 2))
    assert list(table.attrs["failures"]) == ["L0H2"]
    values = iter([1.0])
    with pytest.raises(ValueError, match="metric must return finite numbers"):
        head_ablation(model, TOKENS, lambda x, t: next(values, torch.nan), layers=0, progress=False)


def test_the_model_is_as_it_was() -> None:
    """Also the training flags of its parts, while dropout is off meanwhile."""
    model = with_trait("noisy")
    quiet = head_ablation(model, TOKENS, mass, progress=False)
    model.train()
    model.blocks[0].eval()
    before = state(model)
    pd.testing.assert_frame_equal(head_ablation(model, TOKENS, mass, progress=False), quiet)
    with pytest.raises(ZeroDivisionError):
        head_ablation(model, TOKENS, lambda x, t: 1 / 0, progress=False)
    assert state(model) == before
