"""Models in other states, from fused attention to 16 bits, are read as well, and all are left as they were."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support import zoo
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from tl_posdisent import (
    capture,
    read_model,
    remap_distance,
    swap_positions,
)
from tl_posdisent.hooks import applied
from tl_posdisent.models.reading.spec import masked_below
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.model_parts import modules

TOKENS = zoo.random_tokens()


# --- other states ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.names("llama-gqa", "opt"))
def test_fused_attention_works_or_says_what_to_do(name: str) -> None:
    model = zoo.bridge(name, "sdpa")
    for spec in read_model(model).specs():
        if name == "opt":
            assert 'attn_implementation="eager"' in str(spec.limits.problem)
        else:
            assert spec.limits.problem is None
    if name == "opt":
        with pytest.raises(ValueError, match=r"OPTForCausalLM: neither hook_attn_scores nor hook_pattern fires"):
            capture(model, TOKENS)
    else:
        positions = torch.randint(100, (2, 12))
        assert_swaps_as_hugging_face(model, name, positions)


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("name", zoo.names("llama-gqa", "gptj"))
def test_compatibility_mode(name: str, processed: bool) -> None:
    """Aliases of hooks must not let a function act twice."""
    model = zoo.bridge(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.enable_compatibility_mode(no_processing=not processed)
    assert [s.limits.problem for s in read_model(model).specs()] == [None, None]
    assert_swaps_as_hugging_face(model, name, torch.randint(100, (2, 12)))
    everything = [layer.layer for layer in capture(model, TOKENS)]
    assert everything == [0, 1]


def test_a_model_without_weights_is_refused_as_such() -> None:
    model = zoo.bridge("llama-gqa").to("meta")
    with pytest.raises(ValueError, match="model must have weights, but its parameters are meta tensors"):
        read_model(model)


@pytest.mark.parametrize("settings", [["ungroup_grouped_query_attention"], ["use_split_qkv_input", "use_attn_result"]])
@pytest.mark.parametrize("name", ["llama-gqa"])
def test_ungrouped_keys_and_split_inputs(name: str, settings: list[str]) -> None:
    model = zoo.hooked(name)
    for setting in settings:
        getattr(model, f"set_{setting}")(True)
    n_keys = 8 if len(settings) == 1 else zoo.hf_model(name).config.num_key_value_heads
    assert [(s.n_kv_heads, s.limits.problem) for s in read_model(model).specs()] == [(n_keys, None)] * 2
    assert_swaps_as_hugging_face(model, name, torch.randint(100, (2, 12)))


def assert_swaps_as_hugging_face(model: Any, name: str, positions: Tensor) -> None:
    """Both ways to the same logits (up to a constant, which processed weights may move): rotation and recomputation."""
    expected = zoo.hf_logits(name, TOKENS, position_ids=positions).log_softmax(-1)
    untouched = zoo.hf_logits(name, TOKENS).log_softmax(-1)
    assert (expected - untouched).abs().max() > 0.5
    pairs = (positions[:, :, None] - positions[:, None]).double()[:, None]
    for hooks in (swap_positions(model, positions), remap_distance(model, pairs)):
        with torch.no_grad(), applied(model, hooks):
            torch.testing.assert_close(model(TOKENS).log_softmax(-1), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_masked_scores_are_told_from_scores(dtype: torch.dtype) -> None:
    """In 16 bits the most negative number and a large score add up to something above that number."""
    least = torch.finfo(dtype).min
    scores = torch.tensor([-300.0, -0.5, 0.0, 40.0, 300.0], dtype=dtype)
    assert not (scores <= masked_below(dtype)).any()
    assert (scores + least <= masked_below(dtype)).all()
    assert (torch.tensor([-torch.inf, least, least / 3], dtype=dtype) <= masked_below(dtype)).all()


# --- the model is left alone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.names("llama", "gpt2", "falcon"))
def test_no_pattern_is_kept_behind_its_layer(name: str) -> None:
    """Some bridges store each layer's pattern: memory would grow with layers times the length squared."""
    deep = zoo.bridge(name, num_hidden_layers=5)
    tokens = zoo.random_tokens(50)
    pattern = tokens.shape[0] * deep.cfg.n_heads * tokens.shape[1] ** 2 * 4
    deep(tokens)  # of the user's own; what it leaves is not there while the package runs the model
    left: list[list[Tensor]] = []
    with running(deep), deep.hooks(fwd_hooks=[("blocks.4.attn.hook_q", lambda x, hook: left.append(_kept(deep)))]):
        deep(tokens)
    assert not [x for x in [*left[0], *_kept(deep)] if x.nbytes >= pattern]


def _kept(model: Any) -> list[Tensor]:
    """Tensors that modules hold beside their weights and buffers."""
    return [x for part in modules(model) for x in vars(part).values() if isinstance(x, Tensor)]


def test_keys_and_values_are_kept_on_request_alone(shared_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all layers, which a pass of the package's does not read; passes of the user's keep them as ever."""
    model, kept = shared_model("bridge", "llama-gqa"), []
    update = Cache.update

    def noting(self: Cache, keys: Tensor, *args: Any, **kwargs: Any) -> Any:
        kept.append(keys.shape)
        return update(self, keys, *args, **kwargs)

    monkeypatch.setattr(Cache, "update", noting)  # our own does not come here
    with torch.no_grad():
        plain = model(TOKENS)
        by_default, _ = len(kept), kept.clear()
        with running(model):
            assert torch.equal(model(TOKENS), plain)
            *_, cache = model(TOKENS, return_type="logits_and_cache")
        assert cache is None or not any(layer.is_initialized for layer in cache.layers)
        with running(model) as p:
            p.run(TOKENS)
            assert not kept
            p.run(TOKENS, use_cache=True, past_key_values=DynamicCache())
        with running(model):
            model(TOKENS, use_cache=True)
        assert len(kept) == 2 * by_default > 0
        model(TOKENS)
    assert len(kept) == 3 * by_default
