"""A layer's projections to queries and keys, and the check that all their weights are parameters."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.model_parts import modules, n_layers
from tl_posdisent.models.running.texts import probe_tokens
from tl_posdisent.utils.errors import ArgumentError

_NAMES = {"q": "queries", "k": "keys"}
_MATRICES = {"W_Q", "W_K"}
_OF_QK = ("W_Q", "W_K", "b_Q", "b_K")  # HookedTransformer's names; grouped keys have `_W_K`


def projections(model: Any, layer: int) -> list[tuple[str, Tensor]]:
    """Return names and parameters of a layer's projections to queries and keys."""
    attention = getattr(model.blocks[layer], "attn", None)
    if attention is None:  # a layer without attention has none
        return []
    own = [(name, x) for name, x in attention.named_parameters(recurse=False) if name.lstrip("_") in _OF_QK]
    parts = _parts(model, layer)
    found = own + [each for part in parts.values() for each in part.named_parameters()]
    has_keys = "k" in parts or any("k" in _parts(model, earlier) for earlier in range(layer))  # some layers share keys
    if not own and not ("q" in parts and has_keys):
        raise ValueError(
            f'weights="random_qk" needs a projection to queries and one to keys, which layer {layer} of '
            f'{type(model).__name__} does not have: use weights="random" or "shuffled"'
        )
    return found


def check_parameters(model: Any, weights: str, *, everywhere: bool) -> None:
    """Refuse a model of which a copy would keep trained projections, because their weights are no parameters.

    Examples are quantised weights, which are buffers or packed objects, and parametrizations. Projections to queries
    and keys must in addition return 0 where their parameters are 0: nothing else may take part in them.

    Args:
        everywhere: check all modules of the model, not only its projections to queries and keys.
    """
    sides: dict[str, torch.nn.Module] = {}
    for layer in range(n_layers(model)):
        attention, parts = getattr(model.blocks[layer], "attn", None), _parts(model, layer)
        here = {f"the projection to {_NAMES[side]} of layer {layer}": part for side, part in parts.items()}
        if isinstance(attention, torch.nn.Module) and _has_matrices_elsewhere(attention):
            _refuse(f"the attention of layer {layer}", attention, weights)
        for what, part in here.items():
            if any(map(_has_others, part.modules())) or not any(map(_is_matrix, part.parameters())):
                _refuse(what, part, weights)
        sides |= here
    for part in modules(model) if everywhere else ():
        if _has_others(part):
            _refuse("a module", part, weights)
    _check_zeros(model, sides, weights)


def _check_zeros(model: Any, sides: dict[str, torch.nn.Module], weights: str) -> None:
    """Refuse projections that do not return 0 where their parameters are 0, and queries that none of them makes."""
    if not sides:
        return
    with running(model, bare=True) as p, p.receiving([*sides.values()]) as inputs:
        p.run(probe_tokens(model)[:1])
        for what, part in sides.items():
            if part in inputs:
                zeros = {name: torch.zeros_like(x) for name, x in part.named_parameters()}
                with torch.no_grad():
                    unchanged = bool(torch.func.functional_call(part, zeros, (inputs[part],)).any())
            else:
                unchanged = _NAMES["q"] in what  # keys may be those of an earlier layer
            if unchanged:
                _refuse(what, part, weights)


def _has_matrices_elsewhere(attention: torch.nn.Module) -> bool:
    """Say whether ``W_Q`` or ``W_K`` of a HookedTransformer's attention is no floating point parameter of it."""
    own = {name.lstrip("_") for name in attention._parameters}
    others = {name.lstrip("_") for name in (*attention._buffers, *vars(attention))}
    return _has_others(attention) or bool(_MATRICES & others) or len(_MATRICES & own) == 1


def _has_others(part: torch.nn.Module) -> bool:
    """Say whether a module has weights that are no floating point parameters."""
    own = [x for x in part._parameters.values() if x is not None]
    fixed = part._non_persistent_buffers_set | {"W_pos"}  # tables, and random positions that are not trained
    stored = [x for name, x in part._buffers.items() if name not in fixed]
    tables = [x for x in stored if x is not None and x.ndim > 1 and x.dtype != torch.bool]
    linear = hasattr(part, "in_features")
    if is_parametrized(part) or not all(x.is_floating_point() and x.element_size() > 1 for x in own):
        return True
    if tables and (linear or not any(map(_is_matrix, own))):
        return True
    return linear and not any(map(_is_matrix, part.parameters()))


def _is_matrix(x: Tensor) -> bool:
    return x.ndim > 1


def _refuse(what: str, part: torch.nn.Module, weights: str) -> NoReturn:
    kind = type(getattr(part, "original_component", None) or part).__name__
    raise ArgumentError(
        "model",
        f"must keep its weights in floating point parameters for weights={weights!r}, which replaces these alone, and "
        f"{what} ({kind}) has others, which would stay the trained ones (quantised, in buffers, or parametrized): load "
        "the model without quantisation, or convert these weights to parameters",
    )


def _parts(model: Any, layer: int) -> dict[str, torch.nn.Module]:
    """Return a layer's projections to queries ("q") and keys ("k") that are modules of their own."""
    sides = ((side, getattr(getattr(model.blocks[layer], "attn", None), side, None)) for side in _NAMES)
    return {side: part for side, part in sides if isinstance(part, torch.nn.Module)}
