"""Runs in which heads receive what they have in another run, and the table of their effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float64, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.experiments.measuring.failures import note_failures
from tl_posdisent.experiments.measuring.full_runs import run_texts
from tl_posdisent.experiments.measuring.metrics import (
    Metric,
    is_loss,
    is_separable,
    metric_name,
    metric_values,
    value_of,
)
from tl_posdisent.experiments.measuring.part_runs import Base, Head, HooksOf
from tl_posdisent.experiments.measuring.run_changes import Compare, run_changes
from tl_posdisent.experiments.measuring.token_losses import predicted
from tl_posdisent.hooks.hook_list import Hooks
from tl_posdisent.hooks.positions import swap_positions
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Hook, running
from tl_posdisent.models.running.model_parts import dtype_of
from tl_posdisent.models.running.texts import Texts
from tl_posdisent.utils.precision import apart
from tl_posdisent.utils.statistics import mean
from tl_posdisent.utils.tables import HEAD

# --- the run that heads are patched from


class Held:
    """What a layer has for some texts of one length in another run, recorded when it is needed; of one layer at a time.

    Args:
        record: from rows of the texts and a layer to what it has there.
    """

    def __init__(self, record: Callable[[list[int], AttentionSpec], Any]) -> None:
        self._record, self._layer, self._of_rows = record, -1, dict[tuple[int, ...], Any]()

    def __call__(self, rows: list[int], spec: AttentionSpec) -> Any:
        if spec.layer != self._layer:
            self._layer, self._of_rows = spec.layer, {}
        if tuple(rows) not in self._of_rows:
            self._of_rows[tuple(rows)] = self._record(rows, spec)
        return self._of_rows[tuple(rows)]


@dataclass(frozen=True, eq=False)
class SourceRun:
    """Texts at other positions, in all layers, ``[pos]`` or ``[batch, pos]``; None for their own."""

    reading: ModelReading
    texts: Texts
    place: Tensor | None = None

    def positions(self, rows: list[int]) -> Tensor | None:
        """Return the positions of some texts of one length."""
        (group,) = self.texts.take(rows).groups
        if self.place is None or self.place.ndim == 1:
            return None if self.place is None else self.place[: group.tokens.shape[1]]
        return group.cut(self.place[rows]) if self.place.shape == self.texts.tokens.shape else self.place

    def hooks(self, rows: list[int]) -> Hooks:
        positions = self.positions(rows)
        return Hooks([]) if positions is None else swap_positions(self.reading, positions)

    def outputs(self) -> list[Any]:
        """Run all texts."""
        return run_texts(self.reading.model, self.texts, [self.hooks(x.rows.tolist()) for x in self.texts.groups])

    def listen(
        self,
        rows: list[int],
        spec: AttentionSpec,
        listen: Callable[[AttentionSpec, Tensor | None, dict[str, Tensor]], list[Hook]],
    ) -> dict[str, Tensor]:
        """Record a layer in a run of some texts of one length."""
        seen: dict[str, Tensor] = {}
        with running(self.reading.model) as p:
            listening = [*self.hooks(rows), *listen(spec, self.positions(rows), seen)]
            p.run(tokens_of(self.texts, rows), listening, stop=spec.layer + 1)
        return seen


def tokens_of(texts: Texts, rows: list[int]) -> Int[Tensor, "text pos"]:
    """Return the tokens of some texts of one length, without padding."""
    (group,) = texts.take(rows).groups
    return group.tokens


# --- runs with patched heads


class PatchRun(NamedTuple):
    """A run in which heads of a layer are patched.

    Attributes:
        changed: the heads whose results change.
        reported: the heads that get a row with the value; None for a row of the layer.
        hooks: hooks that patch these heads. Several runs may have the same ones, for any of their heads.
        place: the position at which they are patched; None for all.
    """

    layer: int
    changed: list[int]
    reported: Sequence[int | None]
    hooks: HooksOf
    place: int | None = None


def by_head(
    spec: AttentionSpec,
    heads: Sequence[int],
    hooks: HooksOf,
    *,
    by_key: bool = False,
    changed: Callable[[Sequence[int]], list[int]] | None = None,
    place: int | None = None,
) -> list[PatchRun]:
    """Return runs that patch heads one by one; or ``by_key``, all heads that share a key head together.

    Args:
        changed: from heads that are patched together to those whose results change, default themselves.
    """
    units: dict[tuple[int, ...], list[int]] = {}
    for head in heads:
        units.setdefault(tuple(sharing(spec, [head])) if by_key else (head,), []).append(head)
    if changed is None:
        return [PatchRun(spec.layer, list(unit), reported, hooks, place) for unit, reported in units.items()]
    return [
        PatchRun(spec.layer, changed(unit), reported, only(spec, unit, hooks), place)
        for unit, reported in units.items()
    ]


def only(spec: AttentionSpec, heads: Sequence[int], hooks: HooksOf) -> HooksOf:
    """Return hooks that patch these heads, whichever change."""
    return lambda rows, changed: hooks(rows, [(spec.layer, head) for head in heads])


def sharing(spec: AttentionSpec, heads: Sequence[int]) -> list[int]:
    """Return the heads that read the keys of these heads."""
    keys = {spec.key_head(head) for head in heads}
    return [head for head in range(spec.n_heads) if spec.key_head(head) in keys]


def numbers(heads: Sequence[Head]) -> list[int]:
    return [head for _, head in heads]


def patch_effects(
    reading: ModelReading,
    texts: Texts,
    runs: Sequence[PatchRun],
    metric: Metric,
    argument: str,
    source: float,
    *,
    target: Texts | None = None,
    base: Base | None = None,
    progress: bool,
) -> pd.DataFrame:
    """Make runs on ``texts`` with patched heads, and tabulate the metric of each.

    Args:
        argument: the argument that makes the run that heads are patched from differ, for errors.
        source: the metric of that run.
        target: texts whose tokens the metric receives, default those that are run.
        base: hooks of the run that is patched.

    Returns:
        One row per layer and head, and per position if there are any: ``layer``, ``head``, (``position``;) ``source``,
        ``baseline`` and ``value``, the metric of the three runs, and ``effect``.

    Raises:
        ValueError: two runs with the same metric; errors of all runs (those of some are NaN rows).
    """
    target = texts if target is None else target
    hooks = None if base is None else [base(group.rows.tolist()) for group in texts.groups]
    baseline = value_of(metric, run_texts(reading.model, texts, hooks), target)
    if not apart(source, baseline, dtype_of(reading.model)):
        raise ValueError(  # every effect would be 0/0
            f"{argument} must change the metric, but it is {source:.6g} in one run and {baseline:.6g} in the other: "
            "there is no effect to divide. Pass a metric= that they change, such as logit_difference(…) of an answer "
            "that depends on it, or make the two runs differ more"
        )
    names = {hooks: str(n) for n, hooks in enumerate(dict.fromkeys(run.hooks for run in runs))}
    heads_of: dict[str, list[list[Head]]] = {name: [] for name in names.values()}
    for run in runs:
        heads_of[names[run.hooks]].append([(run.layer, head) for head in run.changed])
    changes = {name: hooks for hooks, name in names.items()}
    with tqdm(total=len(runs) * len(texts.tokens), desc="heads", disable=not progress) as bar:
        compare, together = _of_target(metric, target), not is_separable(metric)
        found = run_changes(reading, texts, changes, heads_of, compare, together=together, base=base, bar=bar)
    weights = predicted(target).sum(1).double() if is_loss(metric) else torch.ones_like(found.predictions)
    baseline = mean(found.unmodified, weights).value.item()
    values = mean(torch.cat([found[name] for name in changes]).T, weights).value
    rows = [
        (run.layer, head, run.place, source, baseline, value)
        for run, value in zip(runs, values.tolist(), strict=True)
        for head in run.reported
    ]
    table = pd.DataFrame(rows, columns=[*HEAD, "position", "source", "baseline", "value"])
    table = table.drop(columns="position") if runs[0].place is None else table
    table["effect"] = (table["value"] - baseline) / (source - baseline)
    table.attrs["metric"] = metric_name(metric)
    table = table.sort_values(HEAD, kind="stable", ignore_index=True)
    return reading.note(note_failures(table, found.failures, found.n_runs, stacklevel=4))


def _of_target(metric: Metric, target: Texts) -> Compare:
    """Compare texts by a metric, which receives the tokens of other texts of the same lengths."""

    def read(
        unmodified: list[Any], texts: Texts, rows: list[int]
    ) -> Callable[[Sequence[Any]], Float64[Tensor, " text"]]:
        own = target.take(rows)
        by_length = {group.tokens.shape[1]: group for group in own.groups}
        groups = [by_length[group.tokens.shape[1]] for group in texts.groups]
        return metric_values(metric)(unmodified, replace(own, groups=groups), rows)

    return read
