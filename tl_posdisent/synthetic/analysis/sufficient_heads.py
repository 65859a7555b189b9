"""Sets of rotary heads that suffice for a task of position, by greedy elimination."""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pandas as pd
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.models.running.forward_pass import Hook
from tl_posdisent.models.running.model_parts import hook_name
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.training.evaluation import check_samples, evaluate
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tables import HasTable
from tl_posdisent.utils.validation import check_number, head_label
from tl_posdisent.utils.words import plural

Head = tuple[int, int]
"""Layer and head."""
Measure = Callable[[frozenset[Head]], tuple[float, float]]
"""From a set of heads to the accuracy and loss with the rotation of these heads alone."""


@dataclass(frozen=True, eq=False, repr=False)
class SufficientHeads(HasTable):
    """A set of rotating heads that suffices for a task, with the accuracy of smaller and larger sets.

    Attributes:
        keep: share of the model's accuracy that counts as sufficient.
        baseline, none: accuracy if all heads rotate, and if no head does.
        accuracy, loss: accuracy and loss if the sufficient set alone rotates.
        heads: the set, ``(layer, head)``, the most important heads first.
        path: one row per number of heads in the search, from all heads to none: ``heads``, ``accuracy``, ``loss``.
    """

    keep: float
    baseline: float
    none: float
    accuracy: float
    loss: float
    heads: tuple[Head, ...]
    path: pd.DataFrame

    def to_frame(self) -> pd.DataFrame:
        """Return one row: ``keep``, ``heads`` (their number), and accuracies and losses as above."""
        names = ("keep", "baseline", "none", "accuracy", "loss")
        return pd.DataFrame([{name: getattr(self, name) for name in names} | {"heads": len(self.heads)}])

    def __repr__(self) -> str:
        labels = ", ".join(head_label(*head) for head in self.heads[:6])
        more = f", … ({len(self.heads)})" if len(self.heads) > 6 else ""
        heads = plural(len(self.heads), "head")
        return (
            f"SufficientHeads: accuracy {self.accuracy:.3f} of {self.baseline:.3f} with {heads} rotating "
            f"(none: {self.none:.3f}): {labels or 'none'}{more}"
        )


def sufficient_heads(
    model: SyntheticModel,
    tokens: Int[Tensor, "sample pos"],
    labels: Int[Tensor, " sample"],
    *,
    keep: float = 0.9,
    order: pd.DataFrame | None = None,
    progress: bool = True,
) -> SufficientHeads:
    """Find a small set of heads whose rotation suffices for a task, by greedy elimination.

    A set is *sufficient* if the model keeps the share ``keep`` of its accuracy while queries and keys of all other
    heads are not rotated, as under ``limit_frequencies(high=0, mode="freeze")``. Of two redundant heads one is in the
    set, though neither is *necessary* (``head_drops``). The search ranks the heads by their effect,
    finds by bisection how many of the first suffice, and removes heads, the last ones first, until each is needed (a
    smaller set of other heads may exist). The heads of the set are ranked by the loss without each.

    Args:
        model: a trained model.
        tokens, labels: samples ``[sample, pos]`` that it was not trained on, and their labels ``[sample]``.
        keep: share of the baseline's accuracy that counts as sufficient, above 0 and at most 1.
        order: a table with ``layer``, ``head`` and ``loss_effect``, such as ``head_drops`` returns: heads with the
            largest effect rank first. Default: by the effect of each head's rotation.
        progress: show a progress bar, which counts the sets that were measured.

    Raises:
        ValueError: as ``evaluate``; a model that does not rotate; an ``order`` without these columns or without some
            head.

    Example:
        >>> from tl_posdisent.synthetic import preset, sufficient_heads
        >>> small = preset("small")
        >>> model, samples = small.model("rope", "distance"), small.tasks["distance"].batch(40)
        >>> sufficient_heads(model, *samples, keep=0.5, progress=False)
        SufficientHeads: accuracy ...
    """
    check_samples(model, tokens, labels)
    check_number("keep", keep, above=0, most=1)
    if not model.encoding.rotates:
        raise ArgumentError(
            "model", f"must rotate queries and keys, got one with encoding={model.config.encoding!r}, which does not"
        )
    rotary_heads = model.cfg.n_heads if model.config.rotary_heads is None else model.config.rotary_heads
    candidates = [(layer, head) for layer in range(model.cfg.n_layers) for head in range(rotary_heads)]
    with tqdm(desc="sets of heads", disable=not progress) as bar:
        measure = cache(partial(_accuracy_and_loss, model, tokens, labels, bar))  # each set once
        baseline, none = (measure(frozenset(heads))[0] for heads in (candidates, []))
        sufficient_accuracy = keep * baseline - 1e-9
        effects = _losses_without(candidates, measure) if order is None else _effects(order, candidates)
        path = _search(_ranked(candidates, effects), measure, sufficient_accuracy)
        sufficient = _ranked(path[-1], _losses_without(path[-1], measure))[::-1]
        path += [sufficient[:n] for n in reversed(range(len(sufficient)))]
        rows = [(len(heads), *measure(frozenset(heads))) for heads in path]
        accuracy, loss = measure(frozenset(sufficient))
    table = pd.DataFrame(rows, columns=["heads", "accuracy", "loss"]).drop_duplicates("heads", ignore_index=True)
    return SufficientHeads(keep, baseline, none, accuracy, loss, heads=tuple(sufficient), path=table)


def _accuracy_and_loss(
    model: SyntheticModel, tokens: Tensor, labels: Tensor, bar: Any, heads: frozenset[Head]
) -> tuple[float, float]:
    """Measure accuracy and loss with the rotation of these heads alone; the bar counts the sets."""
    with model.hooks(fwd_hooks=_frozen_except(model, heads)):
        loss, accuracy = evaluate(model, tokens, labels, batch_size=128)
    bar.update()
    return accuracy, loss


def _losses_without(heads: list[Head], measure: Measure) -> dict[Head, float]:
    """Measure the loss with all of these heads but one, for each of them."""
    return {head: measure(frozenset(_without(head, heads)))[1] for head in heads}


def _ranked(heads: list[Head], effect: dict[Head, float]) -> list[Head]:
    """Sort heads by their effect, the least important first."""
    return sorted(heads, key=lambda head: effect[head])


def _search(ranked: list[Head], measure: Measure, sufficient_accuracy: float) -> list[list[Head]]:
    """Return sets that suffice, each smaller than the one before; in the last set every head is needed."""
    path = [ranked]
    low, high = -1, len(ranked)  # the last `high` heads suffice; the last `low` do not
    while high - low > 1:
        middle = (low + high) // 2
        trial = ranked[len(ranked) - middle :]
        if measure(frozenset(trial))[0] >= sufficient_accuracy:
            high = middle
            path.append(trial)
        else:
            low = middle
    n_sets = -1
    while len(path) != n_sets:
        n_sets = len(path)
        for head in path[-1]:
            trial = _without(head, path[-1])
            if measure(frozenset(trial))[0] >= sufficient_accuracy:
                path.append(trial)
    return path


def _without(head: Head, heads: list[Head]) -> list[Head]:
    return [other for other in heads if other != head]


def _frozen_except(model: SyntheticModel, heads: Set[Head]) -> list[Hook]:
    """Return hooks that keep queries and keys of all other heads unrotated."""
    hooks: list[Hook] = []
    for layer in range(model.cfg.n_layers):
        others = [head for head in range(model.cfg.n_heads) if (layer, head) not in heads]
        hooks += [*_frozen(layer, "q", others), *_frozen(layer, "k", others)] if others else []
    return hooks


def _frozen(layer: int, side: str, heads: list[int]) -> list[Hook]:
    """Return hooks that keep queries or keys of these heads unrotated."""
    seen: dict[str, Tensor] = {}

    def listen(x: Tensor, hook: Any) -> None:
        seen["x"] = x

    def put_back(x: Tensor, hook: Any) -> Tensor:
        x = x.clone()
        x[:, :, heads] = seen.pop("x")[:, :, heads]
        return x

    return [(hook_name(layer, f"hook_{side}"), listen), (hook_name(layer, f"hook_rot_{side}"), put_back)]


def _effects(order: pd.DataFrame, heads: list[Head]) -> dict[Head, float]:
    columns = ["layer", "head", "loss_effect"]
    if not {*columns} <= {*order.columns}:
        raise ArgumentError(
            "order", f"must be a table of head_drops with the columns {columns}, got the columns {[*order.columns]}"
        )
    effect = {(int(layer), int(head)): float(x) for layer, head, x in order[columns].itertuples(index=False)}
    lacking = [head for head in heads if not math.isfinite(effect.get(head, math.nan))]
    if lacking:
        raise ArgumentError(
            "order", f"must have a finite loss_effect for every head, got none for {head_label(*lacking[0])}"
        )
    return effect
