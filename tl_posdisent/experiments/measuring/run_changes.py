"""Change heads, run texts, and compare each text with its unmodified run, as every experiment on single heads does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import nan
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tl_posdisent.experiments.measuring.failures import Failure, attempt
from tl_posdisent.experiments.measuring.part_runs import Base, Head, HooksOf, Job, PartRuns, Run
from tl_posdisent.experiments.measuring.text_parts import can_pad, parts_of
from tl_posdisent.experiments.measuring.token_losses import divergence, n_predictions
from tl_posdisent.hooks.hook_list import Hooks
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.model_parts import user_hooks
from tl_posdisent.models.running.partial_forward import BlockFacts, block_facts
from tl_posdisent.models.running.texts import Texts

Item = Head | Sequence[Head]
"""A head, or heads that are changed together."""
Compare = Callable[[list[Any], Texts, list[int]], Callable[[list[Any]], Tensor]]
"""From the unmodified outputs of each group of texts, the texts, and their rows in the whole batch, to a function that
compares other outputs with these: it returns a number, or a tensor, for each text ``[text, ...]``."""


@dataclass(frozen=True, eq=False)
class Divergences:
    """What each change of heads does to each text: KL(unmodified ‖ changed), or what else was compared.

    Attributes:
        by_change: for the name of each change, values ``[head, text, ...]``; NaN where a run failed.
        unmodified: the same of the unmodified run, ``[text, ...]``.
        predictions: number of predictions of each text: tokens but the first, or 1 for a class; 0 for other outputs.
        failures: the errors of runs.
    """

    by_change: dict[str, Float64[Tensor, "head text *more"]]
    unmodified: Float64[Tensor, "*by_text"]
    predictions: Float64[Tensor, " text"]
    failures: list[Failure] = field(default_factory=list)

    def __getitem__(self, change: str) -> Float64[Tensor, "head text *more"]:
        return self.by_change[change]

    @property
    def values(self) -> Float64[Tensor, "change head text *more"]:
        """All values, where each change has the same heads."""
        return torch.stack([*self.by_change.values()])

    @property
    def n_runs(self) -> int:
        return sum(len(values) for values in self.by_change.values())

    def checked(self) -> Divergences:
        """Raise the first error of a run, if any."""
        if self.failures:
            raise self.failures[0].error
        return self


@torch.no_grad()
def run_changes(
    reading: ModelReading,
    texts: Texts,
    changes: Mapping[str, Hooks | HooksOf],
    heads: Sequence[Item] | Mapping[str, Sequence[Item]],
    compare: Compare = divergence,
    *,
    together: bool = False,
    facts: BlockFacts | None = None,
    base: Base | None = None,
    bar: Any = None,
) -> Divergences:
    """Change heads one by one, or some together, and compare each text with its unmodified run.

    Every value of a text is that of this text alone under the hooks of this change on this head alone. A run begins at
    the layer of its heads; heads of several layers that are changed together take a full pass.

    Args:
        reading: the model.
        changes: hooks by name, of which the interventions on each head are used alone; or functions that make the hooks
            for some texts and heads.
        heads: what is changed at a time: heads, or sequences of heads that are changed together; the same for all
            changes, or those of each by its name.
        compare: what is compared.
        together: whether ``compare`` needs all texts at once.
        facts: what short passes show about the model, if that is known.
        base: hooks that are in force in all of these runs, the unmodified one too.
        bar: a progress bar, which counts runs of a text.
    """
    own = heads if isinstance(heads, Mapping) else dict.fromkeys(changes, heads)
    jobs = [Job(name, _heads_of(item)) for name in changes for item in own[name]]
    n_texts = len(texts.tokens)
    values: dict[Job, dict[int, Tensor]] = {job: {} for job in jobs}
    unmodified, predictions = dict[int, Tensor](), torch.zeros(n_texts, dtype=torch.float64)
    failures: dict[Job, Failure] = {}
    if not jobs:
        return Divergences({name: predictions.new_zeros(0, n_texts) for name in changes}, predictions, predictions)
    with running(reading.model) as p:
        facts = facts or block_facts(p)
        together = together or bool(user_hooks(p.model))  # which may combine the texts of a batch
        padded = base is None and can_pad(reading, facts)
        parts = parts_of(p.model, texts, padded=padded, together=together)
        separate, heard = facts.separate, facts.heard.intersection(job.layer for job in jobs if job.layer is not None)
        for part in parts:
            runs = PartRuns(p, part, changes, heard, base, separate=separate)
            outputs = part.of_groups([batch.output for batch in runs.batches])
            measure = compare(outputs, part.texts, part.rows)
            predictions[part.rows] = n_predictions(outputs, part.texts)
            _put(unmodified, part.rows, measure(outputs))
            for job, run in runs.of_jobs(jobs):
                found = attempt(partial(_compared, measure, run), job.label, job.name)
                if isinstance(found, Failure):
                    failures.setdefault(job, found)
                else:
                    _put(values[job], part.rows, found)
                if bar is not None:
                    bar.update(len(part.rows))
            separate = runs.separate
    whole = _stacked(unmodified, unmodified)
    by_text = {job: _stacked(of_job, unmodified) for job, of_job in values.items()}
    by_change = {
        name: torch.stack([by_text[job] for job in jobs if job.name == name]) if own[name] else whole[None][:0]
        for name in changes
    }
    return Divergences(by_change, whole, predictions, [*failures.values()])


def _compared(measure: Callable[[list[Any]], Tensor], run: Run) -> Tensor:
    return measure(run())


def _put(by_row: dict[int, Tensor], rows: Sequence[int], found: Tensor) -> None:
    by_row.update(zip(rows, found.double().cpu(), strict=True))


def _stacked(by_row: Mapping[int, Tensor], unmodified: Mapping[int, Tensor]) -> Float64[Tensor, "*by_text"]:
    """Stack the values of all texts, which may have one for each token; NaN where there is none."""
    filled = [by_row.get(row, torch.full_like(unmodified[row], nan)) for row in sorted(unmodified)]
    return torch.stack(filled) if filled[0].ndim == 0 else pad_sequence(filled, batch_first=True, padding_value=nan)


def _heads_of(item: Any) -> tuple[Head, ...]:
    single = isinstance(item, tuple) and isinstance(item[0], int)
    return (item,) if single else tuple(sorted(item))
