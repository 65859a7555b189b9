"""The positional deposit: concentration of ablation effects in single heads."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from tl_posdisent.experiments.causal.head_ablation import head_ablation
from tl_posdisent.hooks.ablate import AblationMode
from tl_posdisent.synthetic.model.transformer import SyntheticModel
from tl_posdisent.synthetic.tasks import IGNORED
from tl_posdisent.synthetic.training.evaluate import answers, check_samples
from tl_posdisent.utils.pictures import HasTable, figure_function
from tl_posdisent.utils.validation import check_choice, head_label

from .sufficiency import SufficientHeads, reference_texts

_HEAD = ["layer", "head"]
_NEEDED = (*_HEAD, "baseline", "effect")
_SETS = {"rotation": "rotating", "attention": "attending"}
_MEASURES = ("baseline", "drop", "second", "share", "effective_heads", "layer", "head")


@dataclass(frozen=True, eq=False, repr=False)
class DepositReport(HasTable):
    """Distribution of drops over heads. A drop is how much worse the metric is without one head, or 0.

    With ``drop_h`` of head h and ``p_h = drop_h / Σ drop``:

    Attributes:
        baseline: the metric with all heads.
        drop: largest drop, in units of the metric; 0 or more.
        second: second largest drop; NaN if there is one head.
        share: ``max p``, from 1 / heads (equal drops) to 1 (one head has the whole drop). NaN if all drops are 0.
        effective_heads: ``exp(-Σ p log p)``, from 1 (one head has the whole drop) to the number of heads. NaN likewise.
        layer, head: of the largest drop (the first, if several are equal); None if all drops are 0.
        drops: one row per head: ``layer``, ``head``, ``drop`` (negative: a gain), ``share`` (its p).
        sufficient: small sets of heads that suffice, where they were searched for.

    Example:
        >>> import pandas as pd
        >>> from tl_posdisent.synthetic import deposit
        >>> rows = [(0, 0, 0.95, -0.75), (0, 1, 0.95, -0.05), (1, 0, 0.95, -0.05), (1, 1, 0.95, 0.01)]
        >>> deposit(pd.DataFrame(rows, columns=["layer", "head", "baseline", "effect"]))
        DepositReport of 4 heads in 2 layers, baseline 0.950
          largest drop 0.750 (layer 0, head 0), second 0.050; share 0.88, effective number of heads 1.56
          share by layer: 0.94 0.06
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

    def by_layer(self) -> pd.DataFrame:
        """One row per layer: ``drop`` (its largest), ``head`` (that one's), ``total`` (its drops added up), ``share``
        (of all layers' total)."""
        drops = self.drops.assign(drop=self.drops["drop"].clip(lower=0))
        layers = drops.groupby("layer")
        table = drops.loc[layers["drop"].idxmax(), ["layer", "drop", "head"]].reset_index(drop=True)
        share = layers["share"].sum().to_numpy() if math.isfinite(self.share) else math.nan
        return table.assign(total=layers["drop"].sum().to_numpy(), share=share)

    def to_frame(self) -> pd.DataFrame:
        """One row with all measures, and with ``sufficient`` the numbers of heads, ``rotating`` and ``attending``."""
        row = {name: [getattr(self, name)] for name in _MEASURES}
        row |= {_SETS[found.by]: [len(found.heads)] for found in self.sufficient}
        return pd.DataFrame(row).astype({"layer": "Int64", "head": "Int64"})

    def plot(self, *, title: str | None = None) -> Any:
        """Plot the drops, and the sufficient sets if there are any: see ``plot_deposit``."""
        table = self.drops.rename(columns={"drop": "effect"})
        return figure_function("plot_deposit")(table, better="lower", sufficient=self.sufficient, title=title)

    def __repr__(self) -> str:
        layers = self.by_layer()
        where = "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
        begin = f"DepositReport of {len(self.drops)} heads in {where}, baseline {self.baseline:.3f}\n"
        sets = "".join(f"\n  {found!r}".replace("SufficientHeads: ", "sufficient: ") for found in self.sufficient)
        if self.layer is None:
            return begin + "  no head costs anything" + sets
        shares = " ".join(f"{x:.2f}" for x in layers["share"])
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
        measure: ``"metric"``, or ``"loss"``: the columns ``loss_baseline`` and ``loss_effect`` of ``head_drops``.
        sufficient: results of ``sufficient_heads`` on the same model, reported beside the drops.

    Raises:
        ValueError: a table without these columns, with a head twice, numbers that are not finite, or several baselines.

    Example:
        >>> from tl_posdisent import demo_tokens, head_ablation, load_demo_model
        >>> from tl_posdisent.synthetic import deposit
        >>> table = head_ablation(load_demo_model(), demo_tokens(length=128), mode="mean", progress=False)
        >>> deposit(table, better="lower").effective_heads > 5  # of a loss
        True
    """
    check_choice("better", better, ("higher", "lower"))
    check_choice("measure", measure, ("metric", "loss"))
    sufficient = tuple(sufficient)
    for x in sufficient:
        if not isinstance(x, SufficientHeads):
            raise ValueError(f"sufficient must be of type SufficientHeads, got {type(x).__name__}")
    if measure == "loss":
        for name in ("loss_baseline", "loss_effect"):
            if name not in drops:
                raise ValueError(f'drops must have the column {name!r} with measure="loss", as head_drops makes it')
        drops, better = drops.assign(baseline=drops["loss_baseline"], effect=drops["loss_effect"]), "lower"
    _check(drops)
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
    labels: Int[Tensor, "sample"],
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
        model: trained.
        tokens: samples ``[sample, pos]`` that it was not trained on, ``split.test_tokens`` for instance.
        labels: ``[sample]``; those of -100 do not count.
        layers, heads, mode, seed, progress: as in ``head_ablation``. arXiv 2505.13027 zeroes heads.
        reference: for the mean, padded like ``tokens``, which are the default; padding is excluded unless the model
            reads it.

    Returns:
        One row per head: ``layer``, ``head``, ``baseline`` (accuracy, 0 to 1), ``value`` (without the head),
        ``effect`` (value - baseline, so a drop is negative); ``loss_baseline``, ``loss_value``, ``loss_effect``, the
        same of the mean cross-entropy in nats. ``deposit`` summarises it.

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
        raise ValueError(
            'tokens must be samples of one length for mode "resample", which puts one in the place of another, got '
            "padding, which this model does not read: use another mode, or samples of each length on their own"
        )
    averaged: Any = tokens if reference is None and mode == "mean" else reference
    if mode == "mean":
        averaged = reference_texts(model, averaged)
    losses: list[float] = []  # of the baseline, then of each row

    def accuracy(logits: Tensor, tokens: Tensor) -> Tensor:
        logits = answers(lambda *_, **__: logits, tokens, pad).double()
        wanted = labels.to(logits.device)
        losses.append(float(cross_entropy(logits, wanted)))
        return (logits.argmax(-1) == wanted)[wanted != IGNORED].double().mean()

    options: dict[str, Any] = {"layers": layers, "heads": heads, "mode": mode, "reference": averaged, "seed": seed}
    with torch.no_grad():
        table = head_ablation(model, tokens, accuracy, progress=progress, **options)
    loss = np.array(losses)
    return table.assign(loss_baseline=loss[0], loss_value=loss[1:], loss_effect=loss[1:] - loss[0])


def _check(drops: pd.DataFrame) -> None:
    if not isinstance(drops, pd.DataFrame):
        raise ValueError(f"drops must be a table as head_ablation makes it, got {type(drops).__name__}")
    missing = [name for name in _NEEDED if name not in drops]
    if missing or not len(drops):
        what = f"no column {missing[0]!r}" if missing else "no rows"
        raise ValueError(
            f"drops must have rows, and columns {', '.join(_NEEDED)}, as head_ablation makes it, got {what}"
        )
    twice = drops[drops.duplicated(_HEAD)]
    if len(twice):
        raise ValueError(f"drops must have one row per head, got several for {head_label(*twice[_HEAD].iloc[0])}")
    for name in ("baseline", "effect"):
        values = drops[name].to_numpy(float)
        if not np.isfinite(values).all():
            raise ValueError(f"drops must have finite numbers as {name}, got {values[~np.isfinite(values)][0]}")
    if drops["baseline"].ne(drops["baseline"].iloc[0]).any():
        raise ValueError(
            f"drops must be of one model, with one baseline, got {drops['baseline'].unique().tolist()[:3]}"
        )
