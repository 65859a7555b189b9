"""Ordinary activation patching: TransformerLens's own numbers, and by hand where it has none. Exceptions in all."""

from __future__ import annotations

import copy
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from support import zoo
from support.intervention_cases import TOKENS, UNORDERED, logits
from support.tolerance import rounding
from support.untouched import state
from support.zoo_configs import ARCHITECTURES
from torch import Tensor
from transformer_lens import patching

from tl_posdisent import component_patching, head_ablation, head_patching, position_patching

pytestmark = pytest.mark.usefixtures("unchecked")  # doctests run with the checks of annotations
CORRUPTED = zoo.random_tokens(seed=1)
CLOSE = rounding(5.0, 2)  # of the difference of two logits
ACTIVATIONS = ["z", "q", "k", "v", "pattern"]
KINDS = zoo.cases("llama-gqa", "gptj", "olmo2", "gpt2", "bloom")


def difference(logits: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Of two answers, as patching likes it."""
    return (logits[:, -1, 7] - logits[:, -1, 9]).mean()


def table(model: Any, activation: Any, **options: Any) -> pd.DataFrame:
    arguments = {"metric": difference, "progress": False} | options
    return head_patching(model, CORRUPTED, TOKENS, activation=activation, **arguments)


def by_hand(model: Any, hook: str, index: Any, value: Tensor) -> float:
    def put(x: Tensor, hook: Any) -> Tensor:
        x = x.clone()
        x[index] = value
        return x

    return difference(logits(model, [(hook, put)], CORRUPTED)).item()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_the_numbers_of_transformer_lens(kind: str, name: str, activation: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    if (kind, name, activation) == ("bridge", "gptj", "pattern"):
        pytest.skip("discarded there")
    which = {"z": "out"}.get(activation, activation)
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
        theirs = getattr(patching, f"get_act_patch_attn_head_{which}_all_pos")(model, CORRUPTED, cache, difference)
        clean, corrupted = difference(model(TOKENS)).item(), difference(model(CORRUPTED)).item()
    theirs = theirs.repeat_interleave(8 // theirs.shape[1], 1)
    ours = table(model, activation)
    assert ours[["layer", "head"]].to_numpy().tolist() == [[layer, head] for layer in range(2) for head in range(8)]
    assert ours["value"].tolist() == pytest.approx(theirs.flatten().tolist(), abs=CLOSE)
    assert ours["effect"].tolist() == pytest.approx(
        [(x - corrupted) / (clean - corrupted) for x in theirs.flatten().tolist()], abs=1e-4
    )
    assert abs(ours["value"] - corrupted).max() > 1e-3


@pytest.mark.parametrize(("kind", "name"), zoo.cases("gptj"))
def test_a_pattern_where_edits_are_discarded(kind: str, name: str, shared_model: Any) -> None:
    """A head attends as in the clean run to the values of the corrupted one."""
    model = shared_model(kind, name)
    names = [f"blocks.1.attn.hook_{x}" for x in ("pattern", "v")]
    with torch.no_grad():
        pattern = model.run_with_cache(TOKENS, names_filter=names)[1][names[0]]
        v = model.run_with_cache(CORRUPTED, names_filter=names)[1][names[1]]
    ours = table(model, "pattern", layers=[1])["value"].tolist()
    for head in range(8):
        z = torch.einsum("bqk,bkd->bqd", pattern[:, head], v[:, :, head])
        expected = by_hand(model, "blocks.1.attn.hook_z", (slice(None), slice(None), head), z)
        assert ours[head] == pytest.approx(expected, abs=1e-5)
    assert len({round(x, 5) for x in ours}) == 8


def test_keys_that_are_repeated_for_every_head() -> None:
    """TransformerLens patches half of them."""
    model = zoo.hooked("llama-gqa")
    model.set_ungroup_grouped_query_attention(True)
    for activation in ("k", "v"):
        name = f"blocks.0.attn.hook_{activation}"
        held = model.run_with_cache(TOKENS, names_filter=name)[1][name]
        assert held.shape[2] == 8
        ours = table(model, activation, layers=[0])["value"].tolist()
        for head in range(8):
            expected = by_hand(model, name, (slice(None), slice(None), head), held[:, :, head])
            assert ours[head] == pytest.approx(expected, abs=1e-5)


@pytest.mark.skipif(not hasattr(transformers, "Gemma4ForCausalLM"), reason="transformers has no Gemma 4")
@pytest.mark.parametrize("activation", ["k", "v", "z"])
def test_later_layers_that_read_the_keys_and_values_of_earlier_ones(activation: str) -> None:
    shape = ARCHITECTURES["gemma3"].arguments | {"num_hidden_layers": 6, "num_kv_shared_layers": 2}
    shape |= {"layer_types": ["sliding_attention", "full_attention"] * 3, "global_head_dim": 16}
    shape |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": zoo.VOCAB}
    torch.manual_seed(0)
    original = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**copy.deepcopy(shape)))
    zoo.randomise(original, 0.2, 0.09)
    model = zoo.as_bridge(original)
    cache = model.run_with_cache(TOKENS)[1]
    effects = table(model, activation, layers=list(range(4)), heads=[0, 2, 4, 6])
    for layer in range(4):
        name = f"blocks.{layer}.attn.hook_{activation}"
        ours = effects[effects["layer"] == layer]["value"].tolist()
        for n, head in enumerate((0, 2, 4, 6)):
            at = (slice(None), slice(None), head if activation == "z" else head // 2)
            assert ours[n] == pytest.approx(by_hand(model, name, at, cache[name][at]), abs=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_one_head_at_one_position_by_hand(kind: str, name: str, activation: str, shared_model: Any) -> None:
    """Also of a pattern whose edits are discarded: there a head's result, of the patched row and the values."""
    model, places = shared_model(kind, name), [5, 2, -1]
    hook = f"blocks.1.attn.hook_{activation}"
    with torch.no_grad():
        held = model.run_with_cache(TOKENS)[1][hook]
        v = model.run_with_cache(CORRUPTED)[1]["blocks.1.attn.hook_v"]
    ours = table(model, activation, positions=places, layers=[1], heads=[6, 3])
    assert ours[["head", "position"]].to_numpy().tolist() == [[head, place] for head in (3, 6) for place in places]
    n = v.shape[2] if activation in ("k", "v") else 8
    for _, row in ours.iterrows():
        head, place = int(row["head"]), int(row["position"])
        at: Any = (slice(None), place, head * n // 8)
        if activation == "pattern":
            at = (slice(None), head, place)
        if (kind, name, activation) == ("bridge", "gptj", "pattern"):
            z = torch.einsum("bk,bkd->bd", held[at], v[:, :, head])
            expected = by_hand(model, "blocks.1.attn.hook_z", (slice(None), place, head), z)
        else:
            expected = by_hand(model, hook, at, held[at])
        assert row["value"] == pytest.approx(expected, abs=1e-5)
    assert ours["effect"].abs().max() > 1e-3


@pytest.mark.parametrize(("kind", "name"), zoo.cases("olmo2"))
def test_queries_and_keys_behind_one_norm_of_all_heads(kind: str, name: str, shared_model: Any) -> None:
    """A head's queries change the queries of all heads."""
    model = shared_model(kind, name)
    for activation in ("q", "k"):
        hook = f"blocks.0.attn.hook_{activation}"
        held = model.run_with_cache(TOKENS, names_filter=hook)[1][hook]
        ours = table(model, activation, layers=[0])
        per_row = 8 // held.shape[2]
        for head in range(8):
            at = (slice(None), slice(None), head // per_row)
            assert ours["value"][head] == pytest.approx(by_hand(model, hook, at, held[at]), abs=CLOSE)


def test_positions_of_padded_texts_are_counted_in_each(shared_model: Any) -> None:
    model, mask = shared_model("bridge", "llama-gqa"), torch.ones_like(TOKENS)
    mask[0, :3] = 0  # the first text is shorter
    arguments: Any = {"metric": lambda logits: logits[0, -1, 7], "positions": [1, -2], "layers": [0], "heads": 2}
    padded = table(model, "z", attention_mask=mask, **arguments)
    alone = head_patching(model, CORRUPTED[:1, 3:], TOKENS[:1, 3:], progress=False, **arguments)
    pd.testing.assert_frame_equal(padded, alone, atol=1e-5)
    for wrong in (TOKENS.shape[1] - 3, [1, 1], "0", 0.5):
        with pytest.raises(ValueError, match=r"^positions must"):
            table(model, "z", attention_mask=mask, **arguments | {"positions": wrong})


def test_heads_that_share_keys_have_the_effect_of_their_key_head(shared_model: Any) -> None:
    model, asked = shared_model("bridge", "llama-gqa"), []

    def metric(logits: Tensor, tokens: Tensor) -> Tensor:
        assert torch.equal(tokens, TOKENS)
        asked.append(1)
        return difference(logits)

    values = table(model, "v", metric=metric, heads=[7, 2, 3], layers=[1])
    assert values["head"].tolist() == [2, 3, 7]
    assert values["value"][0] == values["value"][1] != values["value"][2]
    assert len(asked) == 3 + 2


def test_layouts_that_are_not_those_of_transformerlens(shared_model: Any) -> None:
    """Also on a text as long as there are heads."""
    model = shared_model("bridge", "deepseek_v3")
    for tokens in (TOKENS, TOKENS[:, :8]):
        for activation in ("q", "k", "v"):
            with pytest.raises(
                ValueError,
                match=rf"activation must have a hook with 8 heads at its third axis, .*hook_{activation} of .* tensor",
            ):
                head_patching(model, tokens, tokens.flip(1), difference, activation=activation, progress=False)
        head_patching(model, tokens, tokens.flip(1), difference, activation="pattern", layers=[0], progress=False)
        assert len(head_patching(model, tokens, tokens.flip(1), difference, progress=False)) == 16
    model, short = shared_model("bridge", "llama-gqa"), TOKENS[:, :8]
    assert len(head_patching(model, short, CORRUPTED[:, :8], difference, progress=False)) == 16


# --- exceptions ------------------------------------------------------------------------------------------------

CALLS = {
    "positions": lambda model, metric: position_patching(model, TOKENS, UNORDERED, metric, progress=False),
    "positions, keys alone": lambda model, metric: position_patching(
        model, TOKENS, UNORDERED, metric, what="key", keys="head", direction="noise", progress=False
    ),
    "component": lambda model, metric: component_patching(
        model, TOKENS, "key", source=CORRUPTED, metric=metric, progress=False
    ),
    "component of positions": lambda model, metric: component_patching(
        model, TOKENS, "key", source_positions=UNORDERED, metric=metric, progress=False
    ),
    "ablation": lambda model, metric: head_ablation(model, TOKENS, metric, progress=False),
    "heads": lambda model, metric: table(model, "k", metric=metric),
    "heads' patterns": lambda model, metric: table(model, "pattern", metric=metric),
}


class Stopped(Exception):
    """No error by which a model refuses a pass that skips a part of it."""


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_exceptions_leave_no_trace(kind: str, name: str, call: Any) -> None:
    """In the metric, of the first run and of later ones, and in the midst of a forward pass."""
    model = zoo.load(kind, name)
    model.blocks[0].train()
    plain, before = logits(model, []), state(model)

    def failing(after: int) -> Any:
        runs = []

        def metric(logits: Tensor, tokens: Tensor) -> Tensor:
            assert state(model)[0] == before[0]  # a metric that runs the model sees it without the patch
            runs.append(1)
            if len(runs) > after:
                raise Stopped
            return difference(logits)

        return metric

    for after in (0, 1, 3):
        with pytest.raises(Stopped):
            call(model, failing(after))
        assert state(model) == before
    for stop in (1, 2, 3):  # also while shortcuts are in place
        seen: list[int] = []

        def break_down(module: Any, args: Any, seen: list[int] = seen, stop: int = stop) -> None:
            seen.append(1)
            if len(seen) == stop:
                raise Stopped

        handle = model.blocks[1].mlp.register_forward_pre_hook(break_down)
        with pytest.raises(Stopped):
            call(model, lambda logits, tokens: difference(logits))
        handle.remove()
        assert state(model) == before
    assert not any("forward" in vars(part) for part in model.modules())
    assert torch.equal(logits(model, []), plain)
