"""What is captured is what the model computed, in one pass, one layer at a time, and nothing stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.zoo_configs import MECHANISMS
from torch import Tensor

from tl_posdisent import additivity, capture, load_demo_model, read_model
from tl_posdisent.models import AttentionSpec, Captured
from tl_posdisent.models.capture import for_each_layer, for_each_scores
from tl_posdisent.rope import rotate

TOKENS = zoo.random_tokens()
PLAIN = zoo.cases(*(name for name in MECHANISMS if name not in ("bloom", "lfm2")))
SOME = ("llama-gqa", "gptj", "gemma2")


def cached(model: Any) -> Any:
    with torch.no_grad():
        return model.run_with_cache(TOKENS)[1]


def close(got: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


# --- the right numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), PLAIN)
def test_tensors_are_those_of_the_cache_and_of_each_other(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    cache = cached(model)
    layers = []
    for layer in capture(model, TOKENS):
        layers.append(layer.layer)
        spec, hook = layer.spec, f"blocks.{layer.layer}.attn.hook_"
        inside = spec.mask(12)
        if layer.q.shape == cache[f"{hook}q"].shape and name not in ("olmo2", "gemma4"):
            assert torch.equal(layer.q, cache[f"{hook}q"])
            assert torch.equal(layer.k, cache[f"{hook}k"])
        if spec.rotary is not None:
            close(rotate(layer.q, torch.arange(12), spec.rotary), layer.q_rot)
            close(rotate(layer.k, torch.arange(12), spec.rotary), layer.k_rot)
            if f"{hook}rot_q" in cache:
                q, k = cache[f"{hook}rot_q"], cache[f"{hook}rot_k"]  # of latent attention, the rotated slice
                assert torch.equal(layer.q_rot[..., : q.shape[-1]], q)
                assert torch.equal(layer.k_rot[..., : k.shape[-1]], k.expand(*layer.k_rot.shape[:3], -1))
        else:
            assert torch.equal(layer.q_rot, layer.q)
        keys = layer.k_rot.repeat_interleave(8 // layer.k_rot.shape[2], 2)
        scores = spec.scale * torch.einsum("bqhd,bkhd->bhqk", layer.q_rot, keys)
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        close(layer.scores[..., inside], scores[..., inside])
        if name != "gpt_oss":  # whose sinks take a part of every row
            close(layer.scores.masked_fill(~inside, -torch.inf).softmax(-1), cache[f"{hook}pattern"])
        if spec.taps.scores is not None:
            assert torch.equal(layer.scores, cache[f"{hook}attn_scores"])
    assert layers == list(range(model.cfg.n_layers))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj"))
def test_long_texts_in_other_dtypes(kind: str, name: str, dtype: torch.dtype) -> None:
    """The self-check must not take rounding for an error, as far as the context goes."""
    model = zoo.load(kind, name).to(dtype)
    model.cfg.dtype = dtype
    tokens = zoo.random_tokens(120)
    for layer in capture(model, tokens):
        assert {x.dtype for x in (layer.q, layer.k, layer.q_rot, layer.k_rot, layer.scores)} == {dtype}
        assert layer.scores[..., layer.spec.mask(120)].isfinite().all()


@pytest.mark.parametrize(("kind", "name"), zoo.cases("olmo2"))
def test_queries_come_after_their_norm(kind: str, name: str, shared_model: Any) -> None:
    """By the norm's definition, with the weights of Hugging Face."""
    source = zoo.hf_model(name)
    weights, eps = dict(source.named_parameters()), source.config.rms_norm_eps
    cache = cached(shared_model(kind, name))
    for layer in capture(shared_model(kind, name), TOKENS):
        bare = cache["q", layer.layer]
        weight = weights[f"model.layers.{layer.layer}.self_attn.q_norm.weight"]
        flat = bare if name == "qwen3" else bare.flatten(2)  # OLMo 2 norms all heads together
        normed = weight * flat / (flat.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        close(layer.q, normed.view_as(bare))


@pytest.mark.parametrize(("kind", "name"), zoo.cases("bloom"))
def test_scores_of_other_kinds_are_streamed_and_not_captured(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    with pytest.raises(ValueError, match=r"layer 0 of \w+: "):
        capture(model, TOKENS)
    cache = cached(model)
    seen: list[int] = []

    def compare(spec: AttentionSpec, scores: Tensor) -> None:
        seen.append(spec.layer)
        assert torch.equal(scores, cache["attn_scores", spec.layer])

    for_each_scores(model, TOKENS, read_model(model).specs(), compare)
    assert seen == list(range(model.cfg.n_layers))


@pytest.mark.parametrize(("kind", "name"), zoo.cases(*SOME))
def test_layers_come_in_the_order_of_the_model_and_the_rest_is_not_run(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    reached: list[int] = []
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_q", lambda x, hook: reached.append(1))]):
        assert [layer.layer for layer in capture(model, TOKENS, layers=[0])] == [0]
        assert reached == []
        assert [layer.layer for layer in capture(model, TOKENS, layers=[1, 0])] == [0, 1]
        assert reached == [1]


def test_without_scores(shared_model: Any) -> None:
    for name in ("llama-gqa", "gptj"):
        model = shared_model("bridge", name)
        every = capture(model, TOKENS)
        for with_scores, without in zip(every, capture(model, TOKENS, scores=False), strict=True):
            assert without.own_scores is None
            assert torch.equal(without.k_rot, with_scores.k_rot)
            inside = without.spec.mask(12)
            close(without.scores[..., inside], with_scores.scores[..., inside])


# --- checks ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:A hook on attn")  # TransformerLens 4 says where an edit is in vain
@pytest.mark.parametrize(("kind", "name"), zoo.cases(*SOME, "olmo2"))
@pytest.mark.parametrize("hook", ["hook_attn_scores", "hook_q", "hook_rot_k"])
def test_tampering_is_noticed_or_harmless(kind: str, name: str, hook: str, shared_model: Any) -> None:
    """Scores that do not follow from the queries and keys that are handed out are refused."""
    model = shared_model(kind, name)
    tampered = f"blocks.1.attn.{hook}"
    fired: list[int] = []

    def tamper(x: Tensor, hook: Any) -> Tensor:
        fired.append(1)
        x = x.clone()
        x[..., 3, 1] += 1  # one score; one coordinate of one head
        return x

    with model.hooks(fwd_hooks=[(tampered, tamper)] if tampered in model.hook_dict else []):
        if fires_and_matters(model, tampered, fired):
            with pytest.raises(ValueError, match=r"scores of layer 1 of .* are not what its queries, keys"):
                capture(model, TOKENS)
        else:  # what happens to queries before they are read is part of what they are
            assert len(capture(model, TOKENS)) == 2


def fires_and_matters(model: Any, name: str, fired: list[int]) -> bool:
    with torch.no_grad():
        model(TOKENS)
    short = name.rsplit(".", 1)[-1]
    editable = short != "hook_attn_scores" or read_model(model).specs(1)[0].taps.scores is not None
    return bool(fired) and short != "hook_q" and editable


@pytest.mark.parametrize("name", zoo.names(*SOME, "bloom"))
def test_padding_is_refused(name: str, shared_model: Any) -> None:
    """On either side, as an attention mask tells the model."""
    model = shared_model("bridge", name)

    class Padded(torch.nn.Module):
        """The model, given a mask at every call."""

        def __init__(self, mask: Tensor) -> None:
            super().__init__()
            self.mask = mask

        def __getattr__(self, key: str) -> Any:
            return super().__getattr__(key) if key in ("_modules", "_parameters", "_buffers") else getattr(model, key)

        def forward(self, tokens: Tensor, stop_at_layer: int | None = None) -> Tensor:
            mask = self.mask if tokens.shape == self.mask.shape else None
            return model(tokens, stop_at_layer=stop_at_layer, attention_mask=mask)

    for padding in (slice(0, 3), slice(9, 12)):
        mask = torch.ones(2, 12, dtype=torch.int64)
        for_each_scores(Padded(mask), TOKENS, read_model(model).specs(), lambda spec, scores: None)
        mask[1, padding] = 0
        for function in (capture, lambda m, t: additivity(m, t, progress=False)):
            if name == "bloom" and function is capture:
                continue
            with pytest.raises(
                ValueError, match=r"for padded texts pass attention_mask=|padding|finite inside the mask"
            ):
                list(function(Padded(mask), TOKENS))


@pytest.mark.usefixtures("unchecked")
def test_padding_by_a_tokenizer_is_refused() -> None:
    """HookedTransformer masks padding by itself, and counts positions from the first real token, where the tokenizer
    pads on the left."""
    zoo.hooked("llama")  # skips without HookedTransformer
    model = load_demo_model(backend="hooked")
    model.tokenizer.padding_side = "left"
    texts = ["We the people of the United States", "We the people"]
    with pytest.raises(ValueError, match=r"texts of equal length for capture, got texts of \d+, \d+ tokens"):
        capture(model, texts)
    with pytest.raises(ValueError, match=r"padding id 0 at the beginning of text 1.*attention_mask"):
        capture(model, model.to_tokens(texts))
    assert len(capture(model, texts[:1] * 2)) == 5


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_that_a_mask_names_is_cut_off(side: str, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    pad, mask = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 12, dtype=torch.int64)
    padded, real = (torch.cat(x if side == "right" else x[::-1], 1) for x in ((TOKENS, pad), (mask, pad)))
    for got, expected in zip(capture(model, padded, attention_mask=real), capture(model, TOKENS), strict=True):
        assert torch.equal(got.scores, expected.scores)
    real[0, 3 if side == "left" else 11] = 0  # one more token of padding in one of the texts
    with pytest.raises(ValueError, match=r"texts of equal length for capture, got texts of"):
        capture(model, padded, attention_mask=real)


# --- callbacks ------------------------------------------------------------------------------------------------


def test_an_error_of_the_callback_is_the_callers(shared_model: Any) -> None:
    """Not one of the model beyond its context, whatever its type; and the model is as it was."""
    model = shared_model("bridge", "llama-gqa")
    tokens = zoo.random_tokens(model.cfg.n_ctx + 3)
    own = RuntimeError("of the callback")

    def fail(layer: Captured) -> None:
        raise own

    with pytest.raises(RuntimeError, match="of the callback") as caught:
        for_each_layer(model, tokens, read_model(model).specs(), fail)
    assert caught.value is own
