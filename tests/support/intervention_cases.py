"""Interventions, models for each way that they take, texts, and the same results by brute force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tl_posdisent import (
    ablate_heads,
    capture,
    dummy_distance,
    lambda_mask,
    limit_frequencies,
    position_interpolation,
    read_model,
    remap_distance,
    swap_positions,
)
from tl_posdisent.hooks import (
    applied,
    drop_component,
    patch_vectors,
    phase_noise,
    substitute_additive,
    substitute_attention,
)
from tl_posdisent.hooks.edits.edit import Edit
from tl_posdisent.hooks.edits.rotation_edits import DistanceMap
from tl_posdisent.hooks.hook_list import Hooks, any_heads, joined
from tl_posdisent.hooks.patch import check_components, score_hooks
from tl_posdisent.hooks.substitute import Stored, attended, fit_in_turn, stored_hooks
from tl_posdisent.models.reading.forward_pass import Hook
from tl_posdisent.models.texts import read_texts

from . import zoo
from .edited_scores import edited_results

L = 12
TOKENS = zoo.random_tokens(L)
REAL = torch.arange(L)
ROTARY = [case for case in zoo.cases(*zoo.ROTARY_NAMES) if case.values[1] != "deepseek_v3"]
# One of each way: tables exchanged, rotated vectors turned, unrotated ones turned, scores or z recomputed; with groups,
# norms between, windows, soft caps, sinks.
WAYS = [
    *zoo.cases("llama-gqa", "gptj", "gemma2"),
    *(("bridge", name) for name in ("neox", "codegen", "falcon", "olmo2-gqa", "gpt_oss")),
    ("hooked", "qwen3"),
]


def every_way(test: Any) -> Any:
    """Without the checks of annotations, which take longer than the models; other tests have them."""
    return pytest.mark.usefixtures("unchecked")(pytest.mark.parametrize(("kind", "name"), WAYS)(test))


FEW = zoo.cases("llama-gqa", "gptj", "gemma2")

UNORDERED = torch.tensor([[5, 0, 3, 3, 90, 11, 64, 2, 7, 30, 1, 8], [0, 9, 2, 41, 4, 77, 6, 5, 88, 13, 21, 3]])
FAR = torch.tensor([[0, 50_000, 3, 17, 49_999, 20_000, 1, 2, 33_333, 7, 5, 100]]).expand(2, L)
BROKEN = torch.tensor([0.5, 3.25, -1.75, 2.0, 11.5, 0.1, 9.9, 4.2, 6.6, -8.0, 30.3, 1.0])


def logits(model: Any, hooks: list[Hook], tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad(), applied(model, hooks):
        return model(tokens)


def distances(positions: Tensor) -> Tensor:
    return positions.double()[..., :, None] - positions.double()[..., None, :]


def close(got: Tensor, expected: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def mixed_of(model: Any, hooks: list[Hook], layer: int = 0) -> Tensor:
    """What every head takes along, ``[batch, head, pos, d_head]``: all that others see of its scores."""
    name = f"blocks.{layer}.attn.hook_z"
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        return model.run_with_cache(TOKENS, names_filter=name)[1][name].transpose(1, 2)


def edited(model: Any, edits: Sequence[Edit], layer: int = 0) -> Tensor:
    """The same under edits, by the oracle: from queries, keys and values of the model in float64."""
    captured = capture(model, TOKENS, layers=[layer])[0]
    name, attention = f"blocks.{layer}.attn.hook_v", model.blocks[layer].attn
    with torch.no_grad():
        values = model.run_with_cache(TOKENS, names_filter=name)[1][name]
    sinks = getattr(getattr(attention, "original_component", attention), "sinks", None)
    return edited_results(captured, values, edits, None if sinks is None else sinks.detach()).float()


def by_brute_force(model: Any, wanted: Tensor, layer: int = 0) -> Tensor:
    """The same at any distances ``[query, key]`` or ``[batch, head, query, key]``."""
    return edited(model, [DistanceMap("", wanted.expand(*wanted.shape[:-2], L, L))], layer)


INTERVENTIONS: dict[str, Callable[[Any], list[Hook]]] = {
    "swap": lambda model: swap_positions(model, UNORDERED),
    "swap some": lambda model: swap_positions(model, UNORDERED, heads=[1, 6]),
    "dummy": lambda model: dummy_distance(model, 5),
    "remap": lambda model: remap_distance(model, lambda d: d.clamp(max=2)),
}
EVERY_INTERVENTION = pytest.mark.parametrize("intervention", INTERVENTIONS.values(), ids=INTERVENTIONS)
# Each on a text of any length, whole, padded or against a cache.
TOOLS_FOR_ANY_LENGTH: dict[str, Callable[..., list[Hook]]] = {
    "swap": lambda m, **w: swap_positions(m, lambda p: (7 * p) % 5, **w),
    "dummy": lambda m, **w: dummy_distance(m, 5, **w),
    "remap": lambda m, **w: remap_distance(m, lambda d: d.clamp(max=2), **w),
    "interpolate": lambda m, **w: position_interpolation(m, 3, **w),
    "freeze": lambda m, **w: limit_frequencies(m, 0.05, mode="freeze", **w),
    "drop": lambda m, **w: limit_frequencies(m, 0.05, **w),
    "noise": lambda m, **w: phase_noise(m, 0.7, **w),
    "lambda": lambda m, **w: lambda_mask(m, 1, 4, 2, **w),
    "ablation": lambda m, **w: ablate_heads(m, w.get("heads") or [1, 2]),
}
NOISE = torch.randn(L, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _noise(model: Any, **where: Any) -> list[Hook]:
    return phase_noise(model, NOISE[:, : len(read_model(model).specs(0)[0].rotary.frequencies)], **where)


def patch_scores(model: Any, layer: int, scores: Tensor, moved: Any, heads: Any = None) -> Hooks:
    """Hooks that put components of another run's scores in, as ``component_patching`` does."""
    ((spec, chosen),) = any_heads(model, [layer], heads)
    return score_hooks(spec, chosen, scores, check_components(moved))


def fit_layers(
    model: Any, tokens: Tensor, rung: Any = "static", *, mask: Any = None, heads: Any = None, replaced: bool = True
) -> Stored:
    """A rung fitted to texts, layer after layer, as ``attention_ladder`` does for held-out text."""
    texts = [group.tokens for group in read_texts(model, tokens, mask).groups]
    chosen = any_heads(model, None, heads)
    seen = [] if replaced else [attended(model, each, chosen, joined([]), with_keys=True) for each in texts]
    return fit_in_turn(model, texts, chosen, rung, seen=seen)


def put_in(model: Any, fits: Stored, heads: Any = None) -> Hooks:
    """Hooks with these fits in the place of the heads' attention."""
    return stored_hooks(any_heads(model, list(fits), heads), fits)


def _of_another_text(model: Any, patch: str, heads: Any) -> list[Hook]:
    other = capture(model, TOKENS.flip(1), layers=[0])[0]
    if patch == "vectors":
        return patch_vectors(model, 0, other.q_rot, None, heads=heads)
    return patch_scores(model, 0, other.scores, "distance", heads=heads)


# Each on a text of this length, on heads of the first layer.
TOOLS: dict[str, Callable[..., list[Hook]]] = {
    **TOOLS_FOR_ANY_LENGTH,
    "swap": lambda m, **w: swap_positions(m, UNORDERED, **w),
    "noise": _noise,
    "vectors": lambda m, layers, heads: _of_another_text(m, "vectors", heads),
    "scores": lambda m, layers, heads: _of_another_text(m, "scores", heads),
    "three axes": lambda m, **w: substitute_additive(m, **w),
    "two axes": lambda m, **w: substitute_additive(m, axes="two", **w),
    "attention": lambda m, **w: substitute_attention(m, "distance+sink", **w),
    "component": lambda m, **w: drop_component(m, "key", **w),
    "ablation": lambda m, layers, heads: ablate_heads(m, heads, layers=layers),
}
