"""Patch rotated queries and keys, or components of the scores, from one run of a model into another."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Literal, get_args

from jaxtyping import Float
from torch import Tensor

from tl_posdisent.hooks.edit import NewScores, View
from tl_posdisent.hooks.hook_list import Heads, Hooks, any_heads, hooks_for
from tl_posdisent.hooks.score_components import split_scores
from tl_posdisent.models.reading.spec import AttentionSpec, masked_below
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_choice

Keys = Literal["group", "head"]
MovedComponent = Literal["mean", "distance", "query", "key", "residual"]
_ALL: tuple[MovedComponent, ...] = get_args(MovedComponent)


def patch_vectors(
    model: Any,
    layer: int,
    q_rot: Float[Tensor, "batch pos head d_head"] | None,
    k_rot: Float[Tensor, "batch pos kv d_head"] | None,
    *,
    heads: Heads = None,
    keys: Keys = "group",
) -> Hooks:
    """Replace the rotated queries, the rotated keys, or both, of a layer's heads by those of another run.

    Combined with other interventions: positions, interpolation, frozen frequencies and phase noise act only on the side
    that is not patched. Distances (``dummy_distance``, ``remap_distance``, a ceiling of ``lambda_mask``) are refused on
    the same head, because they give the other side no position. Subspaces that ``limit_frequencies`` drops contribute
    nothing to the scores, patched or not.

    Args:
        model: a model with rotary embeddings.
        layer: 0 … n_layers - 1.
        q_rot: ``[batch, pos, head, d_head]``, queries of all heads as ``capture`` returns them; None keeps the run's.
        k_rot: ``[batch, pos, kv, d_head]``, keys of all key heads, likewise.
        heads: query heads to patch, default all.
        keys: which heads receive the patched keys if several share them. ``"group"``: all heads that read the key head,
            including those not in ``heads``. ``"head"``: only the patched heads, whose scores are recomputed.

    Raises:
        ValueError: neither queries nor keys given; vectors of wrong shape or not finite; an unknown ``keys``; what
            ``swap_positions`` refuses. While running: a text of another shape.

    Example:
        >>> import torch
        >>> from tl_posdisent import capture, demo_tokens, load_demo_model, swap_positions
        >>> from tl_posdisent.hooks import patch_vectors
        >>> model, tokens = load_demo_model(), demo_tokens(length=48)
        >>> clean = capture(model, tokens, layers=[0], scores=False)[0]
        >>> swapped = swap_positions(model, torch.arange(48).flip(0), layers=[0])
        >>> hooks = swapped + patch_vectors(model, 0, clean.q_rot, clean.k_rot)
        >>> bool((model.run_with_hooks(tokens, fwd_hooks=hooks) - model(tokens)).abs().max() < 1e-4)
        True
    """
    ((spec, chosen),) = any_heads(model, [layer], heads, "patch_vectors")
    check_choice("keys", keys, get_args(Keys))
    if q_rot is None and k_rot is None:
        raise ValueError("q_rot or k_rot must be given, got neither")
    for name, x, n in (("q_rot", q_rot, spec.n_heads), ("k_rot", k_rot, spec.n_kv_heads)):
        if x is not None and (not isinstance(x, Tensor) or x.ndim != 4 or x.shape[2:] != (n, spec.d_head)):
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError(name, f"must have shape (batch, pos, {n}, {spec.d_head}), got {got}")
        if x is not None and not x.is_floating_point():
            raise ArgumentError(name, f"must be floating point, got {x.dtype}")
        if x is not None and not bool(x.isfinite().all()):
            raise ArgumentError(name, f"must be finite, got {int((~x.isfinite()).sum())} values that are not")
    q_own, k_own = (None if x is None else x.clone() for x in (q_rot, k_rot))  # the caller may reuse the tensors
    return vector_hooks(spec, chosen, q_own, k_own, keys)


def vector_hooks(
    spec: AttentionSpec, heads: Sequence[int], q_rot: Tensor | None, k_rot: Tensor | None, keys: Keys
) -> Hooks:
    """Return the hooks of ``patch_vectors`` for a layer already read and arguments already checked."""
    groups = {spec.key_head(h) for h in heads}
    sharing = heads if keys == "head" else [h for h in range(spec.n_heads) if spec.key_head(h) in groups]
    hooks = Hooks()
    if q_rot is not None:
        hooks += hooks_for([(spec, heads)], "patch_vectors(q_rot)", q_rot=q_rot)
    if k_rot is not None:
        hooks += hooks_for([(spec, sharing)], "patch_vectors(k_rot)", k_rot=k_rot)
    return hooks


def score_hooks(spec: AttentionSpec, heads: Sequence[int], source: Tensor, moved: Collection[MovedComponent]) -> Hooks:
    """Return hooks that replace these components of the heads' scores by those of another run.

    Its scores ``source``, ``[batch, head, query, key]``, are those of all heads. Both are split as in
    ``drop_component``, the run's own within the pass.
    """
    move = partial(_moved, source=source, moved=tuple(moved))
    return hooks_for([(spec, heads)], f"component_patching({', '.join(moved)})", scores=NewScores(move))


def _moved(view: View, source: Tensor, moved: Collection[MovedComponent]) -> Tensor:
    own, theirs = view.scores, source[:, list(view.heads)].to(view.inside.device)
    if theirs.shape != own.shape:
        raise ArgumentError(
            "scores", f"must have the shape of the run's own, {tuple(own.shape)}, got {tuple(theirs.shape)}"
        )
    if not bool((theirs.isfinite() & (theirs > masked_below(theirs.dtype)) | ~view.inside).all()):
        raise ValueError(
            f"scores of layer {view.spec.layer} must be finite inside the mask of the run: they are of a text with "
            "another mask or padding, or hold NaN or infinity"
        )
    if set(moved) == set(_ALL):
        return theirs
    before, after = split_scores(own, view.inside), split_scores(theirs, view.inside)
    return sum((after[name] - before[name] for name in moved), own.double())
