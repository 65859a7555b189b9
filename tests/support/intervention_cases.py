"""Hooks of calls, models for each way that they take, texts, and the same results by brute force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tl_posdisent import capture, hooks
from tl_posdisent.hooks.hook_list import Hooks, any_heads
from tl_posdisent.hooks.patch import score_hooks
from tl_posdisent.hooks.substitute_attention import Stored, fit_layers, stored_hooks
from tl_posdisent.models.running.forward_pass import Hook
from tl_posdisent.models.running.texts import read_texts

from . import zoo
from .edited_scores import Call, Layer, edited_results
from .tolerance import rounding

L = 12
TOKENS = zoo.random_tokens(L)
REAL = torch.arange(L)
# Models that show positions by tables, by rotated vectors or not at all, scores or none; with groups, norms between,
# windows, soft caps, sinks.
WAYS = zoo.cases("llama-gqa", "gptj", "gemma2", "olmo2", "gpt_oss")


def every_way(test: Any) -> Any:
    """Without the checks of annotations, which take longer than the models; other tests have them."""
    return pytest.mark.usefixtures("unchecked")(pytest.mark.parametrize(("kind", "name"), WAYS)(test))


FEW = zoo.cases("llama-gqa", "gptj", "gemma2")

UNORDERED = torch.tensor([[5, 0, 3, 3, 90, 11, 64, 2, 7, 30, 1, 8], [0, 9, 2, 41, 4, 77, 6, 5, 88, 13, 21, 3]])
FAR = torch.tensor([[0, 50_000, 3, 17, 49_999, 20_000, 1, 2, 33_333, 7, 5, 100]]).expand(2, L)
BROKEN = torch.tensor([0.5, 3.25, -1.75, 2.0, 11.5, 0.1, 9.9, 4.2, 6.6, -8.0, 30.3, 1.0])


def logits(model: Any, made: list[Hook], tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad(), hooks.applied(model, made):
        return model(tokens)


def distances(positions: Tensor) -> Tensor:
    return positions.double()[..., :, None] - positions.double()[..., None, :]


def close(got: Tensor, expected: Tensor, atol: float | None = None, *, layers: int = 2) -> None:
    """By default, up to the rounding of eight computations in turn in every layer.

    They are norm, queries and keys, rotation, scores, pattern, results, output, and MLP.
    """
    atol = rounding(expected, 8 * layers) if atol is None else atol
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def mixed_of(model: Any, made: list[Hook], layer: int = 0) -> Tensor:
    """What every head takes along, ``[batch, head, pos, d_head]``: all that others see of its scores."""
    name = f"blocks.{layer}.attn.hook_z"
    with torch.no_grad(), model.hooks(fwd_hooks=made):
        return model.run_with_cache(TOKENS, names_filter=name)[1][name].transpose(1, 2)


def read_layer(model: Any, tokens: Tensor = TOKENS, layer: int = 0) -> Layer:
    """What the oracle starts from: queries, keys and values of the model in this text, as it is."""
    captured = capture(model, tokens, layers=[layer])[0]
    name, attention = f"blocks.{layer}.attn.hook_v", model.blocks[layer].attn
    with torch.no_grad():
        values = model.run_with_cache(tokens, names_filter=name)[1][name]
    sinks = getattr(getattr(attention, "original_component", attention), "sinks", None)
    return Layer(captured.spec, captured.q, captured.k, values, None if sinks is None else sinks.detach())


def edited(model: Any, calls: Sequence[Call], layer: int = 0) -> Tensor:
    """What every head takes along under these calls, by the oracle."""
    return edited_results(read_layer(model, layer=layer), calls, lambda x: read_layer(model, x, layer)).float()


def hooks_of(model: Any, call: Call, layers: Sequence[int] | None = None) -> Hooks:
    """What the tool returns; tools that act on one layer take the first of them."""
    given: dict[str, Any] = {"heads": None if call.heads is None else list(call.heads), **call.arguments}
    if call.tool == "component_patching":
        return patch_scores(model, layers[0] if layers else 0, given["scores"], given["component"], given["heads"])
    if call.tool == "patch_vectors":
        return hooks.patch_vectors(model, layers[0] if layers else 0, **given)
    tool: Callable[..., Hooks] = getattr(hooks, call.tool)
    return tool(model, **given, layers=layers)


def by_brute_force(model: Any, wanted: Tensor, layer: int = 0) -> Tensor:
    """What every head takes along at any distances ``[query, key]`` or ``[batch, head, query, key]``."""
    return edited(model, [Call("remap_distance", distances=wanted)], layer)


def patch_scores(model: Any, layer: int, scores: Tensor, moved: Any, heads: Any = None) -> Hooks:
    """Hooks that put components of another run's scores in, as ``component_patching`` does."""
    ((spec, chosen),) = any_heads(model, [layer], heads)
    return score_hooks(spec, chosen, scores, [moved] if isinstance(moved, str) else moved)


def fitted_layers(
    model: Any, tokens: Tensor, rung: Any = "static", *, mask: Any = None, heads: Any = None, replaced: bool = True
) -> Stored:
    """A rung fitted to texts, layer after layer, as ``attention_ladder`` does for held-out text."""
    texts = [group.tokens for group in read_texts(model, tokens, mask).groups]
    chosen = any_heads(model, None, heads)
    return fit_layers(model, texts, chosen, rung, in_turn=replaced)


def put_in(model: Any, fits: Stored, heads: Any = None) -> Hooks:
    """Hooks with these fits in the place of the heads' attention."""
    return stored_hooks(any_heads(model, list(fits), heads), fits)
