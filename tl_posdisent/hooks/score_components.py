"""The parts of a head's scores, taken apart inside the forward pass: what is distance, what query, key and the rest.

A part is a component of the three-axis fit of the scores that are there (``additive/fit.py``), of each text and head
by itself. The mean score is a part of its own, which no tool here removes: a softmax does not see it, an attention
sink does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tl_posdisent.additive.fit import fit_additive
from tl_posdisent.additive.result import AdditiveFit, Component
from tl_posdisent.models.forward import Hook
from tl_posdisent.models.spec import read_layers, select

from .score_edits import View, edit_scores

Part = Literal["distance", "query", "key", "residual"]
_FITTED: tuple[Component, ...] = get_args(Component)


def split_scores(
    scores: Float[Tensor, "batch head query key"], inside: Bool[Tensor, "*lead query key"]
) -> dict[str, Float64[Tensor, "batch head query key"]]:
    """The scores as a sum of ``"mean"``, ``"distance"``, ``"query"``, ``"key"`` and ``"residual"``.

    Args:
        scores: as a ``View`` has them, in any dtype; cells outside the mask may hold anything.
        inside: as a ``View`` has it: what counts, shared or for each text and head. Rows without a cell are allowed.

    Returns:
        Five tensors in the shape of the scores, 0 outside the mask, that add up to the scores inside it to the
        rounding of float64. Gradients flow through the residual alone: the fit counts as constant.

    Raises:
        ValueError: a text of which nothing is inside the mask; scores inside it that are not finite.
    """
    fit = fit_inside(scores, inside)
    mean = torch.where(inside, fit.intercept[..., None, None], 0.0)
    fitted: dict[str, Tensor] = {name: fit.component(name) for name in _FITTED}
    residual = torch.where(inside, scores.double() - mean - sum(fitted.values()), 0.0)
    return {"mean": mean, **fitted, "residual": residual}


def keep_parts(
    scores: Float[Tensor, "batch head query key"], inside: Bool[Tensor, "*lead query key"], keep: Collection[Part]
) -> Float[Tensor, "batch head query key"]:
    """The mean and these parts of the scores, as ``split_scores`` has them; only those are laid out.

    Everything kept is the scores themselves, to the last bit. What is returned outside the mask has no meaning.
    """
    if len(keep) == len(get_args(Part)):
        return scores
    fit = fit_inside(scores, inside)
    if "residual" in keep:
        return sum((-fit.component(name) for name in _FITTED if name not in keep), scores.double())
    if len(keep) == len(_FITTED):
        return fit.fitted()
    mean = fit.intercept[..., None, None].expand(scores.shape)
    return sum((fit.component(name) for name in _FITTED if name in keep), mean)


def fit_inside(scores: Float[Tensor, "batch head query key"], inside: Bool[Tensor, "*lead query key"]) -> AdditiveFit:
    """``fit_additive`` with the mask that a forward pass has."""
    return fit_additive(scores, mask=_as_few_as_there_are(inside))


def _as_few_as_there_are(inside: Tensor) -> Tensor:
    """One mask instead of many equal ones: heads share theirs, and without padding texts do."""
    for axis in range(inside.ndim - 2):
        first = inside.narrow(axis, 0, 1)
        if inside.shape[axis] > 1 and bool((inside == first).all()):
            inside = first
    return inside


def drop_component(
    model: Any, component: Part, *, layers: Iterable[int] | None = None, heads: Iterable[int] | None = None
) -> list[Hook]:
    """Hooks under which heads attend by their scores less one part of these.

    In each forward pass the scores of each text and head are fitted by ``mean + distance[i - j] + query[i] + key[j]``
    (the three-axis model of arXiv 2503.13305, with the gauge of ``AdditiveFit``), and one component, or what the fit
    leaves, is subtracted. Rotary embeddings are not needed.

    A softmax over keys ignores what depends on the query alone: dropping ``"query"`` changes nothing, except in
    models in which a score competes with an attention sink (GPT-OSS). The straight line that could belong to any of
    the three components belongs to the distance. Scores are those that the model shows, after a soft cap.

    Args:
        model: HookedTransformer, TransformerBridge or alike.
        component: ``"distance"``, ``"query"``, ``"key"`` or ``"residual"``.
        layers: default all.
        heads: query heads, default all.

    Returns:
        ``[(hook name, function), ...]``. Gradients flow through the scores, with the fit as a constant.

    Raises:
        ValueError: an unknown component; layers or heads out of range or repeated; a layer whose scores cannot be
            changed. While running: texts in parts (a key/value cache), a text that is nothing but padding, scores
            that are not finite.

    Example:
        >>> from tl_posdisent import demo_tokens, drop_component, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> plain = model(tokens, return_type="loss").item()
        >>> for part in ("query", "distance"):
        ...     loss = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=drop_component(model, part)).item()
        ...     print(part, abs(round(loss - plain, 3)) > 0.01)
        query False
        distance True
    """
    if component not in get_args(Part):
        raise ValueError(f"component must be one of {', '.join(get_args(Part))}, got {component!r}")
    kept = [part for part in get_args(Part) if part != component]

    def drop(view: View) -> Tensor:
        return keep_parts(view.scores(), view.inside, kept)

    return part_hooks(model, drop, layers, heads)


def part_hooks(model: Any, edit: Any, layers: Iterable[int] | None, heads: Iterable[int] | None) -> list[Hook]:
    """Hooks that put ``edit`` of the scores in their place, for these heads of each of the layers."""
    specs = read_layers(model, layers)
    chosen = select("heads", heads, specs[0].n_heads)
    return [hook for spec in specs for hook in edit_scores(spec, chosen, edit, scores=True)]
