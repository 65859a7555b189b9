"""Tables of runs in which heads are changed in turn: a metric without and with each change, and the effect."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import pandas as pd
from torch import Tensor

from tl_posdisent.models.reading.forward import Hook, dtype_of, evaluating
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.texts import Texts, read_texts
from tl_posdisent.utils.precision import apart
from tl_posdisent.utils.tables import progress_bar

from .metrics import Metric, value_of
from .predictions import run_texts
from .runs import Failures, HooksOf, Run, Runs

Units = tuple[AttentionSpec, list[list[int]], Sequence[Sequence[int | None]]]
"""A layer, the heads that are changed together, and for each of these the heads whose rows they are (None: all)."""


def units_of(spec: AttentionSpec, heads: list[int], *, by_key: bool = False) -> Units:
    """Heads one by one; or where their keys or values are changed, all heads that read a key head together."""
    groups: dict[int, list[int]] = {}
    for head in sorted(heads):  # in the order of the rows
        groups.setdefault(spec.key_head(head) if by_key else head, []).append(head)
    if not by_key:
        return spec, list(groups.values()), list(groups.values())
    readers = [[head for head in range(spec.n_heads) if spec.key_head(head) == group] for group in groups]
    return spec, readers, list(groups.values())


def effect_table(
    reading: ModelReading,
    texts: Texts,
    units: Sequence[Units],
    hooks_in: Callable[[AttentionSpec], HooksOf],
    metric: Metric,
    *,
    kind: Callable[[AttentionSpec], Hashable] = lambda spec: None,
    source: tuple[Texts, Sequence[Sequence[Hook]], str] | None = None,
    under: Sequence[list[Hook]] | None = None,
    target: Texts | None = None,
    progress: bool,
) -> pd.DataFrame:
    """Measure a metric with some heads at a time changed in a run on ``texts``.

    Args:
        reading: of the model.
        metric, progress: as in ``head_ablation``, checked.
        texts: what is run and changed.
        units: what is changed.
        hooks_in: for a layer, hooks that change some of its heads; called layer by layer, when they are needed.
        kind: of the change in a layer (``Runs.each``).
        source: of patches: texts of the run that is patched from, its hooks for each group of them, and which argument
            makes the two runs differ, for errors.
        under: hooks for each group of texts, in force in the run that is changed.
        target: texts whose tokens the metric receives, default ``texts``.

    Returns:
        One row per layer and head: ``layer``, ``head``, ``source`` (of patches: the metric of that run), ``baseline``
        (without a change), ``value``, and ``effect``: value − baseline, of patches divided by source − baseline.
    """
    model, rows, failures, target = reading.model, [], Failures(), target or texts
    with (
        evaluating(model),
        progress_bar(total=sum(len(x) for _, x, _ in units), desc="heads", disable=not progress) as bar,
    ):
        runs = Runs(model, texts, [spec.layer for spec, _, _ in units], under)
        ends = {} if source is None else {"source": value_of(metric, run_texts(model, *source[:2]), target)}
        ends["baseline"] = value_of(metric, runs.clean, target)
        if source is not None:
            _check_apart(model, ends["source"], ends["baseline"], source[2])
        for spec, changed, reported in units:
            each = runs.each(spec.layer, changed, hooks_in(spec), kind(spec))
            for heads, run in zip(reported, each, strict=True):
                value = failures.attempt(partial(_value, metric, run, target), spec.layer, heads[0])
                rows += [(spec.layer, head, *ends.values(), value) for head in heads]
                bar.update()
    table = pd.DataFrame(rows, columns=["layer", "head", *ends, "value"]).astype({"value": float})
    table["effect"] = table["value"] - ends["baseline"]
    if source is not None:
        table["effect"] /= ends["source"] - ends["baseline"]
    return reading.note(failures.note(table.sort_values(["layer", "head"], ignore_index=True)))


def _value(metric: Metric, run: Run, texts: Texts) -> float:
    return value_of(metric, run(), texts)


def _check_apart(model: Any, a: float, b: float, argument: str) -> None:
    """Refuse two runs whose metrics differ by no more than rounding: every effect would be 0/0."""
    if not apart(a, b, dtype_of(model)):
        raise ValueError(
            f"{argument} must change the metric, but it is {a:.6g} in one run and {b:.6g} in the other: there is no "
            "effect to divide. Pass a metric= that they change, such as logit_difference(…) of an answer that depends "
            "on it, or make the two runs differ more"
        )


def read_source(model: Any, texts: Texts, source: Any, attention_mask: Any) -> Texts:
    """Texts of the run that is patched from, each as long as its counterpart; same padding, if any.

    Raises:
        ValueError: another number of texts, or a text of another length.
    """
    as_ids = isinstance(source, Tensor)
    if as_ids and source.shape != texts.tokens.shape and source.shape != texts.tokens.shape[1:]:
        raise ValueError(
            f"source must have the shape of tokens, {tuple(texts.tokens.shape)}, got {tuple(source.shape)}"
        )
    other = read_texts(model, source, attention_mask if as_ids else None)
    if other.lengths != texts.lengths:
        raise ValueError(f"source must be texts as long as those of tokens, {texts.lengths}, got {other.lengths}")
    return other
