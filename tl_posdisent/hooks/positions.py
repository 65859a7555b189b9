"""Lies about position: hooks that let RoPE see other positions or distances than the real ones.

Each function returns a plain list of ``(hook name, function)`` for ``model.hooks(fwd_hooks=...)``,
``model.run_with_hooks`` or ``applied``. Lists may be concatenated as long as no head of a layer is lied to twice. How
it is done, and under which conditions, is in ``lies.py``: by rotation wherever the distances are differences of
positions, otherwise by recomputing scores (``pairs.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.additive.cells import cell_distances
from tl_posdisent.models.forward import Hook
from tl_posdisent.models.reading import read_rotary_layers
from tl_posdisent.models.spec import select

from .pairwise_scores import Distances, pair_hooks
from .rotation_edits import Lie, Place, lie_hooks


def swap_positions(
    model: Any,
    positions: Tensor | Sequence[float],
    *,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
) -> list[Hook]:
    """Hooks under which RoPE sees these positions instead of 0, 1, 2 ….

    The score of query i and key j becomes what it would be at the distance ``positions[i] - positions[j]``.
    Only the rotation changes: the causal mask, and what each token is, stay. Giving 0, 1, 2 … or any constant more
    changes nothing; on models of Hugging Face the result is that of ``position_ids=positions``.

    Args:
        model: a model with rotary embeddings.
        positions: ``(pos,)`` for all texts or ``(batch, pos)``; any finite real numbers.
        layers: default all that rotate.
        heads: query heads, default all. A head that shares its keys with others gets its own view of them.

    Returns:
        ``[(hook name, function), ...]``.

    Raises:
        ValueError: a model or layer without rotary embeddings or without the hooks for it; positions of wrong rank
            or not finite; layers or heads out of range or repeated. While running: positions whose length is not that
            of the text.

    Example:
        >>> import torch
        >>> from tl_posdisent import demo_tokens, load_demo_model, swap_positions
        >>> model, tokens = load_demo_model(), demo_tokens(length=48)
        >>> shifted = model.run_with_hooks(tokens, fwd_hooks=swap_positions(model, torch.arange(48) + 100))
        >>> bool(torch.allclose(shifted, model(tokens), atol=1e-3))  # only differences matter
        True
    """
    given = real_tensor("positions", positions)
    if given.ndim not in (1, 2) or given.numel() == 0:
        raise ValueError(f"positions must have shape (pos,) or (batch, pos), got {tuple(given.shape)}")

    place = _fixed(given, "positions")
    texts = len(given) if given.ndim == 2 else 1
    return lie_hooks(read_rotary_layers(model, layers, "swap_positions"), Lie(place, place, texts), heads)


def dummy_distance(
    model: Any, distance: int | float, *, layers: Iterable[int] | None = None, heads: Iterable[int] | None = None
) -> list[Hook]:
    """Hooks under which every query sees every key at one and the same distance.

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
    if isinstance(distance, bool) or not isinstance(distance, (int, float)) or distance - distance != 0:
        raise ValueError(f"distance must be a finite number, got {distance!r}")

    def all_at(value: int | float) -> Place:
        return lambda length, device: torch.full((length,), float(value), dtype=torch.float64, device=device)

    lie = Lie(all_at(distance), all_at(0))
    return lie_hooks(read_rotary_layers(model, layers, "dummy_distance"), lie, heads)


def remap_distance(
    model: Any,
    distances: Callable[[Tensor], Tensor] | Tensor,
    *,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
) -> list[Hook]:
    """Hooks under which RoPE sees any function of the real distance, or any matrix of distances.

    The score of query i and key j becomes ``scale · Σ_c Re(q_ic · conj(k_jc) · exp(i θ_c D[i, j]))`` and what RoPE
    does not rotate. The mask stays as it is: a distance says how RoPE sees a pair, not whether it is seen.
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
    specs = read_rotary_layers(model, layers, "remap_distance")
    if isinstance(distances, Tensor):
        matrix = real_tensor("distances", distances, finite=False)
        if matrix.ndim not in (2, 3, 4) or matrix.numel() == 0:
            raise ValueError(
                "distances must have shape (query, key), (head, query, key) or (batch, head, query, key), "
                f"got {tuple(matrix.shape)}"
            )
        lie, pairs = _split_matrix(matrix, specs[0].causal), _constant(matrix)
    elif callable(distances):
        lie, pairs = _split_function(model, distances, specs[0].causal), _toeplitz(distances, specs[0].causal)
    else:
        raise ValueError(f"distances must be a function or a tensor, got {type(distances).__name__}")
    if lie is not None:
        return lie_hooks(specs, lie, heads)
    chosen = select("heads", heads, specs[0].n_heads)
    return [hook for spec in specs for hook in pair_hooks(spec, chosen, pairs)]


def _fixed(positions: Tensor, what: str) -> Place:
    def place(length: int, device: torch.device) -> Tensor:
        if positions.shape[-1] != length:
            given = positions.shape[-1]
            raise ValueError(f"{what} were given for {given} tokens, and the model runs on {length} (at once)")
        return positions.to(device)

    return place


def _constant(matrix: Tensor) -> Distances:
    return lambda length, device: matrix.to(device)


def _toeplitz(function: Callable[[Tensor], Tensor], causal: bool) -> Distances:
    def distances(length: int, device: torch.device) -> Tensor:
        low = 0 if causal else 1 - length
        values = _mapped(function, torch.arange(low, length, device=device).double())
        return values[(cell_distances(length, length, device) - low).clamp_min(0)]

    return distances


def _split_function(model: Any, function: Callable[[Tensor], Tensor], causal: bool) -> Lie | None:
    """A straight line is a difference of positions; looked at over the whole context of the model."""
    n = max(getattr(model.cfg, "n_ctx", None) or 0, 2)
    values = _mapped(function, torch.arange(2).double())
    start, slope = values[0], values[1] - values[0]

    def straight(length: int) -> bool:
        real = torch.arange(0 if causal else 1 - length, length).double()
        return torch.allclose(_mapped(function, real), start + slope * real, rtol=1e-12, atol=1e-9)

    def line(shift: Tensor) -> Place:
        def place(length: int, device: torch.device) -> Tensor:
            if not straight(length):  # beyond the context, or because it looks at more than one distance at a time
                raise ValueError(
                    f"distances is a straight line over {n} tokens, the model's context, and is not that line over "
                    f"this text of {length}: give a matrix"
                )
            return (torch.arange(length).double() * slope + shift).to(device)

        return place

    return Lie(line(start), line(torch.zeros_like(start))) if straight(n) else None


def _split_matrix(matrix: Tensor, causal: bool) -> Lie | None:
    """``u`` and ``w`` with ``matrix[i, j] = u[i] - w[j]`` on the cells that count, if there are any."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        return None
    u, w = matrix[:, 0], matrix[-1, 0] - matrix[-1]
    counts = torch.ones_like(matrix, dtype=torch.bool)
    counts = counts.tril() if causal else counts
    if not torch.allclose(matrix[counts], (u[:, None] - w)[counts], rtol=1e-12, atol=1e-9):
        return None
    return Lie(_fixed(u, "distances"), _fixed(w, "distances"))


def _mapped(function: Callable[[Tensor], Tensor], real: Tensor) -> Tensor:
    values = function(real.clone())
    if not isinstance(values, Tensor) or values.shape != real.shape or not bool(values.double().isfinite().all()):
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            "distances must map a tensor of real distances to finite ones of the same shape "
            f"({tuple(real.shape)}), got {got if got != f'shape {tuple(real.shape)}' else 'values that are not finite'}"
        )
    return values.double()


def real_tensor(name: str, values: Any, *, finite: bool = True) -> Float[Tensor, "*shape"]:
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be real numbers, got {values!r}") from error
    if tensor.is_complex() or tensor.dtype == torch.bool or (finite and not bool(tensor.double().isfinite().all())):
        raise ValueError(f"{name} must be finite real numbers, got {tensor}")
    return tensor.detach().double()
