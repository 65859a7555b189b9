"""What is read from a model is what it does: checked against Hugging Face's own modules and lists written by hand."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from support import zoo
from support.untouched import state
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from tl_posdisent import applied, capture, dummy_distance, read_attention, read_layers, remap_distance, swap_positions
from tl_posdisent.lens.evidence import is_masked

TOKENS = zoo.random_tokens()
N_HEADS = 8

# Written by hand from the papers and the sources of transformers, not from what the package finds.
ADJACENT = {"gptj", "codegen", "glm", "cohere"}
UNROTATED = {"gpt2", "opt", "gpt_neo", "bloom", "mpt"}
BIASED = {"bloom", "mpt"}  # ALiBi
KV_HEADS = {"llama-mqa": 1, "falcon": 1} | dict.fromkeys(
    ("llama", "neox", "neox-half", "gptj", "codegen", "phi", "olmo2", "gpt2", "opt", "gpt_neo", "bloom", "mpt"), 8
)  # 4 elsewhere
WINDOWS = {"mistral": [6, 6], "gemma2": [5, None], "gemma3": [5, 5, None], "gpt_oss": [5, None], "gpt_neo": [None, 5]}
SOFT_CAPS = {"gemma2": 3.0}
SCALES = {"neox": 16**-0.5, "qwen3": 16**-0.5, "gemma2": 24**-0.5, "gemma3": 24**-0.5, "gpt_neo": 1.0}  # 8 ** -0.5 else


def own_frequencies(name: str) -> list[Tensor]:
    """What the Hugging Face model itself turns by, per layer; none for a layer that does not rotate."""
    model = zoo.hf_model(name)
    if name in ("gptj", "codegen"):
        dim = model.config.rotary_dim
        return [1 / 10_000 ** (torch.arange(0, dim, 2).double() / dim)] * 2
    if name == "gemma3":
        module = model.model.rotary_emb
        return [getattr(module, f"{kind}_inv_freq").double() for kind in model.config.layer_types]
    found = [buffer.double() for key, buffer in model.named_buffers() if key.endswith(".inv_freq")]
    own = found[0] if found else torch.empty(0).double()
    return [own, own[:0]] if name == "smollm3" else [own] * 2


def describable(*, rotary: bool | None = None) -> list[Any]:
    """The cases whose scores are those of queries and keys."""
    return [
        case
        for case in zoo.cases()
        if case.values[1] not in {*BIASED, "deepseek_v3"}
        and (rotary is None or (case.values[1] not in UNROTATED) == rotary)
    ]


# --- what is read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), describable())
def test_facts_of_every_layer(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    specs = read_layers(model)
    n = len(specs)
    assert [s.layer for s in specs] == list(range(model.cfg.n_layers))
    assert [s.window for s in specs] == WINDOWS.get(name, [None] * n)
    assert [s.soft_cap for s in specs] == [SOFT_CAPS.get(name)] * n
    assert [s.scale for s in specs] == [pytest.approx(SCALES.get(name, 8**-0.5), rel=1e-6)] * n
    assert [(s.n_heads, s.n_kv_heads, s.causal) for s in specs] == [(N_HEADS, KV_HEADS.get(name, 4), True)] * n
    assert [s.problem for s in specs] == [None] * n
    assert all(s.architecture == type(zoo.hf_model(name)).__name__ for s in specs)


@pytest.mark.parametrize(("kind", "name"), describable())
def test_rotation_is_that_of_hugging_face(kind: str, name: str, shared_model: Any) -> None:
    attention_factor = 0.1 * np.log(8) + 1 if name in ("llama-yarn", "gpt_oss") else 1.0  # the paper of YaRN
    for spec, own in zip(read_layers(shared_model(kind, name)), own_frequencies(name), strict=True):
        if len(own) == 0:
            assert spec.rotary is None
            continue
        assert spec.rotary is not None
        assert spec.rotary.pairing == ("adjacent" if name in ADJACENT else "half")
        assert spec.rotary.attention_factor == pytest.approx(attention_factor, rel=1e-6)
        assert spec.no_rotation is None
        if kind == "bridge" and name not in ("gptj", "codegen"):  # which keep a table and no frequencies
            assert torch.equal(spec.rotary.frequencies, own)
        else:
            torch.testing.assert_close(spec.rotary.frequencies, own, rtol=1e-6, atol=0)


def test_a_layer_without_positions_among_others(shared_model: Any) -> None:
    model = shared_model("bridge", "smollm3")
    assert [s.rotary is None for s in read_layers(model)] == [False, True]
    names = {name for name, _ in swap_positions(model, torch.arange(12))}
    assert all(name.startswith("blocks.0.") for name in names)
    with pytest.raises(ValueError, match=r"swap_positions needs .* layer 1 of SmolLM3ForCausalLM has no rotary"):
        swap_positions(model, torch.arange(12), layers=[1])


@pytest.mark.parametrize(("kind", "name"), zoo.cases("bloom", "mpt", "deepseek_v3"))
def test_scores_that_are_not_those_of_queries_and_keys_are_named(kind: str, name: str, shared_model: Any) -> None:
    problem = "multi-head latent attention" if name == "deepseek_v3" else "additive bias such as ALiBi"
    for spec in read_layers(shared_model(kind, name)):
        assert problem in str(spec.problem)
        assert spec.scores is not None
        assert spec.causal
        with pytest.raises(ValueError, match=rf"layer {spec.layer} of \w+: .*{problem}"):
            spec.require_scale()


@pytest.mark.parametrize(("kind", "name"), zoo.cases())
def test_the_mask_is_that_of_the_pattern(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
    for spec in read_layers(model):
        seen = (cache["pattern", spec.layer] > 0).flatten(0, 1).any(0)
        assert torch.equal(seen, spec.mask(12))


def test_one_layer_or_all_or_some(shared_model: Any) -> None:
    model = shared_model("bridge", "gemma3")
    every = read_layers(model)
    assert [s.layer for s in read_layers(model, [2, 0])] == [2, 0]
    for layer, spec in enumerate(every):
        alone = read_attention(model, layer)
        assert (alone.layer, alone.window, alone.scale) == (layer, spec.window, spec.scale)
        assert torch.equal(alone.rotary.frequencies, spec.rotary.frequencies)


def test_grouped_heads() -> None:
    spec = read_attention(zoo.bridge("llama-gqa"), 0)
    assert [spec.key_head(h) for h in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    x = torch.randn(1, 3, 4, 2)
    assert torch.equal(spec.per_query_head(x)[0, :, 5], x[0, :, 2])


def test_full_attention_is_not_causal() -> None:
    from support.zoo import as_bridge

    config = BertConfig(
        vocab_size=61, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, intermediate_size=96,
        max_position_embeddings=64, initializer_range=0.3, attn_implementation="eager",
    )  # fmt: skip
    model = as_bridge(BertForMaskedLM(config).eval())
    spec = read_attention(model, 1)
    assert (spec.causal, spec.window, spec.rotary, spec.problem) == (False, None, None, None)
    assert bool(spec.mask(5).all())
    for layer in capture(model, TOKENS):
        ours = torch.einsum("bqhd,bkhd->bhqk", layer.q, layer.k) * 8**-0.5
        torch.testing.assert_close(layer.scores, ours, rtol=0, atol=1e-4)


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
    for spec in read_layers(model):
        assert (spec.problem, spec.no_rotation, spec.n_kv_heads) == (None, None, kv_heads)
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


# --- models in other states -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-gqa", "neox", "qwen3", "gemma3", "opt"])
def test_fused_attention_works_or_says_what_to_do(name: str) -> None:
    model = zoo.bridge(name, "sdpa")
    for spec in read_layers(model):
        if name == "opt":
            assert 'attn_implementation="eager"' in str(spec.problem)
        else:
            assert spec.problem is None
    if name == "opt":
        with pytest.raises(ValueError, match=r"OPTForCausalLM: neither hook_attn_scores nor hook_pattern fires"):
            capture(model, TOKENS)
    else:
        positions = torch.randint(100, (2, 12))
        assert_swaps_as_hugging_face(model, name, positions)


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("name", ["llama-gqa", "neox", "gptj"])
def test_compatibility_mode(name: str, processed: bool) -> None:
    """Aliases of hooks must not let a function act twice."""
    model = zoo.bridge(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.enable_compatibility_mode(no_processing=not processed)
    assert [s.problem for s in read_layers(model)] == [None, None]
    assert_swaps_as_hugging_face(model, name, torch.randint(100, (2, 12)))
    everything = [layer.layer for layer in capture(model, TOKENS)]
    assert everything == [0, 1]


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mqa"])
def test_ungrouped_keys(name: str) -> None:
    model = zoo.hooked(name)
    model.set_ungroup_grouped_query_attention(True)
    assert [s.n_kv_heads for s in read_layers(model)] == [8, 8]
    assert_swaps_as_hugging_face(model, name, torch.randint(100, (2, 12)))


def test_split_inputs() -> None:
    model = zoo.hooked("llama-gqa")
    model.set_use_split_qkv_input(True)
    model.set_use_attn_result(True)
    assert [s.problem for s in read_layers(model)] == [None, None]
    assert_swaps_as_hugging_face(model, "llama-gqa", torch.randint(100, (2, 12)))


def assert_swaps_as_hugging_face(model: Any, name: str, positions: Tensor) -> None:
    """Both ways to the same logits (up to a constant, which processed weights may move): rotation and recomputation."""
    expected = zoo.hf_logits(name, TOKENS, position_ids=positions).log_softmax(-1)
    untouched = zoo.hf_logits(name, TOKENS).log_softmax(-1)
    assert (expected - untouched).abs().max() > 0.5
    pairs = (positions[:, :, None] - positions[:, None]).double()[:, None]
    for hooks in (swap_positions(model, positions), remap_distance(model, pairs)):
        with torch.no_grad(), applied(model, hooks):
            torch.testing.assert_close(model(TOKENS).log_softmax(-1), expected, rtol=0, atol=1e-4)


SIXTEEN = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def narrow(kind: str, name: str, dtype: torch.dtype, small: float = 1.0) -> Any:
    """A model in 16 bits, its weights shrunk."""
    source = zoo.hf_model(name)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(small if parameter.ndim > 1 else 1.0)
    if kind == "hooked" and name not in zoo.HOOKED_NAMES:
        pytest.skip(f"HookedTransformer has no architecture for {name}")
    model = {"bridge": zoo.as_bridge, "hooked": zoo.as_hooked}[kind](source)
    model.to(dtype)
    model.cfg.dtype = dtype
    return model


@pytest.mark.parametrize(("small", "dtype"), [(0.1, torch.bfloat16), (1.0, torch.float16)], ids=["initial", "trained"])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "neox", "qwen3", "gptj", "codegen", "gemma2", "opt"))
def test_facts_in_sixteen_bits(kind: str, name: str, small: float, dtype: torch.dtype, shared_model: Any) -> None:
    """At initialisation scores are within 0.03 of 0, and 16 bits leave little to tell explanations apart by."""
    exact = read_layers(shared_model(kind, name))
    for spec, wide in zip(read_layers(narrow(kind, name, dtype, small)), exact, strict=True):
        assert (spec.problem, spec.no_rotation, spec.scores_editable) == (None, None, wide.scores_editable)
        assert (spec.scale, spec.soft_cap, spec.window) == (pytest.approx(wide.scale), wide.soft_cap, wide.window)
        if wide.rotary is None:
            assert spec.rotary is None
        else:
            assert spec.rotary.pairing == wide.rotary.pairing
            torch.testing.assert_close(spec.rotary.frequencies, wide.rotary.frequencies, rtol=4e-3, atol=1e-4)


@SIXTEEN
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "neox", "qwen3", "gptj", "gemma2"))
def test_swaps_in_sixteen_bits(kind: str, name: str, dtype: torch.dtype) -> None:
    model = narrow(kind, name, dtype)
    positions = torch.tensor([[0, 2, 4, 9, 10, 14, 15, 27, 28, 40, 41, 60]]).expand(2, -1)
    expected, untouched = zoo.hf_logits(name, TOKENS, position_ids=positions), zoo.hf_logits(name, TOKENS)
    pairs = (positions[:, :, None] - positions[:, None])[:, None]
    for hooks in (swap_positions(model, positions), remap_distance(model, pairs)):
        with torch.no_grad(), applied(model, hooks):
            got = model(TOKENS).float()
        with torch.no_grad():
            rounding = (model(TOKENS).float() - untouched).abs().max()
        assert (got - expected).abs().max() < 3 * rounding < (expected - untouched).abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_masked_scores_are_told_from_scores(dtype: torch.dtype) -> None:
    """In 16 bits the most negative number and a large score add up to something above that number."""
    least = torch.finfo(dtype).min
    scores = torch.tensor([-300.0, -0.5, 0.0, 40.0, 300.0], dtype=dtype)
    assert not is_masked(scores).any()
    assert is_masked(scores + least).all()
    assert is_masked(torch.tensor([-torch.inf, least, least / 3], dtype=dtype)).all()


def test_large_scores_in_sixteen_bits() -> None:
    model = narrow("bridge", "llama-gqa", torch.float16, 3.0)
    largest = max(layer.scores.masked_fill(~layer.spec.mask(12), 0).amax().item() for layer in capture(model, TOKENS))
    assert largest > 32


# --- the model is left alone ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")  # the checks of lists draw random numbers themselves
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "gemma3", "opt", "gpt2"))
def test_looking_changes_nothing(kind: str, name: str, training: bool) -> None:
    model = zoo.load(kind, name)
    for module in model.modules():  # what dropout there is bites when the model trains
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model.train(training)
    list(model.modules())[3].eval()  # a part that a user has frozen stays so
    calls: list[int] = []
    model.hook_dict["blocks.0.attn.hook_q"].add_hook(lambda x, hook: calls.append(1))

    def logits() -> Tensor:
        torch.manual_seed(1)
        return model(TOKENS)

    plain, before = logits(), state(model)
    specs = read_layers(model)
    assert state(model) == before
    assert calls == [1]  # by the run of the user's own
    assert torch.equal(logits(), plain)
    assert calls == [1, 1]
    assert [s.problem for s in specs] == [None] * len(specs)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "neox", "gptj"))
def test_hooks_of_the_user_do_not_disturb_the_look(kind: str, name: str, shared_model: Any) -> None:
    """A patch made for the user's text would fail on the probe's, and an edit would be taken for the model."""
    model = shared_model(kind, name)

    def patch(x: Tensor, hook: Any) -> Tensor:
        x = x.clone()
        x[:, 11] = 0  # the probe's text is shorter
        return x

    def bend(x: Tensor, hook: Any) -> Tensor:
        return x / 2

    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_q", patch), ("blocks.1.attn.hook_attn_scores", bend)]):
        plain = model(TOKENS)
        inside = read_layers(model)
        assert torch.equal(model(TOKENS), plain)
    for spec, bare in zip(inside, read_layers(model), strict=True):
        assert (spec.problem, spec.scale, spec.scores, spec.turn_q) == (None, bare.scale, bare.scores, bare.turn_q)


def test_permanent_hooks_stay_in_order(shared_model: Any) -> None:
    model = zoo.bridge("llama")
    order: list[str] = []
    point = model.hook_dict["blocks.0.attn.hook_q"]
    point.add_hook(lambda x, hook: order.append("first"))
    point.add_perma_hook(lambda x, hook: order.append("permanent"))
    point.add_hook(lambda x, hook: order.append("last"))
    read_layers(model)
    order.clear()
    model(TOKENS)
    assert order == ["first", "permanent", "last"]


# --- refusals -------------------------------------------------------------------------------------------------

TOOLS = {
    "swap_positions": lambda model, **more: swap_positions(model, torch.arange(12), **more),
    "dummy_distance": lambda model, **more: dummy_distance(model, 3, **more),
    "remap_distance": lambda model, **more: remap_distance(model, lambda d: d.clamp(max=4), **more),
}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(("kind", "name"), zoo.cases("gpt2", "opt", "bloom", "mpt", "deepseek_v3"))
def test_tools_for_rotation_name_what_is_missing(kind: str, name: str, tool: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    architecture = type(zoo.hf_model(name)).__name__
    missing = "rotated already" if name == "deepseek_v3" else "has no rotary position embedding"
    with pytest.raises(ValueError, match=rf"{tool} needs rotary .* layer 0 of {architecture} .*{missing}"):
        TOOLS[tool](model)


WRONG_LAYERS = [
    ([2], "layers must be integers from 0 to 1, got 2"),
    ([-1], "layers must be integers from 0 to 1, got -1"),
    ([True], "layers must be integers from 0 to 1, got True"),
    ([1.0], r"layers must be integers from 0 to 1, got 1\.0"),
    (["0"], "layers must be integers from 0 to 1, got '0'"),
    ([0, 0], r"layers must name at least one and none twice, got \[0, 0\]"),
    ([], r"layers must name at least one and none twice, got \[\]"),
    ("01", "layers must be a sequence of integers, got '01'"),
    (1, "layers must be a sequence of integers, got 1"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("layers", "message"), WRONG_LAYERS)
def test_wrong_layers(layers: Any, message: str, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    for function in (
        read_layers,
        lambda m, layers: capture(m, TOKENS, layers=layers),
        *(lambda m, layers, tool=tool: tool(m, layers=layers) for tool in TOOLS.values()),
    ):
        with pytest.raises(ValueError, match=message):
            function(model, layers)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("heads", "message"), [(x, m.replace("layers", "heads")) for x, m in WRONG_LAYERS])
def test_wrong_heads(heads: Any, message: str, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    if heads in ([2], [1.0], [-1], [True], ["0"]):
        heads, message = ([8] if heads == [2] else heads), message.replace("to 1", "to 7").replace("got 2", "got 8")
    for tool in TOOLS.values():
        with pytest.raises(ValueError, match=message):
            tool(model, heads=heads)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("layer", [5, -1, True, "0", None])
def test_wrong_layer(layer: Any, shared_model: Any) -> None:
    with pytest.raises(ValueError, match=rf"layers? must be integers from 0 to 1, got {layer!r}"):
        read_attention(shared_model("bridge", "llama-gqa"), layer)


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), zoo.hf_model("llama"), None, "gpt2"], ids=repr)
def test_other_models(model: Any) -> None:
    functions = (
        read_layers, lambda m: read_attention(m, 0), lambda m: capture(m, TOKENS), *TOOLS.values()
    )  # fmt: skip
    for function in functions:
        with pytest.raises(ValueError, match=rf"model must be a HookedTransformer.* got {type(model).__name__}"):
            function(model)
