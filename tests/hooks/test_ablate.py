"""Heads taken away: against weights without them, and against what they are replaced by."""

from __future__ import annotations

import collections
import warnings
from typing import Any

import pytest
import torch
from support import zoo
from torch import Tensor

from tl_posdisent import ablate_heads, head_ablation
from tl_posdisent.hooks import applied
from tl_posdisent.hooks.ablate import derangement

TOKENS = zoo.random_tokens(batch=3)
OTHERS = zoo.random_tokens(length=7, batch=2, seed=1)
CASES = pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "olmo2"))
# Where Hugging Face keeps the matrix that mixes heads.
OUTPUT = {
    "llama-gqa": "model.layers.{}.self_attn.o_proj",
    "gptj": "transformer.h.{}.attn.out_proj",
    "bloom": "transformer.h.{}.self_attention.dense",
}


def run(model: Any, hooks: Any = (), tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad(), applied(model, hooks):
        return model(tokens)


def z_of(model: Any, hooks: Any = (), tokens: Tensor = TOKENS, layer: int = 0) -> Tensor:
    name = f"blocks.{layer}.attn.hook_z"
    with torch.no_grad(), applied(model, hooks):
        return model.run_with_cache(tokens, names_filter=name)[1][name]


@pytest.mark.parametrize(("kind", "name"), zoo.cases(*OUTPUT))
def test_zero_is_a_model_whose_output_matrix_leaves_the_head_out(kind: str, name: str, shared_model: Any) -> None:
    hf = zoo.hf_model(name)
    heads = [(1, 3), (0, 0), (1, 6)]
    with torch.no_grad():
        for layer, head in heads:
            weight = hf.get_submodule(OUTPUT[name].format(layer)).weight  # [out, head and d_head]
            weight.view(len(weight), 8, -1)[:, head] = 0.0
        without = hf(TOKENS, use_cache=False).logits
    model = shared_model(kind, name)
    torch.testing.assert_close(run(model, ablate_heads(model, heads)), without, rtol=0, atol=2e-4)
    assert (run(model) - without).abs().max() > 0.1


@pytest.mark.parametrize(("name", "moves"), [("llama-gqa", False), pytest.param("gpt2", True, marks=pytest.mark.slow)])
def test_weight_processing_changes_zeros_only(name: str, moves: bool, shared_model: Any) -> None:
    """It moves the bias of values behind hook_z, where zeros leave it."""
    processed = zoo.bridge(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        processed.enable_compatibility_mode()
    effects = {}
    for mode in ("zero", "mean", "resample"):
        tables = [
            head_ablation(m, TOKENS, mode=mode, seed=1, progress=False)  # type: ignore[arg-type]
            for m in (shared_model("bridge", name), processed)
        ]
        assert tables[0]["baseline"][0] == pytest.approx(tables[1]["baseline"][0], abs=1e-5)
        effects[mode] = (tables[0]["effect"] - tables[1]["effect"]).abs().max()
    assert max(effects["mean"], effects["resample"]) < 1e-5
    assert effects["zero"] > 0.03 if moves else effects["zero"] < 1e-5


@CASES
def test_mean_is_that_of_the_reference(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    before = z_of(model)
    after = z_of(model, ablate_heads(model, [(0, 5), (0, 2)], mode="mean", reference=OTHERS))
    mean = z_of(model, tokens=OTHERS).double().mean((0, 1))
    for head in range(8):
        expected = mean[head].float().expand_as(before[:, :, head]) if head in (2, 5) else before[:, :, head]
        torch.testing.assert_close(after[:, :, head], expected, rtol=0, atol=1e-6)
    assert (before - before.mean((0, 1))).abs().max() > 0.1


def test_mean_is_taken_under_the_hooks_of_the_user(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    plain = z_of(model, ablate_heads(model, [(1, 4)], mode="mean", reference=OTHERS), layer=1)
    with applied(model, ablate_heads(model, [(0, 1)])):
        hooks = ablate_heads(model, [(1, 4)], mode="mean", reference=OTHERS)
        run(model)
        mean = z_of(model, tokens=OTHERS, layer=1)[:, :, 4].mean((0, 1))
    torch.testing.assert_close(z_of(model, hooks, layer=1)[0, 0, 4], mean)
    assert (plain[0, 0, 4] - mean).abs().max() > 1e-3


@CASES
def test_resample_takes_another_text(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    before = z_of(model)
    orders = set()
    for seed in range(6):
        after = z_of(model, ablate_heads(model, [(0, 5), (0, 2)], mode="resample", seed=seed))
        order = derangement(3, seed)
        assert torch.equal(after[:, :, [2, 5]], before[order][:, :, [2, 5]])
        rest = [head for head in range(8) if head not in (2, 5)]
        assert torch.equal(after[:, :, rest], before[:, :, rest])
        orders.add(tuple(order.tolist()))
    assert orders == {(1, 2, 0), (2, 0, 1)}


def test_every_derangement_is_as_likely_and_seeds_repeat() -> None:
    drawn = [tuple(derangement(4, seed).tolist()) for seed in range(1800)]
    counts = collections.Counter(drawn)
    assert len(counts) == 9  # all that there are of four
    assert all(sorted(x) == [0, 1, 2, 3] and all(i != p for i, p in enumerate(x)) for x in counts)
    assert sum((n - 200) ** 2 / 200 for n in counts.values()) < 26  # chi squared of 8 degrees, 99.9 %
    assert drawn[:9] == [tuple(derangement(4, seed).tolist()) for seed in range(9)]
    assert derangement(2, 7).tolist() == [1, 0]


def test_a_head_is_ablated_once(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    zero, mean = (
        ablate_heads(model, [(1, x)], mode=m, reference=r) for x, m, r in ((3, "zero", None), (3, "mean", TOKENS))
    )
    with pytest.raises(ValueError, match=r"L1H3\): ablate_heads\(zero\) and ablate_heads\(mean\) both set its output"):
        zero + mean


def test_one_text_has_no_other(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    with pytest.raises(ValueError, match='mode "resample" needs a batch of at least two texts, got 1'):
        run(model, ablate_heads(model, [(0, 1)], mode="resample"), TOKENS[:1])


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_heads_with_a_small_effect(kind: str, name: str, dtype: torch.dtype) -> None:
    """In 16 bits the head's effect lies within the rounding that scores are allowed, as in late layers of SmolLM2."""
    hf = zoo.hf_model(name)
    with torch.no_grad():
        hf.get_submodule(OUTPUT[name].format(1)).weight.mul_(0.05)
    model = (zoo.as_bridge if kind == "bridge" else zoo.as_hooked)(hf).to(dtype)
    clean, without = run(model).float(), run(model, ablate_heads(model, [(1, 3)])).float()
    assert 0 < (without - clean).abs().max() < 0.06 * clean.abs().max()


@pytest.mark.usefixtures("unchecked")
def test_a_padded_reference_names_the_way_out(shared_model: Any) -> None:
    padded = torch.nn.functional.pad(zoo.random_tokens(), (0, 3))
    with pytest.raises(ValueError, match=r"reference: tokens must be without padding, .*: give the mask with the i"):
        ablate_heads(shared_model("bridge", "llama-gqa"), 1, mode="mean", reference=padded)
