"""Additive attention in the place of a head's own: by brute force, in the running model, on other texts; refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import zoo
from support.intervention_cases import TOKENS, L, close, fitted_layers, logits, mixed_of, put_in
from support.untouched import state
from torch import Tensor

from tl_posdisent import capture, fit_attention, read_model
from tl_posdisent.hooks import (
    applied,
    substitute_attention,
)
from tl_posdisent.hooks.hook_list import any_heads
from tl_posdisent.hooks.substitute_attention import fit_layers

pytestmark = pytest.mark.usefixtures("unchecked")


def attended(
    model: Any, layer: int = 0, hooks: Any = (), tokens: Tensor = TOKENS
) -> tuple[Any, Tensor, Tensor, Tensor]:
    """The layer, its scores, its pattern and its values for each query head."""
    spec = read_model(model).specs([layer])[0]
    names = [f"blocks.{layer}.attn.{x}" for x in ("hook_attn_scores", "hook_pattern", "hook_v")]
    with torch.no_grad(), applied(model, list(hooks)):
        cache = model.run_with_cache(tokens, names_filter=names)[1]
    scores, pattern, v = (cache[x].double() for x in names)
    if spec.taps.scores is None:  # the hook of that name carries something else
        scores = capture(model, tokens, layers=[layer])[0].scores.double()
    return spec, scores, pattern, v.repeat_interleave(spec.n_heads // v.shape[2], 2)


def by_fit(model: Any, rung: str, layer: int = 0, hooks: Any = ()) -> Tensor:
    """What heads gather by the pattern of a fit of each text, cell by cell outside the hooks."""
    spec, scores, pattern, v = attended(model, layer, hooks)
    inside = spec.mask(L)
    k = scores.new_zeros(2, L, 1, 0)
    if rung == "static":
        with model.hooks(fwd_hooks=list(hooks) if layer else []):  # at the first layer they leave keys as they are
            k = capture(model, TOKENS, layers=[layer], scores=False)[0].k
    if rung == "additive":
        put_in = fit_attention(scores, mask=inside).pattern()
    else:
        put_in = fit_attention(scores, mask=inside, keys=k, sinks=1, pool=False).pattern()
    to_keys = pattern.sum(-1, keepdim=True)  # less than 1 beside an attention sink
    return torch.einsum("bhqk,bkhd->bhqd", put_in * to_keys, v).float()


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_each_layer_is_fitted_in_the_model_that_is_already_replaced(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    for rung in ("static", "additive"):
        below = substitute_attention(model, rung, layers=[0])
        expected = by_fit(model, rung, 1, below)
        close(mixed_of(model, substitute_attention(model, rung), 1), expected)
        assert (expected - by_fit(model, rung, 1)).abs().max() > 1e-3


# --- fits made before -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2", "gptj", "gpt2"))
def test_static_heads_are_causal_on_another_text(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    other = zoo.random_tokens(L + 3)
    rungs = ("distance", "distance+sink") if name == "gpt2" else ("distance", "distance+sink", "static")
    for rung in rungs:
        fits = fitted_layers(model, other, rung)
        hooks = put_in(model, fits)
        changed = TOKENS.clone()
        changed[:, 7:] = changed[:, 7:].flip(0)
        a, b = logits(model, hooks), logits(model, hooks, changed)
        close(a[:, :7], b[:, :7], 1e-5)
        assert (a[:, 7:] - b[:, 7:]).abs().max() > 1e-2
        assert (a - logits(model, [])).abs().max() > 1e-2
        spec, _, pattern, v = attended(model)
        keys = capture(model, TOKENS, layers=[0])[0].k if rung == "static" else v.new_zeros(2, L, 1, 0)
        ours = fits[0].of.static_scores(keys, window=spec.window).softmax(-1)
        close(mixed_of(model, hooks), torch.einsum("bhqk,bkhd->bhqd", ours, v).float())
        assert pattern.shape == ours.shape


@pytest.mark.slow
def test_layers_are_fitted_in_turn(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    in_turn, at_once = (fitted_layers(model, TOKENS, replaced=x) for x in (True, False))
    assert list(in_turn) == [0, 1]
    chosen = any_heads(model, None, None)
    apart = fit_layers(model, list(TOKENS.split(1)), chosen, "static", in_turn=True)  # in a run for each layer
    for layer in (0, 1):
        close(apart[layer].of.distance, in_turn[layer].of.distance, 1e-5)
    plain = [capture(model, TOKENS, layers=[layer])[0] for layer in (0, 1)]
    for layer, seen in enumerate(plain):
        close(at_once[layer].of.distance, fit_attention(seen.scores, keys=seen.k).distance, 1e-6)
    close(in_turn[0].of.direction, at_once[0].of.direction, 1e-6)
    with applied(model, put_in(model, {0: in_turn[0]})):
        seen = capture(model, TOKENS, layers=[1])[0]
    close(in_turn[1].of.direction, fit_attention(seen.scores, keys=seen.k).direction, 1e-5)
    one = TOKENS[:1]  # a text's own static heads, made before or in the run
    close(
        logits(model, put_in(model, fitted_layers(model, one)), one),
        logits(model, substitute_attention(model, "static"), one),
    )
    some = fitted_layers(model, TOKENS, heads=[(0, 2), (1, 5)])
    with applied(model, put_in(model, {0: some[0]}, heads=[(0, 2)])):
        seen = capture(model, TOKENS, layers=[1])[0]
    key = seen.k[:, :, [seen.spec.key_head(5)]]
    close(some[1].of.distance, fit_attention(seen.scores[:, 5:6], keys=key).distance, 1e-5)


def test_texts_of_unequal_length_share_one_fit(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    mask = torch.ones(2, L, dtype=torch.long)
    mask[0, :4] = 0
    fit = fitted_layers(model, TOKENS, mask=mask)[0].of
    short, long = (capture(model, x, layers=[0])[0] for x in (TOKENS[:1, 4:], TOKENS[1:]))
    p = [x.scores.double().masked_fill(~x.spec.mask(x.scores.shape[-1]), -torch.inf).softmax(-1) for x in (short, long)]
    p = [(1 - 1e-3) * x + 1e-3 * x.new_ones(x.shape).tril() / torch.arange(1, x.shape[-1] + 1)[:, None] for x in p]
    q = [fit.static_scores(x.k.double()).softmax(-1) for x in (short, long)]
    for d in range(L):  # the total attention of every distance, of all texts
        wanted, got = (sum(x.diagonal(-d, -2, -1).sum((0, -1)) for x in y if d < x.shape[-1]) for y in (p, q))
        close(got, wanted, 1e-5)


# --- with others, and refusals --------------------------------------------------------------------------------


def test_refusals(shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    before = state(model)
    hooks = put_in(model, {0: fitted_layers(model, TOKENS[:, :8])[0]})
    with pytest.raises(ValueError, match=r"distances were fitted, 0 to 7, got .* 11"):
        logits(model, hooks)
    assert state(model) == before
