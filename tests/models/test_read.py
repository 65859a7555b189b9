"""What is read from a model is what it does: checked against Hugging Face's own modules and lists written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import zoo
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from tl_posdisent import capture, read_attention, read_model, swap_positions
from tl_posdisent.hooks import applied

pytestmark = pytest.mark.tl4

TOKENS = zoo.random_tokens()
N_HEADS = 8

# Written by hand from the papers and the sources of transformers, not from what the package finds.
ADJACENT = {"gptj", "codegen", "glm", "cohere", "llama4", "deepseek_v2"}
UNROTATED = {"gpt2", "opt", "gpt_neo", "bloom", "mpt"}
BIASED = {"bloom", "mpt"}  # ALiBi
LATENT = ("deepseek_v3", "deepseek_v2", "glm4-lite", "youtu")  # whose heads have keys of their own
KV_HEADS = {"llama-mqa": 1, "falcon": 1, "gemma4-shared": 1} | dict.fromkeys(
    (
        "llama",
        "neox",
        "neox-half",
        "gptj",
        "codegen",
        "phi",
        "olmo2",
        "gpt2",
        "opt",
        "gpt_neo",
        "bloom",
        "mpt",
        *LATENT,
    ),
    8,
)  # 4 elsewhere
WINDOWS = {"mistral": [6, 6], "gemma2": [5, None], "gemma3": [5, 5, None], "gpt_oss": [5, None], "gpt_neo": [None, 5]}
WINDOWS |= {
    "gemma4": [5, 5, 5, 5, 5, None],
    "gemma4-shared": [5, 5, None] * 2,
    "afmoe": [5, 5, 5, None],
    "laguna": [5, None],
}
SOFT_CAPS = {"gemma2": 3.0}
LENGTHS = {"llama4": [16, 16, 16, 15]}  # chunks of 16, and a temperature from the sixteenth token on
SCALES = {
    "neox": 16**-0.5,
    "qwen3": 16**-0.5,
    "gemma2": 24**-0.5,
    "gemma3": 24**-0.5,
    "gpt_neo": 1.0,
    "gemma4": 1.0,
    "gemma4-shared": 1.0,
    **dict.fromkeys(LATENT, 20**-0.5),
    "glm4-lite": 20**-0.5 * (0.1 * np.log(8) + 1) ** 2,
}  # 8 ** -0.5 else


def own_frequencies(name: str) -> list[Tensor]:
    """What the Hugging Face model itself turns by, per layer; none for a layer that does not rotate."""
    model = zoo.hf_model(name)
    if name in ("gptj", "codegen"):
        dim = model.config.rotary_dim
        return [1 / 10_000 ** (torch.arange(0, dim, 2).double() / dim)] * 2
    if name in ("gemma3", "gemma4", "gemma4-shared", "laguna"):
        module = model.model.rotary_emb
        return [getattr(module, f"{kind}_inv_freq").double() for kind in model.config.layer_types]
    found = [buffer.double() for key, buffer in model.named_buffers() if key.endswith(".inv_freq")]
    own = found[0] if found else torch.empty(0).double()
    if name in ("llama4", "afmoe"):
        return [own, own, own, own[:0]]
    if name == "nanochat":
        own = -own
    return [own, own[:0]] if name == "smollm3" else [own] * 2


def describable(*, rotary: bool | None = None) -> list[Any]:
    """The cases whose scores are those of queries and keys."""
    return [
        case
        for case in zoo.every_case()
        if case.values[1] not in BIASED and (rotary is None or (case.values[1] not in UNROTATED) == rotary)
    ]


# --- what is read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), describable())
def test_facts_of_every_layer(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    specs = read_model(model).specs()
    n = len(specs)
    assert [s.layer for s in specs] == list(range(model.cfg.n_layers))
    assert [s.window for s in specs] == WINDOWS.get(name, [None] * n)
    assert [s.soft_cap for s in specs] == [SOFT_CAPS.get(name)] * n
    assert [s.scale for s in specs] == [pytest.approx(SCALES.get(name, 8**-0.5), rel=1e-6)] * n
    keys = [2 if name == "gemma4" and s.window is None else KV_HEADS.get(name, 4) for s in specs]
    assert [(s.n_heads, s.n_kv_heads, s.causal) for s in specs] == [(N_HEADS, kv, True) for kv in keys]
    assert [s.limits.problem for s in specs] == [None] * n
    assert [s.limits.holds_to for s in specs] == LENGTHS.get(name, [None] * n)
    assert all(s.architecture == type(zoo.hf_model(name)).__name__ for s in specs)


@pytest.mark.parametrize(("kind", "name"), describable())
def test_rotation_is_that_of_hugging_face(kind: str, name: str, shared_model: Any) -> None:
    attention_factor = 0.1 * np.log(8) + 1 if name in ("llama-yarn", "gpt_oss") else 1.0  # the paper of YaRN
    for spec, own in zip(read_model(shared_model(kind, name)).specs(), own_frequencies(name), strict=True):
        if len(own) == 0:
            assert spec.rotary is None
            continue
        assert spec.rotary is not None
        assert spec.rotary.pairing == ("adjacent" if name in ADJACENT else "half")
        assert spec.rotary.attention_factor == pytest.approx(attention_factor, rel=1e-6)
        assert spec.limits.no_rotation is None
        if kind == "bridge" and name not in ("gptj", "codegen"):  # which keep a table and no frequencies
            assert torch.equal(spec.rotary.frequencies, own)
        else:
            torch.testing.assert_close(spec.rotary.frequencies, own, rtol=1e-6, atol=0)


def test_a_layer_without_positions_among_others(shared_model: Any) -> None:
    model = shared_model("bridge", "smollm3")
    assert [s.rotary is None for s in read_model(model).specs()] == [False, True]
    assert {x.spec.layer for x in swap_positions(model, torch.arange(12)).interventions} == {0}
    with pytest.raises(ValueError, match=r"swap_positions needs .* layer 1 of SmolLM3ForCausalLM has no rotary"):
        swap_positions(model, torch.arange(12), layers=[1])


@pytest.mark.parametrize(("kind", "name"), zoo.cases("bloom"))
def test_scores_that_are_not_those_of_queries_and_keys_are_named(kind: str, name: str, shared_model: Any) -> None:
    problem = "additive bias such as ALiBi"
    for spec in read_model(shared_model(kind, name)).specs():
        assert problem in str(spec.limits.problem)
        assert spec.taps.scores is not None
        assert spec.causal
        with pytest.raises(ValueError, match=rf"layer {spec.layer} of \w+: .*{problem}"):
            spec.require_scale()


@pytest.mark.parametrize(("kind", "name"), zoo.every_case())
def test_the_mask_is_that_of_the_pattern(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
    for spec in read_model(model).specs():
        seen = (cache["pattern", spec.layer] > 0).flatten(0, 1).any(0)
        assert torch.equal(seen, spec.mask(12))


def test_full_attention_is_not_causal() -> None:
    config = BertConfig(
        vocab_size=61, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, intermediate_size=96,
        max_position_embeddings=64, initializer_range=0.3, attn_implementation="eager",
    )  # fmt: skip
    model = zoo.as_bridge(BertForMaskedLM(config).eval())
    spec = read_attention(model, 1)
    assert (spec.causal, spec.window, spec.rotary, spec.limits.problem) == (False, None, None, None)
    assert bool(spec.mask(5).all())
    for layer in capture(model, TOKENS):
        ours = torch.einsum("bqhd,bkhd->bhqk", layer.q, layer.k) * 8**-0.5
        torch.testing.assert_close(layer.scores, ours, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:HookedEncoder is deprecated")
def test_another_class_with_the_same_hooks() -> None:
    """HookedEncoder cannot stop at a layer and attends both ways."""
    zoo.hooked("llama")  # skips under TransformerLens 4, which has neither
    from transformer_lens import HookedEncoder, HookedTransformerConfig

    options = {"d_model": 32, "d_head": 8, "n_heads": 4, "n_layers": 2, "n_ctx": 64, "d_vocab": 61, "d_mlp": 48}
    cfg = HookedTransformerConfig(
        **options,
        act_fn="gelu",
        normalization_type="LN",
        attention_dir="bidirectional",
        init_weights=False,
        device="cpu",
    )
    model = HookedEncoder(cfg)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert [(s.causal, s.limits.problem, s.scale) for s in read_model(model).specs()] == [
        (False, None, pytest.approx(8**-0.5))
    ] * 2
    with torch.no_grad():
        cache = model.run_with_cache(TOKENS)[1]
    assert torch.equal(capture(model, TOKENS, layers=[0])[0].scores, cache["attn_scores", 0])


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_models_that_transformer_lens_makes_itself(kv_heads: int) -> None:
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    options = {"d_model": 32, "d_head": 8, "n_heads": 4, "n_layers": 2, "n_ctx": 64, "d_vocab": 61, "d_mlp": 48}
    cfg = TransformerBridgeConfig(
        **options,
        n_key_value_heads=kv_heads,
        act_fn="gelu",
        normalization_type="LN",
        positional_embedding_type="rotary",
        rotary_dim=8,
        seed=0,
    )
    model = TransformerBridge.boot_native(cfg)
    with torch.no_grad():
        for parameter in model.original_model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    for spec in read_model(model).specs():
        assert (spec.limits.problem, spec.limits.no_rotation, spec.n_kv_heads) == (None, None, kv_heads)
        assert spec.rotary.pairing == "adjacent"
        torch.testing.assert_close(
            spec.rotary.frequencies, 10_000 ** (-torch.arange(4).double() / 4), rtol=1e-6, atol=0
        )
    positions = torch.randint(60, (2, 12))
    with torch.no_grad():
        expected = model(TOKENS, position_ids=positions)
        assert (expected - model(TOKENS)).abs().max() > 0.1
        with applied(model, swap_positions(model, positions)):
            torch.testing.assert_close(model(TOKENS), expected, rtol=0, atol=1e-4)
