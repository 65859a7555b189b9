"""Positional deposit: concentration of ablation effects in single heads, and sets of heads that suffice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from tl_posdisent.experiments.causal.head_ablation import head_ablation
from tl_posdisent.hooks.ablate import AblationMode, replace_heads, stand_in
from tl_posdisent.models.reading.model_reading import read_attention
from tl_posdisent.models.running.forward_pass import Hook
from tl_posdisent.models.running.model_parts import hook_name
from tl_posdisent.models.running.texts import Texts, read_texts
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.tasks.task import IGNORED
from tl_posdisent.synthetic.training.evaluation import answers, check_samples, evaluate
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.lazy_names import public_name
from tl_posdisent.utils.restoring import without_gradients
from tl_posdisent.utils.tables import HasTable
from tl_posdisent.utils.validation import check_choice, check_number, head_label
from tl_posdisent.utils.words import plural

By = Literal["rotation", "attention"]
Head = tuple[int, int]


@dataclass(frozen=True, eq=False, repr=False)
class SufficientHeads(HasTable):
    """A set of heads that suffices for a task, with the accuracy of smaller and larger sets.

    Attributes:
        by: what is removed from the other heads: ``"rotation"`` (frozen) or ``"attention"`` (replaced by their mean).
        keep: share of the model's accuracy that counts as sufficient.
        baseline, none: accuracy with all heads, and with no head.
        accuracy, loss: accuracy and loss with the sufficient set alone.
        heads: the set, ``(layer, head)``, the most important heads first.
        path: one row per number of heads in the search, from all heads to none: ``heads``, ``accuracy``, ``loss``.
    """

    by: By
    keep: float
    baseline: float
    none: float
    accuracy: float
    loss: float
    heads: tuple[Head, ...]
    path: pd.DataFrame

    def to_frame(self) -> pd.DataFrame:
        """Return one row: ``by``, ``keep``, ``heads`` (their number), and accuracies and losses as above."""
        names = ("by", "keep", "baseline", "none", "accuracy", "loss")
        return pd.DataFrame([{name: getattr(self, name) for name in names} | {"heads": len(self.heads)}])

    def __repr__(self) -> str:
        labels = ", ".join(head_label(*head) for head in self.heads[:6])
        more = f", … ({len(self.heads)})" if len(self.heads) > 6 else ""
        heads = plural(len(self.heads), "head")
        return (
            f"SufficientHeads: accuracy {self.accuracy:.3f} of {self.baseline:.3f} with {heads} {_SETS[self.by]} "
            f"(none: {self.none:.3f}): {labels or 'none'}{more}"
        )


def sufficient_heads(
    model: SyntheticModel,
    tokens: Int[Tensor, "sample pos"],
    labels: Int[Tensor, " sample"],
    *,
    by: By = "rotation",
    keep: float = 0.9,
    order: pd.DataFrame | None = None,
) -> SufficientHeads:
    """Find a small set of heads that suffices for a task, by greedy elimination.

    A set is *sufficient* if the model keeps the share ``keep`` of its accuracy with these heads alone. Of two redundant
    heads one is in the set, though neither is *necessary* (``head_drops``). The search ranks the heads by their effect,
    finds by bisection how many of the first suffice, and removes heads, the last ones first, until each is needed (a
    smaller set of other heads may exist). The heads of the set are ranked by the loss without each.

    Args:
        model: a trained model.
        tokens, labels: samples ``[sample, pos]`` that it was not trained on, and their labels ``[sample]``.
        by: ``"rotation"``: queries and keys of all other heads are not rotated, as under ``limit_frequencies(high=0,
            mode="freeze")``; or ``"attention"``: the output of all others is its mean over these samples, as under
            ``ablate_heads(mode="mean")``.
        keep: share of the baseline's accuracy that counts as sufficient, above 0 and at most 1.
        order: a table with ``layer``, ``head`` and ``loss_effect``, such as ``head_drops`` returns: heads with the
            largest effect rank first. Default: by each head's effect under ``by``.

    Raises:
        ValueError: as ``evaluate``; a model that does not rotate; an ``order`` without these columns or without some
            head.

    Example:
        >>> from tl_posdisent.synthetic import preset, sufficient_heads
        >>> small = preset("small")
        >>> model, samples = small.model("rope", "distance"), small.tasks["distance"].batch(40)
        >>> sufficient_heads(model, *samples, keep=0.5)
        SufficientHeads: accuracy ...
    """
    _check(model, by)
    check_samples(model, tokens, labels)
    check_number("keep", keep, above=0, most=1)
    mean = _mean(model, tokens if by == "attention" else None)
    known: dict[frozenset[Head], tuple[float, float]] = {}

    def measured(heads: Sequence[Head]) -> tuple[float, float]:
        """Measure accuracy and loss with these heads alone; each set is measured once."""
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
    (accuracy, loss), (baseline, _), (none, _) = map(measured, (kept, everything, []))
    return SufficientHeads(by, keep, baseline, none, accuracy, loss, heads=tuple(heads), path=table)


def _search(ranked: list[Head], suffice: Callable[[list[Head]], bool]) -> list[list[Head]]:
    """Return sets that suffice, each smaller than the one before; in the last set every head is needed."""
    path = [ranked]
    low, high = -1, len(ranked)  # the last `high` heads suffice; the last `low` do not
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
    """Return the mean that replaces a head's output, or None if heads are frozen instead."""
    layers = range(model.cfg.n_layers)
    return None if reference is None else stand_in(model, layers, "mean", reference_texts(model, reference), 0)


def _restricted(model: SyntheticModel, heads: Set[Head], mean: Any) -> list[Hook]:
    """Return hooks on all heads except these."""
    hooks: list[Hook] = []
    for layer in range(model.cfg.n_layers):
        others = [head for head in range(model.cfg.n_heads) if (layer, head) not in heads]
        if others and mean is None:
            hooks += [*_frozen(layer, "q", others), *_frozen(layer, "k", others)]
        elif others:
            hooks += replace_heads(read_attention(model, layer), others, mean)
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


def reference_texts(model: SyntheticModel, tokens: Any) -> Texts:
    """Return the texts for the mean of heads, without padding if the model does not read it."""
    pad = model.config.pad_id
    return read_texts(model, tokens, None if pad is None else tokens != pad)


def _check(model: Any, by: Any) -> None:
    if not isinstance(model, SyntheticModel):
        raise ArgumentError("model", f"must be a SyntheticModel, got {type(model).__name__}")
    check_choice("by", by, get_args(By))
    if by == "rotation" and not model.encoding.rotates:
        raise ArgumentError(
            "by",
            f'must be "attention" with encoding={model.config.encoding!r}, which rotates no queries and keys, '
            f"got {by!r}",
        )


_HEAD = ["layer", "head"]
_NEEDED = (*_HEAD, "baseline", "effect")
_SETS = {"rotation": "rotating", "attention": "attending"}
_MEASURES = ("baseline", "drop", "second", "share", "effective_heads", "layer", "head")


@dataclass(frozen=True, eq=False, repr=False)
class DepositReport(HasTable):
    """Distribution of drops over heads. A drop is how much worse the metric is without one head, at least 0.

    With ``drop_h`` the drop of head h, and ``p_h = drop_h / Σ drop``:

    Attributes:
        baseline: the metric with all heads.
        drop: largest drop, in units of the metric; 0 or more.
        second: second largest drop; NaN if there is only one head.
        share: ``max p``, from 1 / heads (equal drops) to 1 (one head has the whole drop). NaN if all drops are 0.
        effective_heads: ``exp(-Σ p log p)``, from 1 (one head has the whole drop) to the number of heads. NaN if all
            drops are 0.
        layer, head: head with the largest drop (the first, if several are equal); None if all drops are 0.
        drops: one row per head: ``layer``, ``head``, ``drop`` (negative: a gain), ``share`` (its p).
        sufficient: results of ``sufficient_heads``, if given.
    """

    baseline: float
    drop: float
    second: float
    share: float
    effective_heads: float
    layer: int | None
    head: int | None
    drops: pd.DataFrame
    sufficient: tuple[SufficientHeads, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        """Return one row with all measures; ``rotating`` and ``attending`` are numbers of heads in ``sufficient``."""
        row = {name: [getattr(self, name)] for name in _MEASURES}
        row |= {_SETS[found.by]: [len(found.heads)] for found in self.sufficient}
        return pd.DataFrame(row).astype({"layer": "Int64", "head": "Int64"})

    def plot(self, *, title: str | None = None) -> Any:
        """Plot the drops, and the sufficient sets if there are any: see ``plot_deposit``."""
        table = self.drops.rename(columns={"drop": "effect"})
        return public_name("viz", "plot_deposit")(table, better="lower", sufficient=self.sufficient, title=title)

    def __repr__(self) -> str:
        layers = self.drops.groupby("layer")["share"].sum()
        heads, where = (plural(len(x), of) for of, x in (("head", self.drops), ("layer", layers)))
        begin = f"DepositReport of {heads} in {where}, baseline {self.baseline:.3f}\n"
        sets = "".join(f"\n  {found!r}".replace("SufficientHeads: ", "sufficient: ") for found in self.sufficient)
        if self.layer is None:
            return begin + "  no head has a drop" + sets
        shares = " ".join(f"{x:.2f}" for x in layers)
        return begin + (
            f"  largest drop {self.drop:.3f} (layer {self.layer}, head {self.head}), second {self.second:.3f}; "
            f"share {self.share:.2f}, effective number of heads {self.effective_heads:.2f}\n"
            f"  share by layer: {shares}{sets}"
        )


def deposit(
    drops: pd.DataFrame,
    *,
    better: Literal["higher", "lower"] = "higher",
    measure: Literal["metric", "loss"] = "metric",
    sufficient: Iterable[SufficientHeads] = (),
) -> DepositReport:
    """Summarise a table of ``head_drops`` or ``head_ablation``: largest drop, share, effective number of heads.

    Args:
        drops: a table of ``head_ablation`` or ``head_drops``: ``layer``, ``head``, ``baseline``, ``effect``.
        better: whether a ``"higher"`` metric is better, as for accuracy, or a ``"lower"`` one, as for a loss.
        measure: ``"metric"``, or ``"loss"`` for the columns ``loss_baseline`` and ``loss_effect`` of ``head_drops``.
        sufficient: results of ``sufficient_heads`` on the same model, to include in the report.

    Raises:
        ValueError: a table without these columns, with several rows for a head, with numbers that are not finite, or
            with several baselines.

    Example:
        >>> import pandas as pd
        >>> from tl_posdisent.synthetic import deposit
        >>> rows = [(0, 0, 0.95, -0.75), (0, 1, 0.95, -0.05), (1, 0, 0.95, -0.05), (1, 1, 0.95, 0.01)]
        >>> deposit(pd.DataFrame(rows, columns=["layer", "head", "baseline", "effect"]))
        DepositReport of 4 heads in 2 layers, baseline 0.950
          largest drop 0.750 (layer 0, head 0), second 0.050; share 0.88, effective number of heads 1.56
          share by layer: 0.94 0.06
    """
    check_choice("better", better, ("higher", "lower"))
    check_choice("measure", measure, ("metric", "loss"))
    sufficient = tuple(sufficient)
    for x in sufficient:
        if not isinstance(x, SufficientHeads):
            raise ArgumentError("sufficient", f"must be of type SufficientHeads, got {type(x).__name__}")
    if measure == "loss":
        for name in ("loss_baseline", "loss_effect"):
            if name not in drops:
                raise ArgumentError(
                    "drops", f'must have the column {name!r} with measure="loss", as a table of head_drops has'
                )
        drops, better = drops.assign(baseline=drops["loss_baseline"], effect=drops["loss_effect"]), "lower"
        drops.attrs["metric"] = "loss"
    _check_drops(drops)
    loss = drops["effect"].to_numpy(float) * (-1.0 if better == "higher" else 1.0) + 0.0
    worth = loss.clip(min=0)
    total = float(worth.sum())
    p = worth / total if total > 0 else np.zeros_like(worth)
    table = drops[_HEAD].assign(drop=loss, share=p).sort_values(_HEAD, ignore_index=True)
    largest = int(table["drop"].to_numpy().argmax())
    ranked = np.sort(worth)[::-1]
    return DepositReport(
        baseline=float(drops["baseline"].iloc[0]),
        drop=float(ranked[0]),
        second=float(ranked[1]) if len(ranked) > 1 else math.nan,
        share=float(p.max()) if total > 0 else math.nan,
        effective_heads=float(np.exp(-(p[p > 0] * np.log(p[p > 0])).sum())) if total > 0 else math.nan,
        layer=int(table["layer"].iloc[largest]) if total > 0 else None,
        head=int(table["head"].iloc[largest]) if total > 0 else None,
        drops=table,
        sufficient=sufficient,
    )


def head_drops(
    model: SyntheticModel,
    tokens: Int[Tensor, "sample pos"],
    labels: Int[Tensor, " sample"],
    *,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    mode: AblationMode = "zero",
    reference: Int[Tensor, "sample pos"] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure accuracy and loss of a synthetic model without each of its heads: ``head_ablation`` with labels.

    Args:
        model: a trained model.
        tokens: samples ``[sample, pos]`` that it was not trained on, for instance ``split.test_tokens``.
        labels: labels ``[sample]``; those of -100 are ignored.
        layers, heads, mode, seed, progress: as in ``head_ablation``. arXiv 2505.13027 zeroes heads.
        reference: texts for the mean, padded like ``tokens``, which are the default; padding is excluded unless the
            model reads it.

    Returns:
        One row per head: ``layer``, ``head``, ``baseline`` (accuracy, 0 to 1), ``value`` (without the head),
        ``effect`` (value - baseline, so a drop is negative); ``loss_baseline``, ``loss_value``, ``loss_effect``, the
        same for the mean cross-entropy in nats. ``deposit`` summarises the table. As in ``head_ablation``, rows of
        heads that could not be measured are NaN, and a warning says which and why.

    Raises:
        ValueError: as ``evaluate``, and as ``head_ablation``; padded samples with ``mode="resample"``.

    Example:
        >>> from tl_posdisent.synthetic import head_drops, preset
        >>> small = preset("small")
        >>> table = head_drops(small.model("rope", "count"), *small.tasks["count"].batch(100), progress=False)
        >>> len(table), bool(table["baseline"][0] < 0.5)  # 3 layers of 4 heads, untrained
        (12, True)
    """
    check_samples(model, tokens, labels)
    pad = model.config.pad_id
    if mode == "resample" and pad is not None and bool((tokens == pad).any()):
        raise ArgumentError(
            "tokens",
            'must be samples of one length for mode "resample", which replaces one sample by another, got padding, '
            "which this model does not read: use another mode, or pass samples of each length separately",
        )
    averaged: Any = tokens if reference is None and mode == "mean" else reference
    if mode == "mean":
        averaged = reference_texts(model, averaged)
    losses: list[float] = []  # the baseline's, then each row's that was measured

    def accuracy(logits: Tensor, tokens: Tensor) -> Tensor:
        logits = answers(lambda *_, **__: logits, tokens, pad).double()
        wanted = labels.to(logits.device)
        losses.append(float(cross_entropy(logits, wanted)))
        return (logits.argmax(-1) == wanted)[wanted != IGNORED].double().mean()

    options: dict[str, Any] = {"layers": layers, "heads": heads, "mode": mode, "reference": averaged, "seed": seed}
    with without_gradients():
        table = head_ablation(model, tokens, accuracy, progress=progress, **options)
    loss = np.full(len(table), np.nan)
    loss[table["value"].notna()] = losses[1:]
    return table.assign(loss_baseline=losses[0], loss_value=loss, loss_effect=loss - losses[0])


def _check_drops(drops: pd.DataFrame) -> None:
    if not isinstance(drops, pd.DataFrame):
        raise ArgumentError("drops", f"must be a table of head_ablation, got {type(drops).__name__}")
    missing = [name for name in _NEEDED if name not in drops]
    if missing or not len(drops):
        what = f"no column {missing[0]!r}" if missing else "no rows"
        raise ArgumentError(
            "drops", f"must have rows, and columns {', '.join(_NEEDED)}, as a table of head_ablation, got {what}"
        )
    twice = drops[drops.duplicated(_HEAD)]
    if len(twice):
        raise ArgumentError("drops", f"must have one row per head, got several for {head_label(*twice[_HEAD].iloc[0])}")
    for name in ("baseline", "effect"):
        values = drops[name].to_numpy(float)
        if not np.isfinite(values).all():
            raise ArgumentError("drops", f"must have finite numbers as {name}, got {values[~np.isfinite(values)][0]}")
    if drops["baseline"].ne(drops["baseline"].iloc[0]).any():
        raise ArgumentError(
            "drops", f"must come from one model, with one baseline, got {drops['baseline'].unique().tolist()[:3]}"
        )
