"""Tables of a metric without and with each change of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import nan
from typing import Any, NamedTuple

import pandas as pd
from tqdm.auto import tqdm

from tl_posdisent.experiments.measuring.metrics import Metric, metric_name, value_of
from tl_posdisent.experiments.measuring.runs import (
    Change,
    Failure,
    GroupHooks,
    Run,
    Runs,
    attempt,
    note_failures,
    run_texts,
)
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Hook, running
from tl_posdisent.models.running.model_parts import dtype_of
from tl_posdisent.models.running.texts import Texts
from tl_posdisent.utils.precision import apart


class LayerUnits(NamedTuple):
    """The heads of one layer that are changed together.

    Attributes:
        spec: the layer.
        changed: for each unit, the heads that are changed together.
        reported: for each unit, the heads that get a row with its value; None for a row of the layer.
    """

    spec: AttentionSpec
    changed: list[list[int]]
    reported: Sequence[Sequence[int | None]]


@dataclass(frozen=True, eq=False)
class PatchRuns:
    """The run that heads are patched from, and what patching needs of the run that is patched.

    Attributes:
        texts: its texts.
        argument: the argument that makes the two runs differ, for errors.
        hooks: its hooks, for each group of texts.
        patched_hooks: hooks in the run that is patched, for each group of texts.
        target: texts whose tokens the metric receives, default those of the run that is patched.
    """

    texts: Texts
    argument: str
    hooks: Sequence[Sequence[Hook]] | None = None
    patched_hooks: Sequence[list[Hook]] | None = None
    target: Texts | None = None


def layer_units(spec: AttentionSpec, heads: Sequence[int], *, by_key: bool = False) -> LayerUnits:
    """Return the units of a layer: heads one by one; or ``by_key``, all heads that share a key head together."""
    unit_of = spec.key_head if by_key else int
    reported: dict[int, list[int]] = {}
    for head in heads:
        reported.setdefault(unit_of(head), []).append(head)
    changed = [[head for head in range(spec.n_heads) if unit_of(head) == unit] for unit in reported]
    return LayerUnits(spec, changed, list(reported.values()))


def rows_by_head(
    reading: ModelReading,
    texts: Texts,
    units: Sequence[LayerUnits],
    hooks_in: Callable[[AttentionSpec], Sequence[GroupHooks]],
    metric: Metric,
    *,
    places: Sequence[int | None] = (None,),
    source: PatchRuns | None = None,
    progress: bool,
) -> pd.DataFrame:
    """Change the units of each layer one by one in a run on ``texts``, and tabulate the metric of each run.

    Args:
        reading: the model.
        texts: the texts of the run that is changed.
        units: for each layer, the heads that are changed together.
        hooks_in: from a layer to one function for each of ``places``, which returns the hooks that change heads of the
            layer there. It is called layer by layer, right before the layer's runs, so what it stores for one layer is
            freed before the next.
        metric, progress: as in ``head_ablation``, already checked.
        places: the token positions at which heads are changed; ``(None,)`` for all positions together.
        source: the run from which heads are patched; None if they are changed in another way.

    Returns:
        One row per layer and head, and per position if ``places`` has any, in this order: ``layer``, ``head``,
        (``position``;) with a source ``source``, the metric of its run; ``baseline``, the metric without a change;
        ``value``, the metric with it; and ``effect``, which is ``value - baseline`` or, with a source,
        ``(value - baseline) / (source - baseline)``. ``table.attrs["metric"]`` is the metric's name.

    Raises:
        ValueError: a source with the metric of the unchanged run; errors of all runs (those of some are NaN rows).
    """
    model, rows, failures = reading.model, list[tuple[Any, ...]](), list[Failure]()
    patched_hooks, target = (None, texts) if source is None else (source.patched_hooks, source.target or texts)
    n_runs = len(places) * sum(len(unit.changed) for unit in units)
    with running(model), tqdm(total=n_runs, desc="heads", disable=not progress) as bar:
        runs = Runs(model, texts, [spec.layer for spec, _, _ in units], patched_hooks)
        baseline = value_of(metric, runs.clean, target)
        unpatched = {"baseline": baseline}
        if source is not None:
            source_value = value_of(metric, run_texts(model, source.texts, source.hooks), target)
            unpatched = {"source": source_value, "baseline": baseline}
            if not apart(source_value, baseline, dtype_of(model)):
                raise ValueError(  # every effect would be 0/0
                    f"{source.argument} must change the metric, but it is {source_value:.6g} in one run and "
                    f"{baseline:.6g} in the other: there is no effect to divide. Pass a metric= that they "
                    "change, such as logit_difference(…) of an answer that depends on it, or make the two runs differ "
                    "more"
                )
        shortcuts = runs.shortcuts
        for spec, changed, reported in units:
            changes = [Change("change", tuple(heads), hooks) for hooks in hooks_in(spec) for heads in changed]
            layer_runs = runs.changed(spec.layer, changes, shortcuts)
            for (place, heads), (run, known) in zip(product(places, reported), layer_runs, strict=True):
                value = attempt(partial(_metric_of, run, metric, target), spec.layer, heads[0])
                if isinstance(value, Failure):
                    failures.append(value)
                    value = nan
                rows += [(spec.layer, head, place, *unpatched.values(), value) for head in heads]
                shortcuts = known  # for the next layer
                bar.update()
    table = pd.DataFrame(rows, columns=["layer", "head", "position", *unpatched, "value"]).astype({"value": float})
    table = table.drop(columns="position") if None in places else table
    table.attrs["metric"] = metric_name(metric)
    table["effect"] = table["value"] - baseline
    if source is not None:
        table["effect"] /= unpatched["source"] - baseline
    table = table.sort_values(["layer", "head"], kind="stable", ignore_index=True)
    return reading.note(note_failures(table, failures, n_runs, stacklevel=4))


def _metric_of(run: Run, metric: Metric, texts: Texts) -> float:
    """Make a run and return its metric, averaged over texts."""
    return value_of(metric, run(), texts)
