"""Tables of patched runs: the metric of the two runs and of each patched one, and the effect between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.models.reading.forward import Hook, evaluating
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.texts import Texts, read_texts

from .metrics import Metric, measured_value, value_of
from .predictions import run_texts
from .runs import Failures, HooksOf, Runs

Units = Sequence[tuple[AttentionSpec, list[list[int]], list[list[int]]]]
"""Layers, the heads that are patched together, and for each of these the heads whose rows they are."""


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


def patch_each(
    model: Any,
    texts: Texts,
    source: tuple[Texts, Sequence[Sequence[Hook]]],
    units: Units,
    hooks_in: Callable[[AttentionSpec], HooksOf],
    metric: Metric,
    *,
    target: Texts,
    argument: str,
    kind: Callable[[AttentionSpec], Hashable],
    progress: bool,
) -> pd.DataFrame:
    """Patch some heads at a time into a run on ``texts``.

    Args:
        model, metric, progress: as in ``head_patching``.
        texts: what is run and patched.
        source: texts of the run that is patched from, and its hooks for each group of them.
        units: what is patched.
        hooks_in: for a layer, hooks that patch some of its heads; it may run the source, and is called layer by layer.
        target: texts whose tokens the metric receives.
        argument: which argument makes the two runs differ, for errors.
        kind: of the patch in a layer (``Runs.each``).
    """
    rows, failures = [], Failures()
    n_units = sum(len(patched) for _, patched, _ in units)
    with evaluating(model), tqdm(total=n_units, desc="patches", disable=not progress) as bar:
        runs = Runs(model, texts, [spec.layer for spec, _, _ in units])
        measured = {
            "source": value_of(metric, run_texts(model, *source), target),
            "baseline": value_of(metric, runs.clean, target),
        }
        check_apart(model, measured, argument)
        for spec, patched, reported in units:
            each = runs.each(spec.layer, patched, hooks_in(spec), kind(spec))
            for heads, run in zip(reported, each, strict=True):
                value = failures.attempt(partial(measured_value, metric, run, target), spec.layer, heads[0])
                rows += [(spec.layer, head, value) for head in heads]
                bar.update()
    return failures.note(as_table(rows, measured))


def check_apart(model: Any, measured: dict[str, float], argument: str) -> None:
    """Refuse two runs whose metrics differ by no more than rounding: every effect would be 0/0."""
    (one, a), (other, b) = measured.items()
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if abs(a - b) <= max(1e-5, torch.finfo(dtype).eps / 8) * max(abs(a), abs(b)):
        raise ValueError(
            f"{argument} must change the metric, but it is {a:.6g} in the {one} run and {b:.6g} in the {other} one: "
            "there is no effect to divide. Pass a metric= that they change, such as logit_difference(…) of an answer "
            "that depends on it, or make the two runs differ more"
        )


def as_table(rows: Iterable[tuple[int, int, float | None]], measured: dict[str, float]) -> pd.DataFrame:
    """Layer, head and metric of patched runs, beside those of the run patched from and of the run patched (in this
    order, by the names of their columns), and the effect: 1 as in the first, 0 as in the second."""
    table = pd.DataFrame(rows, columns=["layer", "head", "value"]).astype({"value": float})
    (source, everything), (base, nothing) = measured.items()
    table.insert(2, source, everything)
    table.insert(3, base, nothing)
    table["effect"] = (table["value"] - nothing) / (everything - nothing)
    return table.sort_values(["layer", "head"], ignore_index=True)
