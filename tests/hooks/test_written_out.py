"""Models that show no scores, since Hugging Face's code computes their attention, and models with latent attention:
every tool against attention in float64.

The oracle, `support/plain_attention.py`, is written from the projections and the configuration of each class.
"""

from __future__ import annotations

import dataclasses
import functools
from math import log
from typing import Any

import pytest
import torch
import transformers
from support import zoo
from support.plain_attention import NONE, Change, scores_of, written_out
from support.tolerance import of_rounded_weights, rounding
from torch import Tensor

from tl_posdisent import (
    ablate_heads,
    additivity,
    capture,
    controlled_distance,
    dummy_distance,
    fit_additive,
    head_ablation,
    head_effects,
    head_patching,
    lambda_mask,
    limit_frequencies,
    read_model,
    remap_distance,
    swap_positions,
)
from tl_posdisent.hooks import drop_component, patch_vectors, phase_noise, substitute_additive
from tl_posdisent.hooks.applied import applied

pytestmark = pytest.mark.tl4

L = 12
LOSS = log(61)  # of models with random weights and this vocabulary
TOKENS = zoo.random_tokens(L)
# Attention that no hook of TransformerLens shows, each architecture in its way; multi-head latent attention.
WITHOUT_SCORES = ("gemma4", "gemma4-shared", "llama4", "olmo-hybrid", "afmoe", "laguna", "nanochat")
LATENT = ("deepseek_v3", "deepseek_v2", "glm4-lite", "youtu")
without_scores, with_latents = (pytest.mark.parametrize("name", zoo.names(*x)) for x in (WITHOUT_SCORES, LATENT))
every_family = pytest.mark.parametrize("name", zoo.names(*WITHOUT_SCORES, *LATENT))


@pytest.fixture
def model(name: str, shared_model: Any) -> Any:
    return shared_model("bridge", name)


@functools.cache
def oracle(name: str) -> Any:
    model = zoo.hf_model(name).double()
    model.set_experts_implementation("eager")  # grouped products do not take float64
    return model


def plain(name: str, change: Change = Change()) -> Tensor:  # noqa: B008
    with written_out(oracle(name), change):
        return oracle(name)(TOKENS, use_cache=False).logits


def attention(name: str, tokens: Tensor = TOKENS) -> dict[int, Any]:
    """What each layer multiplies, and its scores."""
    with written_out(oracle(name)) as seen:
        oracle(name)(tokens, use_cache=False)
    return seen


@functools.cache
def tolerance(name: str) -> float:
    """Of unmodified logits."""
    return of_rounded_weights(oracle(name), lambda: plain(name))


def agree(model: Any, name: str, hooks: Any, change: Change) -> None:
    """The logits under hooks are those of the oracle, and differ from the unmodified ones."""
    expected, before = plain(name, change), plain(name)
    atol = of_rounded_weights(oracle(name), lambda: plain(name, change))
    assert (expected - before).abs().max() > max(1e-2 * float(before.abs().max()), 10 * atol)
    with torch.no_grad(), applied(model, hooks):
        torch.testing.assert_close(model(TOKENS).double(), expected, rtol=0, atol=atol)


def only(heads: dict[int, int], new: Tensor, old: Tensor, layer: int) -> Tensor:
    """The new distances for one head of some layers."""
    picked = old.clone()
    if layer in heads:
        picked[heads[layer]] = new[heads[layer]]
    return picked


def rotating(model: Any) -> list[int]:
    return [spec.layer for spec in read_model(model).specs() if spec.rotary is not None]


@every_family
def test_the_oracle_is_the_model(name: str) -> None:
    expected = oracle(name)(TOKENS, use_cache=False).logits
    # Whatever their data type, Hugging Face's models compute norms and angles in float32.
    torch.testing.assert_close(plain(name), expected, rtol=0, atol=tolerance(name))


@every_family
def test_queries_keys_and_scores(name: str, model: Any) -> None:
    layers = capture(model, TOKENS)
    inside = {layer.layer: layer.spec.mask(L) for layer in layers}
    scale = {layer: scores[..., inside[layer]].abs().max() for layer, (_, scores) in attention(name).items()}

    def relative() -> Tensor:
        return torch.cat([(x[..., inside[i]] / scale[i]).flatten() for i, (_, x) in attention(name).items()])

    atol, seen = of_rounded_weights(oracle(name), relative), attention(name)
    for layer in layers:
        parts, scores = seen[layer.layer]
        found, expected = (x[..., inside[layer.layer]].double() / scale[layer.layer] for x in (layer.scores, scores))
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)
        theta = parts.theta[parts.theta != 0]
        own = NONE if layer.spec.rotary is None else layer.spec.rotary.frequencies
        torch.testing.assert_close(own[own != 0], theta, rtol=rounding(1.0), atol=0)


@every_family
def test_positions(name: str, model: Any) -> None:
    order = torch.arange(L).flip(0).double() ** 1.5
    pairs = (order[:, None] - order).expand(8, -1, -1)
    agree(model, name, swap_positions(model, order), Change(lambda layer, d: pairs))
    agree(model, name, dummy_distance(model, 3), Change(lambda layer, d: 0 * d + 3))
    agree(model, name, remap_distance(model, lambda d: d.clamp(max=2)), Change(lambda layer, d: d.clamp(max=2)))
    one, last = dict.fromkeys(rotating(model), 1), max(rotating(model))  # a head that shares its keys with others

    def without(layer: int, z: Tensor) -> Tensor:
        return z.index_fill(2, torch.tensor([2]), 0) if layer == last else z

    hooks = swap_positions(model, order, heads=[*one.items()]) + ablate_heads(model, [(last, 2)])
    agree(model, name, hooks, Change(lambda layer, d: only(one, pairs, d, layer), z=without))


@pytest.mark.parametrize("layer", [2, 5])
def test_layers_that_share_keys_are_changed_apart(layer: int, shared_model: Any) -> None:
    """Layer 5 attends to the keys of layer 2."""
    model, name = shared_model("bridge", "gemma4-shared"), "gemma4-shared"
    assert [spec.taps.keys_of for spec in read_model(model).specs()] == [None, None, None, 1, 1, 2]
    order = torch.arange(L).flip(0).double() ** 1.5
    pairs = (order[:, None] - order).expand(8, -1, -1)
    hooks = swap_positions(model, order, layers=[layer])
    agree(model, name, hooks, Change(lambda at, d: pairs if at == layer else d))
    hooks = remap_distance(model, lambda d: d.clamp(max=2), layers=[layer], heads=[3])
    agree(model, name, hooks, Change(lambda at, d: only({layer: 3}, d.clamp(max=2), d, at)))


def test_the_text_part_of_a_multimodal_model(shared_model: Any) -> None:
    """Released checkpoints of Gemma 4 also read images: on text, they do what the model of text alone does."""
    from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig

    alone, text = shared_model("bridge", "gemma4"), zoo.hf_model("gemma4")
    small = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    of_images = Gemma4VisionConfig(**small, num_key_value_heads=2)
    parts = {"text_config": text.config, "vision_config": of_images, "audio_config": None}
    config = transformers.Gemma4Config(**parts, tie_word_embeddings=False)
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    model = transformers.Gemma4ForConditionalGeneration(config).float().eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    both = zoo.as_bridge(model)
    for make in (lambda m: swap_positions(m, lambda at: at / 2), lambda m: dummy_distance(m, 3)):
        with torch.no_grad(), both.hooks(fwd_hooks=make(both)), alone.hooks(fwd_hooks=make(alone)):
            torch.testing.assert_close(both(TOKENS), alone(TOKENS), rtol=0, atol=tolerance("gemma4"))


def test_a_text_of_several_chunks_is_refused() -> None:
    """Llama 4 as released has chunks of 8192 tokens."""
    model, text = zoo.bridge("llama4", floor_scale=1000), zoo.random_tokens(20)
    for tool in (
        lambda: capture(model, text),
        lambda: additivity(model, text, progress=False),
        lambda: model.run_with_hooks(text, fwd_hooks=dummy_distance(model, 3)),
    ):
        with pytest.raises(ValueError, match=r"at most 16 long .* layer 0 of .* rotates, scales or masks longer"):
            tool()
    short = zoo.bridge("llama4", attention_chunk_size=6)
    assert all("holds for texts of at most 6 tokens" in str(s.limits.problem) for s in read_model(short).specs()[:3])
    with pytest.raises(ValueError, match=r"dummy_distance needs .* its mask holds for texts of at most 6 tokens"):
        dummy_distance(short, 3)


def test_a_pass_that_does_not_begin_with_the_keys_that_a_layer_shares(shared_model: Any) -> None:
    model = shared_model("bridge", "gemma4-shared")
    hooks = swap_positions(model, lambda at: at / 2, layers=[5])
    (function,) = {function for _, function in hooks}
    point = model.hook_dict["blocks.5.attn.q_norm.hook_out"]
    function.accepts(point.name)
    with pytest.raises(ValueError, match="attends to the keys of layer 2, and do not see these: run the model from"):
        function(torch.zeros(1, L, 8, 16), hook=point)


@every_family
def test_phase_noise(name: str, model: Any) -> None:
    """Phases that are proportional to the frequencies are other positions."""
    layer = rotating(model)[-1]
    at = torch.arange(L) + torch.randn(L, generator=torch.Generator().manual_seed(0)).double()
    frequencies = read_model(model).specs([layer])[0].require_rotary("phase_noise").frequencies.double()
    hooks = phase_noise(model, (at - torch.arange(L))[:, None] * frequencies, layers=[layer])
    there = at[:, None] - at
    agree(model, name, hooks, Change(lambda x, d: there.expand_as(d) if x == layer else d))


@without_scores
def test_patched_vectors(name: str, model: Any) -> None:
    """Queries and keys of another text, and its queries with the keys of this one."""
    layer, other = rotating(model)[-1], TOKENS.flip(1)
    with written_out(oracle(name)) as seen:
        oracle(name)(other, use_cache=False)
        theirs = seen[layer]
        oracle(name)(TOKENS, use_cache=False)
        own = seen[layer][0]
    captured = capture(model, other, layers=[layer])[0]
    if captured.spec.taps.keys_of is not None:
        pytest.skip("a layer that shares keys")
    at = torch.arange(L).double()
    distances = (at[:, None] - at).expand(captured.spec.n_heads, -1, -1)
    none = torch.zeros_like(own.theta, dtype=torch.bool)
    mixed = scores_of(dataclasses.replace(theirs[0], k=own.k), distances, own.theta[None], none)
    for k_rot, scores in ((captured.k_rot, theirs[1]), (None, mixed)):
        hooks = patch_vectors(model, layer, captured.q_rot, k_rot)
        agree(model, name, hooks, Change(scores=lambda x, s, mask, new=scores: new if x == layer else s))


@pytest.mark.parametrize("component", ["distance", "key", "residual"])
@every_family
def test_dropped_components(name: str, component: Any, model: Any) -> None:
    def without(layer: int, scores: Tensor, mask: Tensor) -> Tensor:
        fit = fit_additive(scores, mask=mask)
        part = fit.residual(scores) if component == "residual" else fit.component(component)
        return torch.where(mask, scores - part, scores)

    agree(model, name, drop_component(model, component), Change(scores=without))


@every_family
@pytest.mark.parametrize("mode", ["drop", "freeze"])
def test_frequencies(name: str, mode: Any, model: Any) -> None:
    def low(layer: int, theta: Tensor) -> Tensor:
        return (theta.abs() < 0.2) & (theta != 0)

    hooks = limit_frequencies(model, 0.2, mode=mode)
    if mode == "drop":
        agree(model, name, hooks, Change(dropped=low))
    else:
        agree(model, name, hooks, Change(theta=lambda layer, x: x.masked_fill(low(layer, x), 0)))


@every_family
def test_lambda_mask(name: str, model: Any) -> None:
    at, turned = torch.arange(L), rotating(model)
    far = (at[:, None] - at >= 4) & (at >= 2)

    def hidden(layer: int, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(far, -torch.inf) if layer in turned else scores

    agree(model, name, lambda_mask(model, 2, 4, 5), Change(lambda layer, d: d.clamp(max=5), scores=hidden))


@every_family
def test_head_patching(name: str, model: Any) -> None:
    other, layer, kept = TOKENS.flip(1), rotating(model)[-1], dict[int, Tensor]()

    def keep(layer: int, z: Tensor) -> Tensor:
        kept[layer] = z
        return z

    with written_out(oracle(name), Change(z=keep)):
        oracle(name)(other, use_cache=False)

    def last(logits: Tensor, tokens: Tensor) -> Tensor:
        return logits[:, -1].double().logsumexp(-1).mean()

    def patched(at: int, z: Tensor) -> Tensor:
        return z.index_copy(2, torch.tensor([5]), kept[at][:, :, [5]]) if at == layer else z

    table = head_patching(model, TOKENS, other, last, layers=[layer], heads=[5], progress=False)

    def value() -> Tensor:
        return last(plain(name, Change(z=patched)), other)

    expected, atol = value().item(), of_rounded_weights(oracle(name), value)
    assert abs(expected - last(plain(name), other).item()) > max(1e-3, 10 * atol)
    assert table["value"].item() == pytest.approx(expected, abs=atol)


def least_squares(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Fit ``[batch, head, query, key]`` by a column for each distance, query and key; return columns and parameters."""
    i, j = mask.nonzero(as_tuple=True)
    ones = torch.eye(scores.shape[-1], dtype=torch.float64)
    columns = torch.cat([ones[i - j], ones[i], ones[j]], 1)
    return columns, torch.linalg.lstsq(columns, scores[..., i, j].flatten(0, 1).T, driver="gelsd").solution


@every_family
def test_fits(name: str, model: Any) -> None:
    """The share that each fit explains, and the logits with fitted scores in place of the model's own."""
    table = additivity(model, TOKENS, progress=False).sort_values(["layer", "batch", "head"])
    masks = {spec.layer: spec.mask(L) for spec in read_model(model).specs()}

    def shares() -> Tensor:
        every = []
        for layer, (_, scores) in sorted(attention(name).items()):
            y = scores[..., masks[layer]].flatten(0, 1).T
            columns, found = least_squares(scores, masks[layer])
            every.append(1 - (y - columns @ found).square().sum(0) / (y - y.mean(0)).square().sum(0))
        return torch.cat(every)

    atol = of_rounded_weights(oracle(name), shares)
    torch.testing.assert_close(torch.tensor(table["r2"].to_numpy()), shares(), rtol=0, atol=atol)

    def fitted(layer: int, scores: Tensor, mask: Tensor) -> Tensor:
        columns, found = least_squares(scores, mask)
        new = scores.clone()
        new[..., mask] = (columns @ found).T.reshape(*scores.shape[:2], -1)
        return new

    agree(model, name, substitute_additive(model), Change(scores=fitted))


@every_family
def test_two_axes(name: str, model: Any) -> None:
    """A function of query and distance plus one of query and key, from the table of all distances, in one layer."""
    layer = rotating(model)[-1]
    spec = read_model(model).specs([layer])[0]
    with written_out(oracle(name)) as seen:
        oracle(name)(TOKENS, use_cache=False)
    parts, _ = seen[layer]
    none, ones = torch.zeros_like(parts.theta, dtype=torch.bool), torch.ones(spec.n_heads, L, L).double()
    n = L if spec.window is None else min(L, spec.window)
    table = torch.stack([scores_of(parts, d * ones, parts.theta[None], none) for d in range(n)])
    near = (torch.arange(L)[:, None] - torch.arange(L)).clamp(0, n - 1)
    of_distance = table.mean(-1).permute(1, 2, 3, 0)  # [batch, head, query, distance]
    new = of_distance.gather(3, near.expand(*of_distance.shape[:2], -1, -1)) + table.mean(0)
    hooks = substitute_additive(model, axes="two", layers=[layer])
    agree(model, name, hooks, Change(scores=lambda x, s, mask: new if x == layer else s))


@every_family
def test_controlled_distance(name: str, model: Any) -> None:
    table = controlled_distance(model, TOKENS[:1], progress=False)
    with written_out(oracle(name)) as seen:
        oracle(name)(TOKENS[:1], use_cache=False)
    for layer in rotating(model):
        parts, _ = seen[layer]
        none = torch.zeros_like(parts.theta, dtype=torch.bool)
        at = [torch.full((8, L, L), d, dtype=torch.float64) for d in range(L)]
        every = [scores_of(parts, d, parts.theta[None], none) for d in at]
        variance = torch.stack(every)[:, 0].movedim(1, 0).flatten(1).var(1, correction=0)
        rows = table.query(f"layer == {layer}").sort_values("head")
        torch.testing.assert_close(torch.tensor(rows["total"].to_numpy()), variance, rtol=1e-4, atol=0)


def effect(name: str, change: Change) -> Any:
    """The change of the loss, with its tolerance."""

    def difference() -> Tensor:
        changed, before = (
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
            for logits in (plain(name, change), plain(name))
        )
        return changed - before

    # The losses are rounded before their difference is taken.
    return pytest.approx(difference().item(), abs=of_rounded_weights(oracle(name), difference) + rounding(LOSS))


@every_family
def test_effects_of_single_heads(name: str, model: Any) -> None:
    layers = rotating(model)[-1:]
    table = head_effects(
        model,
        TOKENS,
        {"3": dummy_distance(model, 3)},
        layers=layers,
        heads=[0, 3],
        draws=0,
        exact="all",
        progress=False,
    )

    for head in (0, 3):
        change = Change(lambda layer, d, h=head: only(dict.fromkeys(layers, h), 0 * d + 3, d, layer))
        row = table.query(f"head == {head}").iloc[0]
        assert row["exact"] == effect(name, change)


@with_latents
def test_slices_of_latent_attention(name: str, model: Any) -> None:
    agree(model, name, limit_frequencies(model, high=0), Change(dropped=lambda layer, x: torch.ones_like(x).bool()))
    agree(model, name, limit_frequencies(model, unrotated="drop"), Change(rest=0))
    both = limit_frequencies(model, high=0.3, unrotated="drop") + dummy_distance(model, 2)
    agree(model, name, both, Change(lambda layer, d: 0 * d + 2, dropped=lambda layer, x: x > 0.3, rest=0))


@with_latents
def test_heads_of_latent_attention(name: str, model: Any) -> None:
    """Results of heads, which TransformerLens splits by another size than that of values."""

    def without(layer: int, z: Tensor) -> Tensor:
        return z.index_fill(2, torch.tensor([1, 4]), 0) if layer == 1 else z

    agree(model, name, ablate_heads(model, [1, 4], layers=[1]), Change(z=without))
    table = head_ablation(model, TOKENS, layers=[1], progress=False)
    for head in (0, 5):
        change = Change(z=lambda layer, z, h=head: z.index_fill(2, torch.tensor([h]), 0) if layer == 1 else z)
        assert table.query(f"head == {head}")["effect"].item() == effect(name, change)


@without_scores
def test_a_pattern_at_the_hook_of_scores_is_refused_by_the_fit(name: str, model: Any) -> None:
    layer = read_model(model).specs()[0].layer
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
    with pytest.raises(ValueError, match=r"if that is what was passed, TransformerLens carries the pattern there"):
        fit_additive(cache["attn_scores", layer])
