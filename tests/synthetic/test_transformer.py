"""The small transformer computes what is written on it, however one looks at it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.lanes import slow
from support.plain_transformer import plain_logits
from support.small_models import ENCODINGS, both_directions, every_encoding, small_model
from support.tolerance import rounding
from torch import Tensor

from tl_posdisent import read_model
from tl_posdisent.synthetic import SyntheticConfig, SyntheticModel

TOKENS = torch.randint(1, 20, (3, 9), generator=torch.Generator().manual_seed(3))
PADDED = TOKENS.clone()
PADDED[0, 5:] = 0
PADDED[2, 8:] = 0


def look(x: Tensor, hook: Any) -> None:
    """A hook that changes nothing."""


def stepwise(model: SyntheticModel) -> list[tuple[str, Any]]:
    """Hooks under which nothing is fused."""
    return [(name, look) for name in model.hook_dict]


def assert_close(a: Tensor, b: Tensor, atol: float | None = None) -> None:
    """By default, up to the rounding of a layer: norm, products, scores, pattern, results, output, and MLP."""
    torch.testing.assert_close(a, b, rtol=0, atol=rounding(b, 8) if atol is None else atol)


# --- what it computes ---------------------------------------------------------------------------------------------


@both_directions
@every_encoding
@pytest.mark.parametrize(
    "changed",
    [{"read_out": "last", "keys_from": "input"}, *slow([{}, {"read_out": "token", "pad_id": None, "d_head": 6}])],
    ids=["last-input", "mean", "token"],
)
def test_the_same_as_written_down_naively(encoding: str, causal: bool, changed: dict[str, Any]) -> None:
    model = small_model(encoding=encoding, causal=causal, **({"pad_id": 0} | changed)).double()
    tokens = (TOKENS if model.config.pad_id is None else PADDED)[:2]
    with torch.no_grad():
        assert_close(model(tokens), plain_logits(model, tokens))  # tables are rounded to float32
        assert_close(model.run_with_hooks(tokens, fwd_hooks=stepwise(model)), plain_logits(model, tokens))


AUTHORS = {"keys_from": "input", "source_norm": False, "final_norm": False, "activation": "relu"}
VARIANTS = [
    AUTHORS,
    AUTHORS | {"encoding": "sinusoidal_rope", "sinusoids": "halves", "initialisation": "torch"},
    {"encoding": "alibi", "alibi_slopes": "exponential"},
    {"encoding": "mla", "latent_norm": False},
    {"encoding": "absolute_mla", "latent_norm": False, "shared_rotary_query": True, "initialisation": "torch"},
    {"encoding": "mla", "shared_rotary_query": True, "d_head": 12, "d_rope": 4},
    {"pad_id": None},
    {"encoding": "sinusoidal", "sinusoids": "halves", "pad_id": 0},
    *({"rotary_heads": n, "causal": True} for n in (0, 2, 3)),
]


@pytest.mark.parametrize("changed", VARIANTS, ids=lambda x: "-".join(map(str, x.values())))
def test_variants_are_the_same_as_written_down_naively(changed: dict[str, Any]) -> None:
    model = small_model(**changed).double()
    with torch.no_grad():
        expected = plain_logits(model, PADDED[:2])
        assert_close(model(PADDED[:2]), expected)


def test_torch_initialisation_is_that_of_linear_layers() -> None:
    """Bounds and spread of ``nn.Linear`` with as many inputs, weights and biases, and of ``nn.Embedding``."""
    shape = {"d_model": 64, "n_heads": 4, "d_head": 24, "d_mlp": 96, "d_vocab": 200, "n_out": 30}
    config = SyntheticConfig(n_layers=2, n_ctx=16, initialisation="torch", **shape)
    named = dict(SyntheticModel(config).named_parameters())
    inputs = {"Q": 64, "K": 64, "V": 64, "O": 96, "in": 64, "out": 96, "U": 64}
    for name, parameter in named.items():
        kind, _, what = name.rpartition(".")[2].partition("_")
        if what in inputs:
            bound = torch.nn.Linear(inputs[what], 4000).weight.abs().max().item()
            assert bound * 0.9 < parameter.abs().max().item() <= inputs[what] ** -0.5, name
            if kind == "W":
                assert parameter.std().item() == pytest.approx(bound / 3**0.5, rel=0.05), name
    assert named["embed.W_E"].std().item() == pytest.approx(1.0, rel=0.03)
    other = dict(SyntheticModel(replace(config, seed=1)).named_parameters())
    assert not torch.equal(named["blocks.0.attn.b_Q"], other["blocks.0.attn.b_Q"])


@pytest.mark.parametrize(
    ("place", "hook"),
    [("embed", "blocks.0.hook_resid_pre"), ("attn_out", "hook_attn_out"), ("mlp_out", "hook_mlp_out")],
)
def test_dropout_acts_where_it_is_asked_for(place: Any, hook: str) -> None:
    """A quarter of what is added there is 0, and nothing elsewhere."""
    model = small_model(dropout=0.25, dropout_at=(place,)).train()
    cache = model.run_with_cache(TOKENS.repeat(20, 1))[1]
    for name in ("blocks.0.hook_resid_pre", "blocks.1.hook_attn_out", "blocks.1.hook_mlp_out"):
        zeros = (cache[name] == 0).double().mean().item()
        assert zeros == (pytest.approx(0.25, abs=0.03) if name.endswith(hook) else 0.0)


def test_dropout_of_the_pattern_hits_keys_and_keeps_the_mean() -> None:
    """Each weight is 0 or a quarter larger, alone and unbiased; queries, keys, values and what is added stay whole."""
    model = small_model(n_layers=1, dropout=0.2, dropout_at=("pattern",), pad_id=0)
    tokens = TOKENS[:1].repeat(4000, 1)
    with torch.no_grad():
        whole = model.run_with_cache(tokens[:1])[1]
        z = model.train().run_with_cache(tokens, names_filter=lambda name: name.endswith("hook_z"))[1]["z", 0]
    expected, v, pattern = whole["z", 0][0], whole["v", 0][0], whole["pattern", 0][0]
    variance = 0.25 * torch.einsum("hqk,khd->qhd", pattern.square(), v.square())  # p / (1 - p)
    assert_close(z.mean(0), expected, 5 * (variance.max() / 4000).sqrt().item())
    assert ((z.var(0) / variance).log().abs() < 0.3).all()


@pytest.mark.parametrize("keys_from", ["layer", "input"])
@both_directions
@every_encoding
def test_fused_and_stepwise_agree_and_so_do_their_gradients(encoding: str, causal: bool, keys_from: str) -> None:
    model = small_model(encoding=encoding, causal=causal, keys_from=keys_from, pad_id=0)
    weights = torch.randn(3, 5)
    fused, explicit = model(PADDED), model.run_with_hooks(PADDED, fwd_hooks=stepwise(model))
    assert_close(fused, explicit)
    gradients = [torch.autograd.grad((x * weights).sum(), list(model.parameters())) for x in (fused, explicit)]
    largest = max(x.abs().max().item() for x in gradients[1])  # where a gradient is 0, such terms cancel
    for (name, _), one, other in zip(model.named_parameters(), *gradients, strict=True):
        scale = other.abs().max().item()
        assert scale > 0 or name.endswith(("b_K", "ln2.b")) or (encoding, name) == ("t5", "encoding.table"), name
        assert_close(one, other, rounding(scale + largest, 8))


@both_directions
@pytest.mark.parametrize("encoding", ["rope", "alibi"])
def test_nothing_but_padding_is_finite_and_so_are_gradients(encoding: str, causal: bool) -> None:
    model = small_model(encoding=encoding, causal=causal, pad_id=0)
    tokens = torch.cat([TOKENS, torch.zeros_like(TOKENS)])
    for hooks in ([], stepwise(model)):
        logits = model.run_with_hooks(tokens, fwd_hooks=hooks)
        assert_close(logits[:3], model(TOKENS))
        gradients = torch.autograd.grad(logits.sum(), list(model.parameters()))
        assert all(bool(g.isfinite().all()) for g in (logits, *gradients))


def test_seeds_make_the_weights_and_nothing_else() -> None:
    config = small_model(encoding="learned").config
    state = torch.get_rng_state()
    one, same, other = (SyntheticModel(replace(config, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name))
        assert torch.equal(parameter, other.get_parameter(name)) == (parameter.unique().numel() == 1)


# --- a TransformerLens model ----------------------------------------------------------------------------------------


@every_encoding
def test_what_the_cache_holds_adds_up(encoding: str) -> None:
    model = small_model(encoding=encoding, read_out="token", causal=True)
    model.set_use_attn_result(True)
    logits, cache = model.run_with_cache(TOKENS)
    x = cache["embed"] + cache.cache_dict.get("hook_pos_embed", 0)
    for n, block in enumerate(model.blocks):
        assert_close(cache["resid_pre", n], x)
        q, k = (cache[name, n] for name in (("rot_q", "rot_k") if model.encoding.rotates else ("q", "k")))
        bias = model.encoding.bias(9)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5 + (0 if bias is None else bias)
        inside = torch.ones(9, 9).tril().bool()
        assert_close(cache["attn_scores", n], scores.masked_fill(~inside, -torch.inf))
        assert_close(cache["pattern", n], cache["attn_scores", n].softmax(-1))
        assert_close(cache["z", n], torch.einsum("bhqk,bkhd->bqhd", cache["pattern", n], cache["v", n]))
        assert_close(cache["result", n].sum(2) + block.attn.b_O, cache["attn_out", n])
        assert_close(cache["resid_mid", n], x + cache["attn_out", n])
        x = cache["resid_mid", n] + cache["mlp_out", n]
        assert_close(cache["resid_post", n], x)
    assert_close(cache["ln_final.hook_normalized"].var(-1, unbiased=False), torch.ones(3, 9), 1e-3)
    assert_close(cache["ln_final.hook_normalized"] * model.ln_final.w + model.ln_final.b, model.ln_final(x))
    assert_close(model(TOKENS), logits)


@pytest.mark.parametrize("encoding", ["learned", "mla"])
def test_every_hook_has_its_say(encoding: str) -> None:
    """An edit at any hook reaches the logits, and gradients come by."""
    model, passed = small_model(encoding=encoding, n_layers=1), {}
    model.set_use_attn_result(True)

    def edit(x: Tensor, hook: Any) -> Tensor:
        return x + torch.linspace(0, 1, x.numel()).view_as(x)

    def note(x: Tensor, hook: Any) -> None:
        passed[hook.name] = bool((x != 0).any())

    with torch.no_grad():
        plain = model(TOKENS)
        for name in model.hook_dict:
            assert (model.run_with_hooks(TOKENS, fwd_hooks=[(name, edit)]) - plain).abs().max() > 1e-5, name
    with model.hooks(bwd_hooks=[(name, note) for name in model.hook_dict]):
        model(TOKENS).square().sum().backward()
    assert passed == dict.fromkeys(model.hook_dict, True)


def test_copies_are_independent_and_whole() -> None:
    for encoding in ("rope", "t5", "learned"):
        model = small_model(encoding=encoding)
        twin = copy.deepcopy(model)
        assert twin.blocks[0].attn.shared[0] is twin.encoding
        before = model(TOKENS)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(2)
        assert torch.equal(model(TOKENS), before)
        twin.load_state_dict(model.state_dict())
        assert torch.equal(twin(TOKENS), before)


def test_other_dtypes() -> None:
    for encoding in ENCODINGS:
        model = small_model(encoding=encoding, pad_id=0)
        wanted = model(PADDED)
        rounded = copy.deepcopy(model).bfloat16()(PADDED)
        assert rounded.dtype == torch.bfloat16
        assert (rounded - wanted).abs().max() < 0.1 * wanted.abs().max()
        with torch.autocast("cpu", torch.bfloat16):
            assert (model(PADDED) - wanted).abs().max() < 0.1 * wanted.abs().max()


def test_the_probe_leaves_padding_out() -> None:
    """With three tokens it could not help meeting it."""
    model = small_model(d_vocab=3, pad_id=1)
    spec = read_model(model).specs(0)[0]
    assert spec.limits.problem is None
    assert spec.rotary is not None


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_text() -> None:
    model = small_model()
    for tokens, message in (
        (TOKENS + 15, r"tokens must be ids from 0 to 19, got 16 … \d+"),
        (TOKENS - 3, r"tokens must be ids from 0 to 19, got -\d … \d+"),
        (TOKENS.float(), r"tokens must be integers of shape \(batch, pos\), got torch.float32"),
        (TOKENS[None], r"tokens must be integers of shape \(batch, pos\), got torch.int64 of shape \(1, 3, 9\)"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens)
    with pytest.raises(ValueError, match="return_type must be 'logits', got 'loss'"):
        model(TOKENS, return_type="loss")
    assert torch.equal(model(TOKENS[0]), model(TOKENS[:1]))
