"""Tables of a metric without and with each of some changes of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import pandas as pd
from tqdm.auto import tqdm

from tl_posdisent.experiments.measuring.metrics import Metric, metric_name, value_of
from tl_posdisent.experiments.measuring.runs import Change, Failures, HooksOf, Runs, run_texts
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Hook, running
from tl_posdisent.models.running.model_parts import dtype_of
from tl_posdisent.models.running.texts import Texts
from tl_posdisent.utils.precision import apart

Units = tuple[AttentionSpec, list[list[int]], Sequence[Sequence[int | None]]]
"""A layer, the heads that are changed together, and for each of these the heads whose rows they are (None: all)."""


@dataclass(frozen=True, eq=False)
class PatchRuns:
    """The run that heads are patched from, and what patching needs of the run that is patched.

    Attributes:
        texts: its texts.
        argument: the argument that makes the two runs differ, for errors.
        hooks: its hooks, for each group of texts.
        under: hooks in the run that is patched, for each group of texts.
        target: texts whose tokens the metric receives, default those of the run that is patched.
    """

    texts: Texts
    argument: str
    hooks: Sequence[Sequence[Hook]] | None = None
    under: Sequence[list[Hook]] | None = None
    target: Texts | None = None


def units_of(spec: AttentionSpec, heads: list[int], *, by_key: bool = False) -> Units:
    """Heads one by one; or where their keys or values are changed, all heads that read a key head together."""
    key = spec.key_head if by_key else int
    groups: dict[int, list[int]] = {}
    for head in heads:
        groups.setdefault(key(head), []).append(head)
    readers = [[head for head in range(spec.n_heads) if key(head) == group] for group in groups]
    return spec, readers, list(groups.values())


def rows_by_head(
    reading: ModelReading,
    texts: Texts,
    units: Sequence[Units],
    hooks_in: Callable[[AttentionSpec], Sequence[HooksOf]],
    metric: Metric,
    *,
    places: Sequence[int | None] = (None,),
    source: PatchRuns | None = None,
    progress: bool,
) -> pd.DataFrame:
    """Measure a metric with some heads at a time changed in a run on ``texts``.

    Args:
        metric, progress: as in ``head_ablation``, checked.
        hooks_in: for a layer, hooks that change some of its heads, at each of ``places``; called layer by layer, when
            they are needed.
        source: the runs, of patches.

    Returns:
        One row per layer and head (and place): ``layer``, ``head``, (``position``;) ``source`` (of patches: the metric
        of that run), ``baseline`` (without a change), ``value``, and ``effect``: value − baseline, of patches divided
        by source − baseline. ``table.attrs["metric"]`` is the metric's name (``metric_name``).
    """
    model, rows, failures = reading.model, [], Failures()
    under, target = (None, texts) if source is None else (source.under, source.target or texts)
    with (
        running(model),
        tqdm(total=len(places) * sum(len(x) for _, x, _ in units), desc="heads", disable=not progress) as bar,
    ):
        runs = Runs(model, texts, [spec.layer for spec, _, _ in units], under)
        ends = {"baseline": value_of(metric, runs.clean, target)}
        if source is not None:
            ends = {"source": value_of(metric, run_texts(model, source.texts, source.hooks), target), **ends}
            if not apart(ends["source"], ends["baseline"], dtype_of(model)):
                raise ValueError(  # every effect would be 0/0
                    f"{source.argument} must change the metric, but it is {ends['source']:.6g} in one run and "
                    f"{ends['baseline']:.6g} in the other: there is no effect to divide. Pass a metric= that they "
                    "change, such as logit_difference(…) of an answer that depends on it, or make the two runs differ "
                    "more"
                )
        for spec, changed, reported in units:
            changes = [Change("change", tuple(some), hooks) for hooks in hooks_in(spec) for some in changed]
            each = runs.each(spec.layer, changes)
            for (place, heads), run in zip(product(places, reported), each, strict=True):
                value = failures.attempt(
                    partial(lambda run: value_of(metric, run(), target), run), spec.layer, heads[0]
                )
                rows += [(spec.layer, head, place, *ends.values(), value) for head in heads]
                bar.update()
    table = pd.DataFrame(rows, columns=["layer", "head", "position", *ends, "value"]).astype({"value": float})
    table = table.drop(columns="position") if None in places else table
    table.attrs["metric"] = metric_name(metric)
    table["effect"] = table["value"] - ends["baseline"]
    if source is not None:
        table["effect"] /= ends["source"] - ends["baseline"]
    table = table.sort_values(["layer", "head"], kind="stable", ignore_index=True)
    return reading.note(failures.note(table, stacklevel=4))
