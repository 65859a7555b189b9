"""Runs in which heads of a layer are changed, from that layer on.

Later layers see changed heads only through ``z`` (``hook_z``). So one pass through a layer's attention under the hooks
of a change shows the changed z of all of its heads; and from the layer on, one pass of many rows runs several changes
of several heads, each row with the z of its own. That takes a fraction of the time of a full pass for each change.

Where blocks share more than the residual stream, or the model has hooks of the user's, all passes are full. Each batch
of rows has an unmodified one too: if it is not as in the unmodified run, the passes that follow are full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil, inf
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.experiments.measuring.looking import Results, look
from tl_posdisent.experiments.measuring.text_parts import Batch, Part
from tl_posdisent.hooks.applied import applied_at
from tl_posdisent.hooks.hook_list import Hooks
from tl_posdisent.models.running.forward_pass import Hook, Pass, output_of
from tl_posdisent.models.running.partial_forward import attempted, hidden, of_texts, run_after, run_from, same
from tl_posdisent.models.running.results import at_results
from tl_posdisent.models.running.texts import TextGroup
from tl_posdisent.utils.validation import head_label

_BYTES_PER_PASS = 2**27  # of the largest tensor of all rows of a pass
_MAX_ROWS_PER_PASS = 32
_MAX_LOGITS = 2**25  # that are computed at a time, where one job does not need more
_BYTES_OF_RESULTS = 2**28  # of changed z that is stored at a time

Head = tuple[int, int]
"""A layer and one of its heads."""
HooksOf = Callable[[list[int], list[Head]], Sequence[Hook]]
"""From rows of the texts, all of one length, and heads to hooks that change these heads in these texts, without
padding. Under the hooks a head's z depends on no other head of its layer."""
Base = Callable[[list[int]], Hooks]
"""From rows of the texts, all of one length, to hooks for these texts, without padding."""


@dataclass(frozen=True, eq=False)
class Job:
    """One change of some heads."""

    name: str
    heads: tuple[Head, ...]

    @property
    def layer(self) -> int | None:
        """The layer of all heads; None for heads of several layers."""
        layers = {layer for layer, _ in self.heads}
        return layers.pop() if len(layers) == 1 else None

    @property
    def label(self) -> str:
        """The head, the layer or all layers, for messages."""
        if len(self.heads) == 1:
            return head_label(*self.heads[0])
        return "all layers" if self.layer is None else f"L{self.layer}"


Run = Callable[[], list[Any]]
"""Returns what the model returns for each group of texts of a part, or raises what the run raised."""
_Changed = dict[Head, Tensor]
"""The changed z of some heads in a batch, ``[text, pos, size]``."""


class _BatchRun:
    """The unmodified run of a batch.

    Attributes:
        output: what the model returns.
        last: what the last block returns.
        before: what the block before each of some layers returns.
        z: the results of the heads of these layers.
    """

    def __init__(self, p: Pass, batch: Batch, layers: Sequence[int], base: Sequence[Hook]) -> None:
        self.batch, self.z = batch, dict[int, Results]()
        blocks = {layer: p.model.blocks[layer - 1] for layer in layers if layer}
        n_heads, last = p.model.cfg.n_heads, p.model.blocks[-1]
        readers = [at_results(layer, n_heads, partial(self._read, layer)) for layer in layers]
        with applied_at(p.points, base), p.keeping([*blocks.values(), last]) as kept:
            self.output = p.run(batch.tokens, readers)
        self.before = {layer: kept.get(block) for layer, block in blocks.items()}
        self.last = kept.get(last)

    def _read(self, layer: int, z: Tensor) -> None:
        self.z[layer] = z.clone()


class _After:
    """What follows the last block, for several jobs at once: an unembedding may take longer to begin than to run."""

    def __init__(self, p: Pass, tokens: Tensor, last: Any) -> None:
        self._p, self._tokens, self._last = p, tokens, last

    @cached_property
    def _output(self) -> Any:
        try:
            return None if self._last is None else run_after(self._p, self._tokens, self._last)
        except torch.OutOfMemoryError:
            return None

    def rows(self, rows: slice) -> Any:
        """Return the output of one job; None for a full pass."""
        output = self._output
        return output[rows] if isinstance(output, Tensor) and len(output) == len(self._tokens) else None


class PartRuns:
    """The unmodified runs of a part's batches, and runs that differ from them from one of some layers on."""

    def __init__(
        self,
        p: Pass,
        part: Part,
        changes: Mapping[str, Hooks | HooksOf],
        layers: frozenset[int],
        base: Base | None,
        *,
        separate: bool,
    ) -> None:
        self.p, self.part, self.changes, self.base, self.separate = p, part, changes, base, separate
        self.layers = sorted(layers) if separate else []
        self.batches = [_BatchRun(p, batch, self.layers, self._base_hooks(self._rows(batch))) for batch in part.batches]

    def _rows(self, some: Batch | TextGroup) -> list[int]:
        """Return the rows of these texts in the whole batch."""
        groups = some.groups if isinstance(some, Batch) else [some]
        return [self.part.rows[row] for group in groups for row in group.rows.tolist()]

    def _base_hooks(self, rows: list[int], first: int = 0, last: float = inf) -> Hooks:
        """Return the hooks that are in force in all runs, of some layers."""
        hooks = Hooks([]) if self.base is None else self.base(rows)
        return hooks.of_heads(pair for pair in hooks.pairs if first <= pair[0] <= last)

    def of_jobs(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Run]]:
        """Yield the run of each job: for some names at a time, layer by layer."""
        of_layers = [job for job in jobs if job.layer in self.layers]
        for some in self._few_names(of_layers):
            changed = {name: self._changed(name, [job for job in some if job.name == name]) for name in _names(some)}
            for layer in sorted({job.layer for job in some if job.layer is not None}):
                in_layer = [job for job in some if job.layer == layer]
                possible = [job for job in in_layer if changed[job.name] is not None]
                yield from self._of_layer(layer, possible, changed)
                yield from ((job, partial(self._full, job)) for job in in_layer if job not in possible)
        yield from ((job, partial(self._full, job)) for job in jobs if job.layer not in self.layers)

    def _few_names(self, jobs: Sequence[Job]) -> Iterator[list[Job]]:
        """Separate the jobs by name, as many names at a time as there is memory for their changed z."""
        chosen, stored = list[Job](), 0
        for name in _names(jobs):
            of_name = [job for job in jobs if job.name == name]
            needed = len({head for job in of_name for head in job.heads}) * self._bytes_of_head()
            if chosen and stored + needed > _BYTES_OF_RESULTS:
                yield chosen
                chosen, stored = [], 0
            chosen += of_name
            stored += needed
        if chosen:
            yield chosen

    def _bytes_of_head(self) -> int:
        return sum(z[:, :, 0].nbytes for batch in self.batches for z in [*batch.z.values()][:1])

    def _changed(self, name: str, jobs: Sequence[Job]) -> list[_Changed] | None:
        """Return what a change makes of z of all heads that it changes, for each batch; None if that fails."""
        heads = sorted({head for job in jobs for head in job.heads})
        return attempted(lambda: [self._looked(run, name, heads) for run in self.batches])

    def _looked(self, run: _BatchRun, name: str, heads: list[Head]) -> _Changed:
        changed = {(layer, head): run.z[layer][:, :, head].clone() for layer, head in heads}
        for group, place in zip(run.batch.groups, run.batch.places, strict=True):
            here = (place, slice(group.tokens.shape[1]))

            def see(layer: int, z: Tensor, here: tuple[slice, slice] = here) -> None:
                for head in (head for head in heads if head[0] == layer):
                    changed[head][here] = z[:, :, head[1]]

            for layer in sorted({layer for layer, _ in heads}):
                hooks = self._hooks(name, group, [head for head in heads if head[0] == layer])
                base = self._base_hooks(self._rows(group), layer, layer)
                before = of_texts(run.before[layer], here) if layer else None
                look(self.p, group.tokens, base + hooks, {layer: run.z[layer][here]}, see, before)
        return changed

    def _hooks(self, name: str, group: Any, heads: Sequence[Head]) -> Sequence[Hook]:
        """Return the hooks of a change for some heads in a group of texts."""
        change = self.changes[name]
        if isinstance(change, Hooks):
            return change.of_heads(heads)
        return change(self._rows(group), list(heads))

    def _of_layer(
        self, layer: int, jobs: Sequence[Job], changed: Mapping[str, list[_Changed] | None]
    ) -> Iterator[tuple[Job, Run]]:
        """Yield the run of each job of a layer, in passes of several jobs from this layer on."""
        of_batches = [
            self._outputs(run, layer, jobs, {name: x[n] for name, x in changed.items() if x is not None})
            for n, run in enumerate(self.batches)
        ]
        for job, *outputs in zip(jobs, *of_batches, strict=True):
            yield job, partial(self._combined, job, outputs)

    def _outputs(
        self, run: _BatchRun, layer: int, jobs: Sequence[Job], changed: Mapping[str, _Changed]
    ) -> Iterator[Callable[[], Any]]:
        """Yield functions that return the output of a batch under each job, or None where a full pass is needed."""
        n_texts, length = run.batch.tokens.shape
        n_passes = ceil(len(jobs) / max(1, _rows_at_once(self.p.model.cfg, length) // n_texts))
        at_once = max(1, _MAX_LOGITS // (n_texts * length * max(1, getattr(self.p.model.cfg, "d_vocab", 1))))
        for n in range(n_passes):  # of about one size
            some = jobs[n * len(jobs) // n_passes : (n + 1) * len(jobs) // n_passes]
            last = self._from_layer(run, layer, some, changed) if self.separate else None
            self.separate = last is not None
            for first in range(0, len(some), at_once):
                n_jobs = min(at_once, len(some) - first)
                rows = slice(first * n_texts, (first + n_jobs) * n_texts)
                after = _After(
                    self.p, run.batch.tokens.repeat(n_jobs, 1), None if last is None else of_texts(last, rows)
                )
                yield from (partial(after.rows, slice(k * n_texts, (k + 1) * n_texts)) for k in range(n_jobs))

    def _from_layer(self, run: _BatchRun, layer: int, jobs: Sequence[Job], changed: Mapping[str, _Changed]) -> Any:
        """Return what the last block returns under some jobs, or None if an unmodified text differs in this pass."""
        tokens = run.batch.tokens
        n_texts = len(tokens)
        rows = torch.tensor([*range(n_texts)] * len(jobs) + [0], device=tokens.device)
        texts = self._rows(run.batch)
        base = self._base_hooks(texts * len(jobs) + texts[:1], layer)

        def write(z: Tensor) -> Tensor:
            z = z.clone()
            for place, job in enumerate(jobs):
                for head in job.heads:
                    z[place * n_texts : (place + 1) * n_texts, :, head[1]] = changed[job.name][head].to(z)
            return z

        hooks = [at_results(layer, self.p.model.cfg.n_heads, write)]
        before = of_texts(run.before[layer], rows) if layer else None

        def run_on() -> Any:
            with applied_at(self.p.points, base):
                return run_from(self.p, self.p.model.blocks[-1], tokens[rows], layer, before, hooks)

        try:
            last = attempted(run_on)
        except torch.OutOfMemoryError:
            return None
        if last is None:
            return None
        unmodified, clean = hidden(last)[-1], hidden(run.last)[0]
        size = clean.abs().amax(-1, keepdim=True)  # of each token: a sink's may be huge
        return last if same(unmodified / size, clean / size) else None

    def _combined(self, job: Job, of_batches: Sequence[Callable[[], Any]]) -> list[Any]:
        outputs = [output() for output in of_batches]
        return self._full(job) if any(x is None for x in outputs) else self.part.of_groups(outputs)

    def _full(self, job: Job) -> list[Any]:
        """Return the outputs of full passes under a job's hooks."""
        outputs = []
        for group in self.part.texts.groups:
            base = self._base_hooks(self._rows(group))
            with applied_at(self.p.points, base + self._hooks(job.name, group, job.heads)):
                outputs.append(output_of(self.p.model, group.tokens))
        return outputs


def _names(jobs: Sequence[Job]) -> list[str]:
    return list(dict.fromkeys(job.name for job in jobs))


def _rows_at_once(cfg: Any, length: int) -> int:
    """Choose the number of rows of a pass from a rough estimate of its largest tensor for each."""
    numbers: int = length * max(cfg.n_heads * length, 4 * getattr(cfg, "d_model", 0))
    return max(1, min(_MAX_ROWS_PER_PASS, _BYTES_PER_PASS // (4 * numbers)))
