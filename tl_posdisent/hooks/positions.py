"""Position interventions on RoPE: other positions, one distance for all pairs, or any function of the distance.

Each function returns a plain list of ``(hook name, function)`` for ``model.hooks(fwd_hooks=...)``,
``model.run_with_hooks`` or ``applied``. Lists may be concatenated and nested in any order: at most one position
intervention acts on a head, and frequency limits, phase noise and interpolation compose with it
(``rotation_edits.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.hooks.planning.chosen_heads import Heads, Layers, rotary_heads
from tl_posdisent.hooks.planning.planner import hooks_for
from tl_posdisent.hooks.planning.rotation_edits import DistanceMap, Distances, Place, PositionMap
from tl_posdisent.models.reading.forward import Hook
from tl_posdisent.models.reading.model_reading import model_of
from tl_posdisent.utils.validation import check_number

Positions = Tensor | Sequence[float] | Callable[[Tensor], Tensor]
"""One for each slot of the batch, or a function of the tokens' own positions."""


def swap_positions(
    model: Any,
    positions: Positions,
    *,
    layers: Layers = None,
    heads: Heads = None,
) -> list[Hook]:
    """Replace the positions that RoPE receives.

    The score of query i and key j becomes what it would be at the distance ``positions[i] - positions[j]``.
    Only the rotation changes: the causal mask, and what each token is, stay. Giving 0, 1, 2 … or any constant more
    changes nothing; on models of Hugging Face the result is that of ``position_ids=positions``.

    Args:
        model: a model with rotary embeddings.
        positions: ``(pos,)`` or ``(batch, pos)``, any finite real numbers, one for each slot of the batch, padding
            included; or a function from a float64 tensor of the tokens' own positions (0 for a text's first token,
            whatever the padding before it) to one of the same shape, for texts of any length and for generation.
        layers: default all that rotate.
        heads: query heads, default all. A head that shares its keys with others gets its own view of them.

    Returns:
        ``[(hook name, function), ...]``.

    Raises:
        ValueError: a model or layer without rotary embeddings or without the hooks for it; positions of wrong rank
            or not finite; layers or heads out of range or repeated. While running: positions whose length is not that
            of the text, a second position intervention on the same head, a KV cache not filled under these hooks.

    Example:
        >>> import torch
        >>> from tl_posdisent import demo_tokens, load_demo_model, swap_positions
        >>> model, tokens = load_demo_model(), demo_tokens(length=48)
        >>> shifted = model.run_with_hooks(tokens, fwd_hooks=swap_positions(model, torch.arange(48) + 100))
        >>> bool(torch.allclose(shifted, model(tokens), atol=1e-3))  # only differences matter
        True
    """
    edit = positions_edit("swap_positions", positions)
    return hooks_for(rotary_heads(model, layers, heads, "swap_positions"), edit)


def positions_edit(tool: str, positions: Positions) -> PositionMap:
    """The edit that gives queries and keys these positions."""
    if callable(positions) and not isinstance(positions, Tensor):
        place = _mapped_positions(positions)
        return PositionMap(tool, place, place)
    given = real_tensor("positions", positions)
    if given.ndim not in (1, 2) or given.numel() == 0:
        raise ValueError(f"positions must have shape (pos,) or (batch, pos), got {tuple(given.shape)}")
    place = _fixed(given, "positions")
    return PositionMap(tool, place, place, slots=True)


def dummy_distance(model: Any, distance: int | float, *, layers: Layers = None, heads: Heads = None) -> list[Hook]:
    """Set the distance of every query and key to one number.

    What is left of a head's scores is content at that distance: ``scale · Σ_c Re(q_ic · conj(k_jc) · exp(i θ_c d))``
    for query i and key j, with the dummy distance d of arXiv 2503.13305.

    Args:
        model, layers, heads: as in ``swap_positions``.
        distance: query position minus key position, in positions; any finite real number, also a negative one.

    Returns:
        ``[(hook name, function), ...]``.

    Raises:
        ValueError: a distance that is not a finite number, or what ``swap_positions`` refuses.

    Example:
        >>> from tl_posdisent import demo_tokens, dummy_distance, fit_additive, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> with model.hooks(fwd_hooks=dummy_distance(model, 5, layers=[0])):
        ...     _, cache = model.run_with_cache(tokens, names_filter="blocks.0.attn.hook_attn_scores")
        >>> q, k = 40, slice(0, 41)  # the same token far and near now gets the same score
        >>> scores = cache["attn_scores", 0][0, :, q, k]
        >>> same = tokens[0, k] == tokens[0, k].mode().values
        >>> bool((scores[:, same].std(1) < scores.std(1)).all())
        True
    """
    check_number("distance", distance)

    def all_at(value: int | float) -> Place:
        return lambda own, texts: torch.full(own.shape[-1:], float(value), dtype=torch.float64, device=own.device)

    edit = PositionMap("dummy_distance", all_at(distance), all_at(0))
    return hooks_for(rotary_heads(model, layers, heads, "dummy_distance"), edit)


def remap_distance(
    model: Any,
    distances: Callable[[Tensor], Tensor] | Tensor,
    *,
    layers: Layers = None,
    heads: Heads = None,
) -> list[Hook]:
    """Replace distances by a function of the real distance, or by a matrix.

    The score of query i and key j becomes ``scale · Σ_c Re(q_ic · conj(k_jc) · exp(i θ_c D[i, j]))`` and what RoPE
    does not rotate. The mask does not change: a distance changes the rotation of a pair, not its visibility.
    A map that is a difference of positions (``D[i, j] = u[i] - w[j]``, such as halving every distance) is done by
    rotation; anything else (a ceiling, a matrix per head) by recomputing the scores in blocks of bounded memory.

    Args:
        distances: a function from a float64 tensor of real distances (query position minus key position) to one of
            the same shape, each distance by itself; or a matrix ``[query, key]``, ``[head, query, key]`` or
            ``[batch, head or 1, query, key]`` of finite numbers, of which only the cells inside the mask count.
        model, layers, heads: as in ``swap_positions``.

    Returns:
        ``[(hook name, function), ...]``.

    Raises:
        ValueError: neither function nor tensor of 2 to 4 axes; values that are not finite; or what
            ``swap_positions`` refuses. While running: a matrix that does not fit the text.

    Example:
        >>> import torch
        >>> from tl_posdisent import demo_tokens, load_demo_model, remap_distance
        >>> model, tokens = load_demo_model(), demo_tokens(length=48)
        >>> same = model.run_with_hooks(tokens, fwd_hooks=remap_distance(model, lambda d: d))
        >>> bool(torch.allclose(same, model(tokens), atol=1e-3))
        True
        >>> hooks = remap_distance(model, lambda d: d.clamp(max=16))  # nothing is further than 16
        >>> bool((model.run_with_hooks(tokens, fwd_hooks=hooks) - same).abs().max() > 0.01)
        True
    """
    chosen = rotary_heads(model, layers, heads, "remap_distance")
    causal = chosen[0][0].causal
    edit: PositionMap | DistanceMap
    if isinstance(distances, Tensor):
        matrix = real_tensor("distances", distances, finite=False)
        if matrix.ndim not in (2, 3, 4) or matrix.numel() == 0:
            raise ValueError(
                "distances must have shape (query, key), (head, query, key) or (batch, head, query, key), "
                f"got {tuple(matrix.shape)}"
            )
        edit = _split_matrix(matrix, causal) or DistanceMap("remap_distance", _constant(matrix), slots=True)
    elif callable(distances):
        context = max(getattr(model_of(model).cfg, "n_ctx", None) or 0, 2)
        edit = _split_function(context, distances, causal) or DistanceMap(
            "remap_distance", _toeplitz(distances, causal)
        )
    else:
        raise ValueError(f"distances must be a function or a tensor, got {type(distances).__name__}")
    return hooks_for(chosen, edit)


def _fixed(positions: Tensor, what: str) -> Place:
    def place(own: Tensor, texts: int) -> Tensor:
        given, length = positions.shape[-1], own.shape[-1]
        if given != length:
            more = ""
            if what == "positions":
                more = ": give a function of the position for texts of any length or with a KV cache"
            raise ValueError(f"{what} were given for {given} tokens, and the model runs on {length} (at once){more}")
        if positions.ndim == 2 and len(positions) not in (1, texts):
            raise ValueError(f"{what} were given for {len(positions)} texts, and the model runs on {texts}")
        return positions.to(own.device)

    return place


def _mapped_positions(function: Callable[[Tensor], Tensor]) -> Place:
    def place(own: Tensor, texts: int) -> Tensor:
        return _mapped(function, own.double(), "positions", "positions")

    return place


def _constant(matrix: Tensor) -> Distances:
    return lambda queries, keys, texts: matrix.to(keys.device)


def _toeplitz(function: Callable[[Tensor], Tensor], causal: bool) -> Distances:
    def distances(queries: Tensor, keys: Tensor, texts: int) -> Tensor:
        real = queries[..., :, None].long() - keys[..., None, :].long()
        low = 0 if causal else int(real.min())
        values = _mapped(function, torch.arange(low, max(int(real.max()), low + 1) + 1, device=keys.device).double())
        mapped = values[(real - low).clamp_min(0)]
        return mapped if mapped.ndim == 2 else mapped[:, None]  # the same for all heads of a text

    return distances


def _split_function(n: int, function: Callable[[Tensor], Tensor], causal: bool) -> PositionMap | None:
    """A straight line is a difference of positions; looked at over the whole context of the model."""
    values = _mapped(function, torch.arange(2).double())
    start, slope = values[0], values[1] - values[0]

    def straight(length: int) -> bool:
        real = torch.arange(0 if causal else 1 - length, length).double()
        return torch.allclose(_mapped(function, real), start + slope * real, rtol=1e-12, atol=1e-9)

    def line(shift: Tensor) -> Place:
        def place(own: Tensor, texts: int) -> Tensor:
            length = int(own.max()) + 1
            if not straight(length):  # beyond the context, or because it looks at more than one distance at a time
                raise ValueError(
                    f"distances is a straight line over {n} tokens, the model's context, and is not that line over "
                    f"this text of {length}: give a matrix"
                )
            return own.double() * slope.to(own.device) + shift.to(own.device)

        return place

    return PositionMap("remap_distance", line(start), line(torch.zeros_like(start))) if straight(n) else None


def _split_matrix(matrix: Tensor, causal: bool) -> PositionMap | None:
    """``u`` and ``w`` with ``matrix[i, j] = u[i] - w[j]`` on the cells that count, if there are any."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        return None
    u, w = matrix[:, 0], matrix[-1, 0] - matrix[-1]
    counts = torch.ones_like(matrix, dtype=torch.bool)
    counts = counts.tril() if causal else counts
    if not torch.allclose(matrix[counts], (u[:, None] - w)[counts], rtol=1e-12, atol=1e-9):
        return None
    return PositionMap("remap_distance", _fixed(u, "distances"), _fixed(w, "distances"), slots=True)


def _mapped(
    function: Callable[[Tensor], Tensor], real: Tensor, name: str = "distances", what: str = "real distances"
) -> Tensor:
    try:
        values = function(real.clone())
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} is called with a float64 tensor of {what} at once, and failed: {error}. Use tensor operations, "
            "such as d.clamp(max=16) for min(d, 16)"
        ) from error
    if not isinstance(values, Tensor) or values.shape != real.shape or not bool(values.double().isfinite().all()):
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"{name} must map a tensor of {what} to finite ones of the same shape "
            f"({tuple(real.shape)}), got {got if got != f'shape {tuple(real.shape)}' else 'values that are not finite'}"
        )
    return values.double()


def real_tensor(name: str, values: Any, *, finite: bool = True) -> Float[Tensor, "*shape"]:
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be real numbers, got {values!r}") from error
    if tensor.is_meta:
        raise ValueError(f"{name} must have values, got a meta tensor")
    if tensor.is_complex() or tensor.dtype == torch.bool or (finite and not bool(tensor.double().isfinite().all())):
        raise ValueError(f"{name} must be finite real numbers, got {tensor}")
    return tensor.detach().double()
