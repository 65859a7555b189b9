"""Additive scores put in the place of the real ones: does the model need what the fits leave out?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.hooks.ablate import check_reach, replace_heads
from tl_posdisent.hooks.applied import applied
from tl_posdisent.hooks.planner import replace_scores
from tl_posdisent.hooks.score_components import Part, fit_inside, keep_two_axis
from tl_posdisent.hooks.score_edits import View
from tl_posdisent.hooks.substitute import ADDITIVE, PARTS, Axes, additive_specs, keep_parts_hooks
from tl_posdisent.models.capture import Captured, stream
from tl_posdisent.models.forward import Hook, check_seed, check_tokens, evaluating
from tl_posdisent.models.spec import AttentionSpec


def additive_substitution(
    model: Any,
    tokens: Int[Tensor, "batch pos"] | str,
    *,
    axes: Axes = "three",
    layers: Iterable[int] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """What does a model lose when its attention is additive? Head by head, layer by layer, and all at once.

    The scores of heads are replaced by their additive fit (``substitute_additive``) and the next token is predicted.
    Beside it stand two controls on the same heads: nothing at all (their output is 0), and the fit of a *shuffled*
    text, the same tokens in another order, of which the first stays where it is (it often marks the beginning and takes
    much attention). What the shuffled fit does as well owes nothing to which token stands where. One forward pass for
    each row, and one of the shuffled text.

    Args:
        model: HookedTransformer, TransformerBridge or alike, with its own hooks if it has any.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer.
        axes: the additive model, ``"three"`` or ``"two"`` (see ``substitute_additive``).
        layers: default all (all that rotate, for two axes).
        seed: of the order of the shuffled text.
        progress: show a bar.

    Returns:
        One row for each run: ``scope``, what was replaced: ``"head"``, ``"layer"`` (all its heads) or ``"all"`` (of
        the layers asked for); ``layer`` and ``head`` where one is meant; ``put_in``: ``"fit"``, ``"shuffled fit"`` or
        ``"zero"`` (the heads' output); ``keep``, the parts that were kept, joined by ``+``, ``"mean"`` if none and
        empty for ``"zero"``; ``loss``, nats per predicted token; ``change``, loss less that of the untouched model;
        ``kl``, mean over positions of the divergence KL(untouched ‖ this) of the predictions, nats per token. Scope
        ``"all"`` has a row for each subset of the four parts.

    Raises:
        ValueError: unusable tokens, layers, axes or seed; what ``substitute_additive`` refuses; a layer whose
            heads cannot be ablated (``ablate_heads``). RuntimeError: hooks that never fired.

    Example:
        >>> from tl_posdisent import additive_substitution, demo_tokens, load_demo_model
        >>> table = additive_substitution(load_demo_model(), demo_tokens(length=64), layers=[3, 4], progress=False)
        >>> full = table[(table["scope"] == "all") & (table["keep"] != "mean")]
        >>> full = full.set_index(["put_in", "keep"])["change"]
        >>> bool(full["fit", "distance+query+key"] < full["zero", ""])
        True
    """
    specs = additive_specs(model, axes, layers, "additive_substitution")
    tokens = check_tokens(model, tokens)
    shuffled = tokens.gather(1, _shuffled_order(tokens, seed))
    check_reach(model, [spec.layer for spec in specs])
    stored = _fits_of(model, shuffled, specs, axes)
    clean = _log_probabilities(model, tokens, [])
    clean_loss = _loss(clean, tokens)
    rows = []
    for run in tqdm(list(_runs(specs, axes, stored)), desc="runs", disable=not progress):
        hooks = [hook for spec, heads in run.where for hook in run.put(spec, heads)]
        log_p = _log_probabilities(model, tokens, hooks)
        loss = _loss(log_p, tokens)
        rows.append((*run[:5], loss, loss - clean_loss, _divergence(clean, log_p)))
    columns = ["scope", "layer", "head", "put_in", "keep", "loss", "change", "kl"]
    return pd.DataFrame(rows, columns=columns).astype({"layer": "Int64", "head": "Int64"})


Put = Callable[[AttentionSpec, Sequence[int]], list[Hook]]
"""From a layer and some of its heads to hooks that put something in their place."""


class _Run(NamedTuple):
    """One row of the table without its figures, and how to get them."""

    scope: str
    layer: int | None
    head: int | None
    put_in: str
    keep: str
    where: list[tuple[AttentionSpec, list[int]]]
    put: Put


def _runs(specs: Sequence[AttentionSpec], axes: Axes, stored: dict[int, Captured | AdditiveFit]) -> Iterator[_Run]:
    """Every head, every layer, all layers; then the other subsets of the parts in all layers."""

    def fit(keep: Collection[Part]) -> Put:
        return lambda spec, heads: keep_parts_hooks(spec, heads, keep, axes)

    def shuffled_fit(spec: AttentionSpec, heads: Sequence[int]) -> list[Hook]:
        return _stored_fit(spec, heads, stored[spec.layer])

    whole = [(spec, list(range(spec.n_heads))) for spec in specs]
    scopes: list[tuple[str, int | None, int | None, list[tuple[AttentionSpec, list[int]]]]] = [
        *(("head", spec.layer, head, [(spec, [head])]) for spec, heads in whole for head in heads),
        *(("layer", spec.layer, None, [(spec, heads)]) for spec, heads in whole),
        ("all", None, None, whole),
    ]
    additive = "+".join(ADDITIVE)
    for scope, layer, head, where in scopes:
        yield _Run(scope, layer, head, "fit", additive, where, fit(ADDITIVE))
        yield _Run(scope, layer, head, "shuffled fit", additive, where, shuffled_fit)
        yield _Run(scope, layer, head, "zero", "", where, _zero)
    subsets = [keep for n in range(len(PARTS) + 1) for keep in combinations(PARTS, n) if keep != ADDITIVE]
    for keep in subsets:
        yield _Run("all", None, None, "fit", "+".join(keep) or "mean", whole, fit(keep))


def _stored_fit(spec: AttentionSpec, heads: Sequence[int], stored: Captured | AdditiveFit) -> list[Hook]:
    """The fit of another run's scores."""
    if isinstance(stored, AdditiveFit):
        fields = {name: x for name, x in vars(stored).items() if isinstance(x, Tensor) and name != "distances"}
        some: Any = {name: x[:, list(heads)] for name, x in fields.items()}
        return replace_scores(spec, heads, lambda view: replace(stored, **some).fitted(), "additive_substitution")
    assert stored.q is not None
    assert stored.k is not None
    q, k = stored.q, spec.per_query_head(stored.k)

    def fit(view: View) -> Tensor:
        some = list(view.heads)
        return keep_two_axis(spec, q[:, :, some], k[:, :, some], view.inside, ADDITIVE)

    return replace_scores(spec, heads, fit, "additive_substitution")


def _zero(spec: AttentionSpec, heads: Sequence[int]) -> list[Hook]:
    return [replace_heads(spec.layer, heads, lambda layer, heads, z: torch.zeros_like(z))]


def _fits_of(
    model: Any, tokens: Int[Tensor, "batch pos"], specs: list[AttentionSpec], axes: Axes
) -> dict[int, Captured | AdditiveFit]:
    """What the fits of each layer's scores are made of, in one forward pass: O(length) for each head."""
    two = axes == "two"
    stored: dict[int, Captured | AdditiveFit] = {}
    with closing(stream(model, tokens, specs, scores=not two, vectors=two)) as run:
        for layer in run:
            if two:
                stored[layer.layer] = layer
            else:
                assert layer.scores is not None
                stored[layer.layer] = fit_inside(layer.scores, layer.spec.mask(tokens.shape[1], layer.scores.device))
    return stored


def _shuffled_order(tokens: Int[Tensor, "batch pos"], seed: int) -> Int[Tensor, "batch pos"]:
    """The first token, then the others of each text in an order of its own."""
    check_seed(seed)
    drawn = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed))
    drawn[:, 0] = -1
    return drawn.argsort(-1).to(tokens.device)


@torch.no_grad()
def _log_probabilities(model: Any, tokens: Int[Tensor, "batch pos"], hooks: list[Hook]) -> Float[Tensor, "batch pos v"]:
    with evaluating(model), applied(model, hooks):
        logits: Tensor = model(tokens)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _loss(log_p: Float[Tensor, "batch pos v"], tokens: Int[Tensor, "batch pos"]) -> float:
    """Mean over predicted tokens."""
    return -log_p[:, :-1].gather(-1, tokens[:, 1:, None]).double().mean().item()


def _divergence(log_p: Float[Tensor, "batch pos v"], log_q: Float[Tensor, "batch pos v"]) -> float:
    """KL(p ‖ q), mean over positions."""
    return (log_p.exp() * (log_p - log_q)).sum(-1).double().mean().item()
