"""Sufficiency of heads: what a model can do if only these heads rotate, or only these attend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pandas as pd
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.hooks.ablate import replace_heads, stand_in
from tl_posdisent.models.reading.forward import Hook, hook_name
from tl_posdisent.models.reading.model_reading import read_attention
from tl_posdisent.models.texts import Texts, read_texts
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.training.evaluate import check_samples, evaluate
from tl_posdisent.utils.pictures import HasTable
from tl_posdisent.utils.validation import check_choice, check_heads, check_integer, check_number, head_label, listed

By = Literal["rotation", "attention"]
Head = tuple[int, int]


@dataclass(frozen=True, eq=False, repr=False)
class SufficientHeads(HasTable):
    """A set of heads that suffices for a task, and how much each smaller or larger set can do.

    Attributes:
        by: what the other heads lack: ``"rotation"`` (frozen) or ``"attention"`` (replaced by their mean).
        keep: share of the model's accuracy that suffices.
        baseline, baseline_loss: with all heads.
        none, none_loss: with no head.
        accuracy, loss: with the sufficient set alone.
        heads: the set, ``(layer, head)``, the most important ones first.
        path: from all heads to none, one row per number of heads of the search: ``heads``, ``accuracy``, ``loss``.

    Example:
        >>> from tl_posdisent.synthetic import preset, sufficient_heads
        >>> small = preset("small")
        >>> found = sufficient_heads(small.model("rope", "count"), *small.tasks["count"].batch(20))
        >>> found.accuracy >= found.keep * found.baseline
        True
    """

    by: By
    keep: float
    baseline: float
    baseline_loss: float
    none: float
    none_loss: float
    accuracy: float
    loss: float
    heads: tuple[Head, ...]
    path: pd.DataFrame

    def at(self, heads: int) -> tuple[float, float]:
        """Accuracy and loss with so many heads, or with the path's next larger number."""
        check_integer("heads", heads, 0, int(self.path["heads"].max()))
        row = self.path[self.path["heads"] >= heads].sort_values("heads").iloc[0]
        return float(row["accuracy"]), float(row["loss"])

    def to_frame(self) -> pd.DataFrame:
        """One row: ``by``, ``keep``, ``heads`` (how many suffice), and accuracies and losses as above."""
        names = ("by", "keep", "baseline", "baseline_loss", "none", "none_loss", "accuracy", "loss")
        return pd.DataFrame([{name: getattr(self, name) for name in names} | {"heads": len(self.heads)}])

    def __repr__(self) -> str:
        labels = ", ".join(head_label(*head) for head in self.heads[:6])
        more = f", … ({len(self.heads)})" if len(self.heads) > 6 else ""
        what = "rotating" if self.by == "rotation" else "attending"
        heads = "1 head" if len(self.heads) == 1 else f"{len(self.heads)} heads"
        return (
            f"SufficientHeads: accuracy {self.accuracy:.3f} of {self.baseline:.3f} with {heads} {what} "
            f"(none: {self.none:.3f}): {labels or 'none'}{more}"
        )


def only_heads(
    model: SyntheticModel, heads: Iterable[Head | str], *, by: By = "rotation", reference: Tensor | None = None
) -> list[Hook]:
    """Return hooks under which only these heads rotate, or only these attend.

    * ``by="rotation"``: the queries and keys of all other heads stay unrotated, as under
      ``limit_frequencies(model, high=0, mode="freeze")``: they attend by content, at whatever distance.
    * ``by="attention"``: the output of all other heads is its mean over the positions of the reference texts, as
      under ``ablate_heads(mode="mean")``.

    Args:
        heads: pairs ``(layer, head)`` or labels ``"L0H1"``; may be empty.
        by: what the others lack.
        reference: for ``"attention"``: texts ``[sample, pos]``, padded as the model's training samples.

    Raises:
        ValueError: a model that does not rotate; no reference, or one where none is needed; heads out of range or
            twice.

    Example:
        >>> from tl_posdisent.synthetic import evaluate, only_heads, preset
        >>> small = preset("small")
        >>> model, samples = small.model("rope", "distance"), small.tasks["distance"].batch(50)
        >>> with model.hooks(fwd_hooks=only_heads(model, [(0, 1)])):
        ...     loss, accuracy = evaluate(model, *samples)
        >>> accuracy < 0.5
        True
    """
    _check(model, by)
    heads = listed(heads)
    by_layer = check_heads(None, heads, model.cfg.n_layers, model.cfg.n_heads) if heads != [] else {}
    if (by == "attention") != (reference is not None):
        needed = "must be tokens" if by == "attention" else "must be None"
        raise ValueError(f'reference {needed} with by="{by}", got {type(reference).__name__}')
    chosen = {(layer, head) for layer, some in by_layer.items() for head in some}
    return _restricted(model, chosen, _mean(model, reference))


def sufficient_heads(
    model: SyntheticModel,
    tokens: Int[Tensor, "sample pos"],
    labels: Int[Tensor, "sample"],
    *,
    by: By = "rotation",
    keep: float = 0.9,
    order: pd.DataFrame | None = None,
) -> SufficientHeads:
    """Find a small set of heads that suffices for a task, by greedy elimination.

    A set is *sufficient* if the model keeps ``keep`` of its accuracy with these heads alone (``only_heads``); of two
    redundant heads one is in the set, though neither is *necessary* (``head_drops``). The search ranks the heads by
    their own effect, finds by bisection how many of the first suffice, and removes heads, the last ones first, until
    each is needed (a smaller set of other heads may exist). The heads of the set are ranked by the loss without each.

    Args:
        model: trained.
        tokens, labels: samples ``[sample, pos]`` that it was not trained on, and ``[sample]``.
        by: ``"rotation"`` (the others are frozen) or ``"attention"`` (the others are mean-ablated).
        keep: share of the baseline's accuracy that suffices, above 0 and at most 1.
        order: a table with ``layer``, ``head`` and ``loss_effect``, as from ``head_drops``: heads with the largest
            effect rank first. Default: by their own effect under ``by``.

    Raises:
        ValueError: as ``evaluate`` and ``only_heads``; an ``order`` without these columns or without some head.

    Example:
        >>> from tl_posdisent.synthetic import preset, sufficient_heads
        >>> small = preset("small")
        >>> model, samples = small.model("rope", "distance"), small.tasks["distance"].batch(40)
        >>> bool(sufficient_heads(model, *samples, keep=0.5).path["heads"].max() == 12)
        True
    """
    _check(model, by)
    check_samples(model, tokens, labels)
    check_number("keep", keep, above=0, most=1)
    mean = _mean(model, tokens if by == "attention" else None)
    known: dict[frozenset[Head], tuple[float, float]] = {}

    def measured(heads: Sequence[Head]) -> tuple[float, float]:
        """Accuracy and loss with these heads alone; each set is measured once."""
        if (key := frozenset(heads)) not in known:
            with model.hooks(fwd_hooks=_restricted(model, key, mean)):
                loss, accuracy = evaluate(model, tokens, labels, batch_size=128)
            known[key] = accuracy, loss
        return known[key]

    rotary = model.config.rotary_heads if by == "rotation" else None
    n_heads = model.cfg.n_heads if rotary is None else rotary
    everything = [(layer, head) for layer in range(model.cfg.n_layers) for head in range(n_heads)]
    enough = keep * measured(everything)[0] - 1e-9
    if order is None:
        effect = {head: measured(_without(head, everything))[1] for head in everything}
    else:
        effect = _effects(order, everything)
    ranked = sorted(everything, key=lambda head: effect[head])  # the least important first
    path = _search(ranked, lambda heads: measured(heads)[0] >= enough)
    kept = path[-1]
    loss_without = {head: measured(_without(head, kept))[1] for head in kept}
    heads = sorted(kept, key=lambda head: -loss_without[head])
    path += [heads[:n] for n in reversed(range(len(heads)))]
    rows = [(len(some), *measured(some)) for some in path]
    table = pd.DataFrame(rows, columns=["heads", "accuracy", "loss"]).drop_duplicates("heads", ignore_index=True)
    (accuracy, loss), (baseline, baseline_loss), (none, none_loss) = map(measured, (kept, everything, []))
    return SufficientHeads(
        by, keep, baseline, baseline_loss, none, none_loss, accuracy, loss, heads=tuple(heads), path=table
    )


def _search(ranked: list[Head], suffice: Callable[[list[Head]], bool]) -> list[list[Head]]:
    """Sets that suffice, each smaller than the one before; of the last no head can go."""
    path = [ranked]
    low, high = -1, len(ranked)  # the last so many suffice; so many do not, as far as it was tried
    while high - low > 1:
        middle = (low + high) // 2
        trial = ranked[len(ranked) - middle :]
        if suffice(trial):
            high = middle
            path.append(trial)
        else:
            low = middle
    before = -1
    while len(path) != before:
        before = len(path)
        for head in path[-1]:
            if suffice(trial := _without(head, path[-1])):
                path.append(trial)
    return path


def _without(head: Head, heads: list[Head]) -> list[Head]:
    return [other for other in heads if other != head]


def _mean(model: SyntheticModel, reference: Tensor | None) -> Any:
    """What takes the place of a head's output; None if heads are frozen instead."""
    layers = range(model.cfg.n_layers)
    return None if reference is None else stand_in(model, layers, "mean", reference_texts(model, reference), 0)


def _restricted(model: SyntheticModel, heads: Set[Head], mean: Any) -> list[Hook]:
    """Hooks on all heads but these."""
    hooks: list[Hook] = []
    for layer in range(model.cfg.n_layers):
        others = [head for head in range(model.cfg.n_heads) if (layer, head) not in heads]
        if others and mean is None:
            hooks += [*_frozen(layer, "q", others), *_frozen(layer, "k", others)]
        elif others:
            hooks += replace_heads(read_attention(model, layer), others, mean)
    return hooks


def _frozen(layer: int, side: str, heads: list[int]) -> list[Hook]:
    """Queries or keys of these heads as they were before rotation."""
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
        raise ValueError(f"order must be a table of head_drops with the columns {columns}, got {[*order.columns]}")
    effect = {(int(layer), int(head)): float(x) for layer, head, x in order[columns].itertuples(index=False)}
    lacking = [head for head in heads if not math.isfinite(effect.get(head, math.nan))]
    if lacking:
        raise ValueError(f"order must have a finite loss_effect of every head, got none for {head_label(*lacking[0])}")
    return effect


def reference_texts(model: SyntheticModel, tokens: Any) -> Texts:
    """Texts for the mean of heads: without padding, if the model does not read it."""
    pad = model.config.pad_id
    return read_texts(model, tokens, None if pad is None else tokens != pad)


def _check(model: Any, by: Any) -> None:
    if not isinstance(model, SyntheticModel):
        raise ValueError(f"model must be a SyntheticModel, got {type(model).__name__}")
    check_choice("by", by, get_args(By))
    if by == "rotation" and not model.encoding.rotates:
        raise ValueError(
            f'by must be "attention" with encoding={model.config.encoding!r}, which rotates no queries and keys, '
            f"got {by!r}"
        )
