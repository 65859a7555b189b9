"""All single edits, all pairs and random triples, each on heads of its own, against attention summed over pairs."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from support import zoo
from support.edited_scores import Call, edited_results, edited_scores
from support.intervention_cases import BROKEN, NOISE, TOKENS, UNORDERED, L, hooks_of, read_layer
from support.tolerance import rounding
from torch import Tensor

from tl_posdisent import capture, read_model
from tl_posdisent.hooks.hook_list import joined

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]

# Grouped keys, partial and interleaved rotation, soft caps with windows, sinks, latent attention, no scores.
MODELS = zoo.cases("llama-gqa", "gemma2", "gpt_oss", "deepseek_v3", "gptj")
LEAST = -1e3  # no score of these models is as low
TRIPLES = 34  # of each model


def every_call(model: Any) -> list[Call]:
    """One call of each tool and of its variants that a first layer takes."""
    spec = read_model(model).specs(0)[0]
    rotary = spec.require_rotary("edits")
    other, middle = capture(model, TOKENS.flip(1), layers=[0])[0], float(rotary.frequencies.abs().median())
    generator = torch.Generator().manual_seed(0)
    cells = torch.rand(L, L, generator=generator) < 0.3
    cells.fill_diagonal_(False)
    calls = [
        Call("swap_positions", positions=UNORDERED),
        Call("swap_positions", positions=BROKEN),
        Call("dummy_distance", distance=5),
        Call("remap_distance", distances=lambda d: d.clamp(max=2)),
        Call("remap_distance", distances=lambda d: (1 + d).log()),
        Call("remap_distance", distances=40 * torch.rand(spec.n_heads, L, L, generator=generator)),
        Call("position_interpolation", factor=3),
        Call("limit_frequencies", low=middle, mode="freeze"),
        Call("limit_frequencies", low=middle),
        Call("limit_frequencies", low=middle, mode="freeze", side="inside"),
        Call("phase_noise", noise=0.7),
        Call("phase_noise", noise=NOISE[:, : len(rotary.frequencies)]),
        Call("lambda_mask", sinks=1, window=4, distance_ceiling=2),
        Call("lambda_mask", sinks=2, window=5),
        Call("knock_out", queries=[3, 4, -1], keys=[0, 2]),
        Call("knock_out", cells=cells),
        Call("patch_vectors", q_rot=other.q_rot, k_rot=None),
        Call("patch_vectors", q_rot=None, k_rot=other.k_rot),
        Call("component_patching", scores=other.scores, component="distance"),
        Call("substitute_additive"),
        Call("substitute_attention", by="distance+sink"),
        Call("drop_component", component="key"),
    ]
    if rotary.dim < spec.d_head:
        calls += [Call("limit_frequencies", low=middle, mode=mode, unrotated="drop") for mode in ("freeze", "drop")]
    return calls


def observed(model: Any, hooks: Any, **more: Any) -> Tensor:
    """Scores, -inf where a key is hidden, or what heads gather if there are none: heads on the second axis."""
    spec = read_model(model).specs(0)[0]
    name = spec.taps.scores or spec.taps.z
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        x = model.run_with_cache(TOKENS, names_filter=name, **more)[1][name]
    if spec.taps.scores is None:
        return x.transpose(1, 2)
    return x.masked_fill(x < LEAST, -torch.inf)


def expected(model: Any, layer: Any, calls: list[Call]) -> Tensor:
    shows = read_model(model).specs(0)[0].taps.scores is not None
    return edited_scores(layer, calls) if shows else edited_results(layer, calls)


def check(model: Any, layer: Any, calls: list[Call], tolerance: float, refused: list[str], **more: Any) -> None:
    try:
        hooks = joined(hooks_of(model, call, [0]) for call in calls)
        got = observed(model, hooks, **more)
    except ValueError as error:
        refused.append(f"{calls}: {error}")
        return
    wanted = expected(model, layer, calls)
    assert torch.equal(got.isfinite(), wanted.isfinite()), calls
    error = (got.double() - wanted).masked_fill(~wanted.isfinite(), 0).abs().max()
    assert error <= tolerance, (calls, float(error), tolerance)


def size(layer: Any) -> float:
    """The largest score of a layer, and at least 1."""
    return float(edited_scores(layer, []).nan_to_num(neginf=0).abs().max().clamp_min(1))


def of_products(layer: Any) -> float:
    """The tolerance of scores in float32: a sum of n products errs by about √n roundings."""
    return rounding(size(layer), steps=layer.q.shape[-1] ** 0.5)


# Refused when lists are added, but for the last: a query may see no key beside what other lists hide.
REASONS = ("apply at most one position intervention", "are already rotated to positions", "would be lost")
REASONS += ("replace the", "is patched twice", "needs the real distances", "see none")


@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_single_edits_and_pairs(kind: str, name: str, shared_model: Any) -> None:
    """Also on one head each, so that heads that share keys have different edits."""
    model = shared_model(kind, name)
    layer, refused = read_layer(model), list[str]()
    tolerance, calls = of_products(layer), every_call(model)
    n_heads = layer.q.shape[2]
    for call in calls:
        for heads in (None, [0], [1, n_heads - 1]):
            check(model, layer, [call.on(heads)], tolerance, refused)
    assert not refused
    for n, (a, b) in enumerate(itertools.combinations(calls, 2)):
        a, b = (a, b) if n % 2 else (b, a)
        heads = [None, [1], [0, 1], None][n % 4], [None, [1, 2], None, [1]][n % 4]
        check(model, layer, [a.on(heads[0]), b.on(heads[1])], tolerance, refused)
    assert len(refused) < len(calls) ** 2 / 4
    assert all(any(reason in error for reason in REASONS) for error in refused), refused


@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_random_triples(kind: str, name: str, shared_model: Any) -> None:
    model, draw = shared_model(kind, name), random.Random(f"{kind} {name}")
    layer, refused = read_layer(model), list[str]()
    tolerance, calls = of_products(layer), every_call(model)
    n_heads = layer.q.shape[2]
    for _ in range(TRIPLES):
        chosen = draw.sample(calls, 3)
        heads = [draw.choice([None, draw.sample(range(n_heads), draw.randint(1, n_heads))]) for _ in chosen]
        check(model, layer, [call.on(x) for call, x in zip(chosen, heads, strict=True)], tolerance, refused)
    assert len(refused) < TRIPLES * 2 / 3
    assert all(any(reason in error for reason in REASONS) for error in refused), refused


@pytest.mark.parametrize("name", zoo.names("llama-gqa", "gptj"))
def test_in_bfloat16_within_the_rounding_of_the_models_own_scores(name: str) -> None:
    model, draw = zoo.as_bridge(zoo.hf_model(name).to(torch.bfloat16)), random.Random(0)
    layer, refused = read_layer(model), list[str]()
    tolerance, calls = 4 * torch.finfo(torch.bfloat16).eps * size(layer), every_call(model)
    calls = [call for call in calls if call.tool not in ("substitute_additive", "substitute_attention")]
    for call in calls:
        check(model, layer, [call], tolerance, refused)
    for _ in range(TRIPLES):
        check(model, layer, draw.sample(calls, 3), tolerance, refused)
    assert all(any(reason in error for reason in REASONS) for error in refused), refused


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e4])
def test_under_a_mask_that_knocks_keys_out(value: float, shared_model: Any) -> None:
    """Hidden cells stay hidden, whatever number hides them; the others are as without the mask."""
    model, draw = shared_model("bridge", "llama-gqa"), random.Random(1)
    hidden = torch.rand(L, L, generator=torch.Generator().manual_seed(3)) < 0.3
    hidden[:, :2] = False
    hidden.fill_diagonal_(False)
    seen = torch.ones(L, L, dtype=torch.bool).tril() & ~hidden
    mask = torch.zeros(2, 1, L, L).masked_fill(~seen, value)
    layer, refused = dataclasses.replace(read_layer(model), hidden=hidden), list[str]()
    calls = [call for call in every_call(model) if not call.tool.startswith(("substitute", "drop", "component"))]
    for chosen in [*([call] for call in calls), *(draw.sample(calls, 2) for _ in range(TRIPLES))]:
        check(model, layer, chosen, of_products(layer), refused, attention_mask=mask)
    assert len(refused) < TRIPLES / 3
    assert all(any(reason in error for reason in REASONS) for error in refused), refused
