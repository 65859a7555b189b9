"""Random-weights baselines: what is random, at which scale, and what is left as it was."""

from __future__ import annotations

import random
import warnings
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from support import zoo
from support.lanes import slow
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent import capture, head_labels, random_control, read_model
from tl_posdisent.models.running.model_parts import modules
from tl_posdisent.synthetic import SyntheticConfig, SyntheticModel
from tl_posdisent.synthetic.model.config import EncodingName

TOKENS = zoo.random_tokens(24)


def first_attention(model: Any) -> int:
    return next(layer for layer, block in enumerate(model.blocks) if hasattr(block, "attn"))


def first_inputs(model: Any) -> dict[str, Tensor]:
    """Queries, keys and values of the first layer with attention, as the model projects them."""
    layer, seen = first_attention(model), dict[str, Tensor]()

    def listen(x: Tensor, hook: Any, side: str) -> None:
        seen[side] = x.clone()

    hooks = [(f"blocks.{layer}.attn.hook_{side}", partial(listen, side=side)) for side in "qkv"]
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        seen["logits"] = model(TOKENS)
    return seen


@pytest.mark.usefixtures("unchecked")  # the checks of lists draw random numbers themselves
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gpt2", "gpt_oss"))
def test_random_control(kind: str, name: str) -> None:
    model = zoo.load(kind, name)
    fired: list[int] = []
    model.hook_dict["blocks.0.attn.hook_q"].add_hook(lambda x, hook: fired.append(1))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        plain = model(TOKENS)
    states = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    first, other = random_control(model, [3, 4], std=0.02)
    (again,) = random_control(model, [3], std=0.02)
    after = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert torch.equal(states[0], after[0])
    assert states[1:] == after[1:]
    fired.clear()
    with torch.no_grad():
        logits = [m(TOKENS) for m in (first, again, other)]
    assert fired == []  # a hook of the original is none of the copy
    assert torch.equal(logits[0], logits[1])
    assert (logits[0] - logits[2]).abs().max() > 0
    assert (logits[0] - plain).abs().max() > 0.1 * plain.abs().max()
    assert type(first) is type(model)
    assert not first.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(TOKENS), plain)
    assert fired == [1]
    matrix = first.blocks[0].attn.W_Q
    assert matrix.std().item() == pytest.approx(0.02, rel=0.05)
    assert matrix.dtype == model.blocks[0].attn.W_Q.dtype
    assert [s.limits.problem for s in read_model(first).specs()] == [None, None]


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_random_control_keeps_the_dtype_and_comes_one_by_one(kind: str, name: str) -> None:
    model = zoo.load(kind, name).to(torch.bfloat16)
    controls = random_control(model, range(3))
    assert next(controls).blocks[0].attn.W_Q.dtype == torch.bfloat16


# --- kinds of baselines -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gpt2"))
def test_shuffled_weights_are_the_same_numbers_elsewhere(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    copy, again = (
        next(random_control(model, [2], weights="shuffled")),
        next(random_control(model, [2], weights="shuffled")),
    )
    for (key, old), new, same in zip(model.named_parameters(), copy.parameters(), again.parameters(), strict=True):
        assert torch.equal(old.flatten().sort().values, new.flatten().sort().values), key
        assert torch.equal(new, same)
        assert old.numel() < 10 or old.unique().numel() == 1 or not torch.equal(old, new)
    assert (first_inputs(model)["logits"] - first_inputs(copy)["logits"]).abs().max() > 0.01


# --- the scale --------------------------------------------------------------------------------------------------


def projections(model: Any) -> float:
    return model.blocks[1].attn.W_Q.std().item()


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gpt2"))
def test_the_scale_is_that_of_the_configuration_or_the_one_given(kind: str, name: str) -> None:
    model = zoo.load(kind, name)
    if kind == "bridge":
        model.original_model.config.initializer_range = 0.07
    else:
        model.cfg.initializer_range = 0.07
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copies = [*random_control(model, 2), *random_control(model, 2, std=0.01)]
    assert [projections(copy) for copy in copies] == pytest.approx([0.07, 0.07, 0.01, 0.01], rel=0.05)
    assert [copy.cfg.initializer_range for copy in copies] == [0.07, 0.07, 0.01, 0.01]
    assert not torch.equal(copies[0].blocks[0].attn.W_Q, copies[1].blocks[0].attn.W_Q)


@pytest.mark.parametrize("backend", zoo.KINDS)
def test_the_scale_of_a_loaded_model_is_that_of_its_configuration(backend: str) -> None:
    hf_model = zoo.hf_model("llama-gqa", initializer_range=0.07)
    load = tp.hooked_from_hf if backend == "hooked" else tp.bridge_from_hf
    assert projections(next(random_control(load(hf_model)))) == pytest.approx(0.07, rel=0.05)


@zoo.needs_hooked
def test_a_scale_that_is_not_stated_is_said() -> None:
    """TransformerLens's default for pretrained models, and a gain of another initialisation, are no statements."""
    model = zoo.hooked("llama-gqa")
    for name, value in {"original_architecture": "LlamaForCausalLM", "init_mode": "xavier_uniform"}.items():
        model = zoo.hooked("llama-gqa")
        assert model.cfg.initializer_range == pytest.approx(0.8 / model.cfg.d_model**0.5)
        setattr(model.cfg, name, value)
        with pytest.warns(UserWarning, match=r"std: the model's configuration does not state .* so 0.02 is taken"):
            copies = random_control(model)
        assert projections(next(copies)) == pytest.approx(0.02, rel=0.05)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            random_control(model, std=0.02)


def test_tables_say_what_they_are_compared_with() -> None:
    model = zoo.load(*zoo.cases("llama-gqa")[0].values)
    labels = head_labels(model, TOKENS, seeds=[4], std=0.3, progress=False)
    assert labels.attrs["random weights"] == "random weights, standard deviation 0.3, seed 4"
    copy = next(random_control(model, [4], std=0.3))
    expected = head_labels(copy, TOKENS, seeds=0, progress=False)["entropy"]
    np.testing.assert_allclose(labels["entropy_random"], expected)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"std": 0.0}, "std must be a finite number above 0, got 0.0"),
        (
            {"weights": "shuffled", "std": 0.1},
            'std must be "config" for weights="shuffled", which keeps the weights, got 0.1',
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: dict[str, Any], error: str, shared_model: Any) -> None:
    model = shared_model(*zoo.cases("llama-gqa")[0].values)
    with pytest.raises(ValueError, match=error):
        random_control(model, **arguments)


# --- weights that are no parameters


class Quantised(torch.nn.Module):
    """A linear map whose weights are buffers, as GPTQ's and AWQ's are."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scales", scales)
        self.register_buffer("qweight", (linear.weight.detach() / scales).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.qweight.to(x.dtype) * self.scales)


class Constant(torch.nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = [value]

    def forward(self, x: Tensor) -> Tensor:
        return self.value[0]


def _parametrized(linear: torch.nn.Linear) -> torch.nn.Module:
    torch.nn.utils.parametrize.register_parametrization(
        linear, "weight", Constant(linear.weight.detach().clone()), unsafe=True
    )
    return linear


FOREIGN = {"buffers": Quantised, "a parametrization": _parametrized}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_weights_that_are_no_parameters_are_refused(foreign: str) -> None:
    """A shuffled copy would have the model's own queries; one made anew has others."""
    original = zoo.hf_model("llama-gqa")
    for layer in original.model.layers:
        layer.self_attn.q_proj = FOREIGN[foreign](layer.self_attn.q_proj)
    model = tp.bridge_from_hf(original)
    with pytest.raises(ValueError, match="model must keep its weights in floating point parameters for weights='shuf"):
        random_control(model, weights="shuffled")
    drawn, trained = (first_inputs(x)["q"] for x in (next(random_control(model)), model))
    assert (drawn - trained).abs().max() > 0.01 * trained.abs().max()


@pytest.mark.parametrize("encoding", get_args(EncodingName))
def test_synthetic_models_of_any_encoding_have_copies(encoding: Any) -> None:
    """Tables and fixed positions are no trained weights."""
    sizes = {"n_layers": 1, "d_model": 48, "n_heads": 3, "d_mlp": 32, "d_vocab": 20, "n_ctx": 16, "n_out": 5}
    model, tokens = SyntheticModel(SyntheticConfig(encoding=encoding, **sizes)), torch.arange(12)[None]
    for weights in ("random", "shuffled"):
        copy = next(random_control(model, weights=weights, **({} if weights == "shuffled" else {"std": 0.3})))
        _, trained = model.run_with_cache(tokens)
        _, drawn = copy.run_with_cache(tokens)
        assert not torch.equal(trained["q", 0], drawn["q", 0])


@zoo.needs_hooked
def test_a_parametrized_matrix_of_a_hooked_transformer_is_refused() -> None:
    attention = (model := zoo.hooked("llama-gqa")).blocks[1].attn
    torch.nn.utils.parametrize.register_parametrization(
        attention, "W_Q", Constant(attention.W_Q.detach().clone()), unsafe=True
    )
    with pytest.raises(ValueError, match=r"in floating point parameters .* and a module \("):
        random_control(model, weights="random")


# --- under hooks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
@pytest.mark.parametrize("what", ["random", *slow(["shuffled"])])
def test_under_hooks_of_this_package_the_copy_has_none(kind: str, name: str, what: Any) -> None:
    model = zoo.load(kind, name)
    expected = next(random_control(model, weights=what))(TOKENS)
    lists = [tp.dummy_distance(model, 5), tp.remap_distance(model, lambda d: d.clamp(max=4)), tp.ablate_heads(model, 0)]
    for hooks in lists:
        with model.hooks(fwd_hooks=hooks):
            under = model(TOKENS)
            torch.testing.assert_close(next(random_control(model, weights=what))(TOKENS), expected, rtol=0, atol=0)
            torch.testing.assert_close(model(TOKENS), under)


def test_copies_of_a_bridge_share_its_tokenizer() -> None:
    model, tokens = tp.load_demo_model(backend="bridge"), tp.demo_tokens(length=32)
    copy = next(random_control(model, [3]))
    assert copy.tokenizer is model.tokenizer
    assert copy.to_string(tokens) == model.to_string(tokens)


# --- what is not random -----------------------------------------------------------------------------------------


def change_attention(model: Any) -> None:
    """Change tables of rotations, scales and sinks in place."""
    for part in modules(model):
        for name, buffer in part._buffers.items():
            if name.endswith("inv_freq"):
                buffer.mul_(1.1)
            elif name.startswith("rotary_") and buffer.numel():  # cosines and sines: a smaller attention factor
                buffer.mul_(0.9)
        for name, factor in {"attention_scaling": 1.2, "scaling": 0.7, "attn_scale": 0.7}.items():
            if name in vars(part):
                setattr(part, name, getattr(part, name) * factor)
        if "sinks" in part._parameters:
            part.sinks.data.fill_(3.0)


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gpt_oss", "gemma3", "gptj", "deepseek_v3", "laguna"))
def test_rotation_scale_and_sinks_are_the_models(kind: str, name: str) -> None:
    model = zoo.load(kind, name)
    plain = read_model(model).specs()
    change_attention(model)
    (copy,) = random_control(model, std=0.02)
    for before, own, other in zip(plain, read_model(model).specs(), read_model(copy).specs(), strict=True):
        assert (other.rotary, other.scale) == (own.rotary, own.scale)
        assert name == "gptj" or before.rotary != own.rotary
    sinks = [x for part in modules(copy) if (x := part._parameters.get("sinks")) is not None]
    assert all(bool((x == 3).all()) for x in sinks)
    assert bool(sinks) == (name == "gpt_oss")
    assert capture(copy, TOKENS)
