"""Runs in which some heads of one layer are changed in turn, and tables of a metric without and with each change.

Whatever changes in heads of one layer, the rest of the model sees it in ``z``. So one pass through that layer gives the
changed ``z`` of all heads, and each head's run needs only what follows, in which several changes share a batch. The
outcome is checked.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product, takewhile
from math import ceil
from typing import Any, TypeVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.experiments.causal.metrics import Metric, metric_name, run_texts, value_of
from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Hook, output_of, running
from tl_posdisent.models.running.kv_cache import cache_of, of_rows
from tl_posdisent.models.running.model_parts import dtype_of, hook_name
from tl_posdisent.models.running.partial_forward import (
    attempted,
    changed_results,
    has_hooks,
    hidden,
    of_texts,
    run_after,
    run_clean,
    run_to,
)
from tl_posdisent.models.running.texts import Texts, read_texts
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.precision import apart, mismatch
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.restoring import without_gradients
from tl_posdisent.utils.validation import head_label

_BYTES_AT_ONCE, _MOST_AT_ONCE = 2**27, 32
_Measured = TypeVar("_Measured")
COUPLED = "coupled"
"""The kind of changes in which heads that are changed together with others differ from each changed alone, or change
further heads: a pass through the layer is made for each of them."""

HooksOf = Callable[[int, Sequence[int]], list[Hook]]
"""From the number of a group of texts and some heads of a layer to hooks that change these heads, and no others."""


@dataclass(frozen=True, eq=False)
class Change:
    """Hooks that change some heads, and their kind: None for changes of z itself."""

    hooks: HooksOf
    kind: Hashable = None


Z = Float[Tensor, "text pos head d_head"]
Source = Callable[[], list[Hook]]
"""Returns hooks under which z is looked at."""
Run = Callable[[], list[Any]]
"""Returns what the model returns for each group of texts, or raises what the run raised."""


class Runs:
    """An unmodified run of each group of texts, and runs that differ from it from one layer on.

    Args:
        model: in evaluation mode (``evaluating``), with the hooks of the user's, if any.
        layers: those that are to be changed.
        under: hooks for each group of texts, in force in all of these runs.
        start: earlier positions see no change, and are not run where the model takes a cache.
    """

    def __init__(
        self, model: Any, texts: Texts, layers: Sequence[int], under: Sequence[list[Hook]] | None = None, start: int = 0
    ) -> None:
        of_groups = zip(texts.groups, under or [[]] * len(texts.groups), strict=True)
        self._groups = [_Group(model, group.tokens, layers, hooks, start) for group, hooks in of_groups]
        self.clean: list[Any] = [group.clean.output for group in self._groups]

    def before(self, layer: int) -> list[Any]:
        """What the block before one of the layers returned, for each group of texts; None before the first."""
        return [group.clean.after.get(layer - 1) for group in self._groups]

    def each(self, layer: int, changed: Sequence[tuple[Sequence[int], Change]]) -> Iterator[Run]:
        """Yield a run for each of some changes of heads of a layer, which is one of ``layers``.

        One change of each kind is compared with a full pass under its hooks: the largest of the first batch that has a
        visible change of this kind. Shortcuts are dropped for kinds that differ. Where layers may share more than the
        residual stream, such as keys, this is done for each layer.
        """
        for outputs in zip(*(group.each(layer, changed, n) for n, group in enumerate(self._groups)), strict=True):
            yield partial(lambda functions: [function() for function in functions], outputs)

    @property
    def at_once(self) -> int:
        """Number of changes that share a batch."""
        return min(group.most for group in self._groups)


@dataclass(frozen=True, eq=False)
class _Case:
    """One change: hooks that make it, hooks under which z is that of the heads that it changes, and these heads."""

    hooks: Callable[[], list[Hook]]
    source: Source
    heads: Sequence[int]
    kind: Hashable


class _Group:
    """Texts of equal length, their unmodified run, and whether shortcuts have not failed."""

    def __init__(self, model: Any, tokens: Tensor, layers: Sequence[int], under: list[Hook], start: int) -> None:
        self.model, self.tokens, self.under = model, tokens, under
        with applied(model, under):
            self.clean = run_clean(model, tokens, layers)
        # Hooks of the user's may count on every block to run, and on the batch as it is.
        self.shortcuts = bool(layers) and not has_hooks(model)
        if self.shortcuts:  # is the output, of each text, a function of what the last block returns?
            again: Any = attempted(partial(self._after_blocks, self.clean.last))
            self.shortcuts = _agree(again, self.clean.output) and len(again) == len(tokens)
        later = 0 < start < tokens.shape[1] - 1
        self.cache = attempted(partial(cache_of, model, tokens[:, :start])) if later else None
        self.start = start if self.cache else 0
        self.agreeing: dict[Hashable, bool] = {None: True}
        self.at_once = texts_at_once(model.cfg, tokens.shape[1])

    @property
    def most(self) -> int:
        """Number of changes that share a batch."""
        return max(1, self.at_once // len(self.tokens))

    def each(
        self, layer: int, changed: Sequence[tuple[Sequence[int], Change]], group: int
    ) -> Iterator[Callable[[], Any]]:
        """Yield a function for each change that returns the output. Shortcuts that prove wrong are dropped."""
        waiting, most = self._cases(layer, changed, group), self.most
        held: dict[Source, Z | None] = {}
        while waiting:
            even = ceil(len(waiting) / ceil(len(waiting) / most)) if most else 0  # batches of one size
            some = self._hold_changed_z(layer, waiting[:even], held)
            if not some:
                yield partial(self._full_pass, waiting.pop(0).hooks)
                continue
            try:
                lasts = attempted(partial(self._from_the_layer, layer, some, held))
            except torch.OutOfMemoryError:
                most = len(some) // 2
                continue
            if not lasts:
                self.shortcuts = False
                continue
            outputs = [partial(self._after_blocks, last) for last in lasts]
            self._compare(some, lasts, outputs)
            wrong = {case.kind for case in some if not self.agreeing.get(case.kind, True)}
            if wrong and self.start:  # again, from the first position
                self.start = 0
                for kind in wrong:
                    del self.agreeing[kind]
                continue
            right = [*takewhile(lambda case: case.kind not in wrong, some)]  # noqa: B023 - used within this turn
            yield from outputs[: len(right)]
            waiting = waiting[len(right) :]

    @cached_property
    def separate(self) -> bool:
        """Whether the last block takes only the residual stream from those before: where any takes keys, it does."""
        last = len(self.model.blocks) - 1
        end, before = self.model.blocks[last], self.clean.after.get(last - 1)
        alone = attempted(partial(run_to, end, self.model, self.tokens, last, before, self.under))
        return alone is not None and _agree(hidden(alone), hidden(self.clean.last))

    def _hold_changed_z(self, layer: int, cases: Sequence[_Case], held: dict[Source, Z | None]) -> list[_Case]:
        """Hold z for these cases alone, and return the first of them for which that and shortcuts are possible."""
        for source in {*held} - {case.source for case in cases}:
            del held[source]
        some = []
        for case in cases:
            if not (self.shortcuts and self.agreeing.get(case.kind, True)):
                break
            if case.source not in held:
                held[case.source] = self._changed_z(layer, case.source)
            if held[case.source] is None:
                break
            some.append(case)
        return some

    def _cases(self, layer: int, changed: Sequence[tuple[Sequence[int], Change]], group: int) -> list[_Case]:
        every: dict[Change, set[int]] = {}
        for heads, change in changed:
            every.setdefault(change, set()).update(heads)
        together = {change: partial(change.hooks, group, sorted(heads)) for change, heads in every.items()}
        apart = self.shortcuts and any(change.kind is not None for change in every) and not self.separate
        cases = []
        for heads, change in changed:
            own, kind = partial(change.hooks, group, heads), (change.kind, layer if apart else None)
            if change.kind is None:
                cases.append(_Case(own, together[change], heads, None))
            elif change.kind == COUPLED:
                cases.append(_Case(own, own, range(self.model.cfg.n_heads), kind))
            else:
                cases.append(_Case(own, together[change], heads, kind))
        return cases

    def _compare(self, cases: Sequence[_Case], lasts: Sequence[Any], outputs: Sequence[Callable[[], Any]]) -> None:
        """Compare the largest change of each new kind with a full pass, and note the outcome if a change is visible."""
        clean = hidden(self.clean.last)[:, self.start :]
        for kind in dict.fromkeys(case.kind for case in cases if case.kind not in self.agreeing):
            sizes = {n: mismatch(hidden(lasts[n]), clean) for n, case in enumerate(cases) if case.kind == kind}
            largest = max(sizes, key=lambda n: sizes[n])
            found, expected = attempted(outputs[largest]), attempted(partial(self._full_pass, cases[largest].hooks))
            agreeing = _agree(found, expected)
            if not (agreeing and _agree(expected, self.clean.output)):
                self.agreeing[kind] = agreeing

    def _full_pass(self, hooks: Callable[[], list[Hook]]) -> Any:
        with without_gradients(), applied(self.model, self.under + hooks()):
            return output_of(self.model, self.tokens)

    def _changed_z(self, layer: int, source: Source) -> Z | None:
        """z of a layer under hooks; None where that takes full passes, which then tell why."""

        def changed() -> Tensor | None:
            before, hooks = self.clean.after.get(layer - 1), self.under + source()  # a sum: the lists act together
            return changed_results(self.model, self.tokens, layer, before, hooks)

        z = attempted(changed)
        by_head = (*self.tokens.shape, self.model.cfg.n_heads)
        return z if z is not None and z.ndim == 4 and z.shape[:3] == by_head else None

    def _from_the_layer(self, layer: int, cases: Sequence[_Case], changed: dict[Source, Z | None]) -> list[Any] | None:
        """Return the last block's result for each case, or None if it changes that of an unmodified text."""
        n = len(self.tokens)

        def edit(z: Tensor, hook: Any) -> Tensor:
            z = z.clone()
            for i, case in enumerate(cases):
                heads, new = list(case.heads), changed[case.source]
                assert new is not None
                z[i * n : (i + 1) * n, :, heads] = new[:, self.start :, heads].to(z.device)
            return z

        rows = torch.tensor([*range(n)] * len(cases) + [0], device=self.tokens.device)
        hooks, at = [*self.under, (hook_name(layer, "hook_z"), edit)], (rows, slice(self.start, None))
        before, end = of_texts(self.clean.after[layer - 1], at) if layer else None, self.model.blocks[-1]
        cache = of_rows(self.cache, rows) if self.start and self.cache else {}
        last = run_to(end, self.model, self.tokens[at], layer, before, hooks, **cache)
        own, clean = hidden(last)[-1], hidden(self.clean.last)[0, self.start :]
        size = clean.abs().amax(-1, keepdim=True)  # of each token: a sink's may be huge
        if not _agree(own / size, clean / size):
            return None
        return [of_texts(last, slice(i * n, (i + 1) * n)) for i in range(len(cases))]

    def _after_blocks(self, last: Any) -> Any:
        start = self.tokens.shape[1] - hidden(last).shape[1]
        output = run_after(self.model, self.tokens[:, start:], last, self.under)
        return torch.cat([self.clean.output[:, :start], output], 1) if start else output


def _agree(found: Any, expected: Any) -> bool:
    """Say whether tensors are equal up to rounding."""
    tensors = isinstance(found, Tensor) and isinstance(expected, Tensor)
    return tensors and found.shape == expected.shape and mismatch(found, expected) <= 1


def texts_at_once(cfg: Any, length: int) -> int:
    """Choose the number of texts to run in one pass from a rough estimate of its largest tensor for each."""
    numbers: int = length * max(cfg.n_heads * length, 4 * getattr(cfg, "d_model", 0))
    return max(1, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // (4 * numbers)))


class Failures:
    """Measurements that failed: their rows are NaN, and ``table.attrs["failures"]`` says why."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self.errors: list[Exception] = []
        self.n_measured = 0

    def attempt(self, measure: Callable[[], _Measured], layer: int | None, head: int | None) -> _Measured | None:
        """Return the result of ``measure``, or None if it raises an error of its input or of the model."""
        try:
            found = measure()
        except (ValueError, RuntimeError) as error:
            label = "all layers" if layer is None else f"L{layer}" if head is None else head_label(layer, head)
            self.reasons.setdefault(label, f"{type(error).__name__}: {error}")
            self.errors.append(error)
            return None
        self.n_measured += 1
        return found

    def note(self, table: pd.DataFrame) -> pd.DataFrame:
        """Add the reasons to ``table.attrs`` and warn once; raise the first error if nothing was measured."""
        if not self.errors:
            return table
        if not self.n_measured:
            raise self.errors[0]
        label, reason = next(iter(self.reasons.items()))
        warnings.warn(
            f"{len(self.reasons)} of the heads or layers could not be measured, their rows are NaN: {label}: {reason} "
            '(table.attrs["failures"] lists all)',
            stacklevel=3,
        )
        table.attrs["failures"] = self.reasons
        return table


Units = tuple[AttentionSpec, list[list[int]], Sequence[Sequence[int | None]]]
"""A layer, the heads that are changed together, and for each of these the heads whose rows they are (None: all)."""


def units_of(spec: AttentionSpec, heads: list[int], *, by_key: bool = False) -> Units:
    """Heads one by one; or where their keys or values are changed, all heads that read a key head together."""
    key = spec.key_head if by_key else int
    groups: dict[int, list[int]] = {}
    for head in sorted(heads):  # in the order of the rows
        groups.setdefault(key(head), []).append(head)
    readers = [[head for head in range(spec.n_heads) if key(head) == group] for group in groups]
    return spec, readers, list(groups.values())


def effect_table(
    reading: ModelReading,
    texts: Texts,
    units: Sequence[Units],
    hooks_in: Callable[[AttentionSpec], Sequence[HooksOf]],
    metric: Metric,
    *,
    places: Sequence[int | None] = (None,),
    kind: Callable[[AttentionSpec], Hashable] = lambda spec: None,
    start: int = 0,
    source: tuple[Texts, Sequence[Sequence[Hook]], str] | None = None,
    under: Sequence[list[Hook]] | None = None,
    target: Texts | None = None,
    progress: bool,
) -> pd.DataFrame:
    """Measure a metric with some heads at a time changed in a run on ``texts``.

    Args:
        metric, progress: as in ``head_ablation``, checked.
        hooks_in: for a layer, hooks that change some of its heads, at each of ``places``; called layer by layer, when
            they are needed.
        kind, start: of the change in a layer (``Change``), and the first position that it reaches (``Runs``).
        source: of patches: texts of the run that is patched from, its hooks for each group of them, and which argument
            makes the two runs differ, for errors.
        under: hooks for each group of texts, in force in the run that is changed.
        target: texts whose tokens the metric receives, default ``texts``.

    Returns:
        One row per layer and head (and place): ``layer``, ``head``, (``position``;) ``source`` (of patches: the metric
        of that run), ``baseline`` (without a change), ``value``, and ``effect``: value − baseline, of patches divided
        by source − baseline. ``table.attrs["metric"]`` is the metric's name (``metric_name``).
    """
    model, rows, failures, target = reading.model, [], Failures(), target or texts
    with (
        running(model),
        progress_bar(total=len(places) * sum(len(x) for _, x, _ in units), desc="heads", disable=not progress) as bar,
    ):
        runs = Runs(model, texts, [spec.layer for spec, _, _ in units], under, start)
        ends = {} if source is None else {"source": value_of(metric, run_texts(model, *source[:2]), target)}
        ends["baseline"] = value_of(metric, runs.clean, target)
        if source is not None and not apart(ends["source"], ends["baseline"], dtype_of(model)):
            raise ValueError(  # every effect would be 0/0
                f"{source[2]} must change the metric, but it is {ends['source']:.6g} in one run and "
                f"{ends['baseline']:.6g} in the other: there is no effect to divide. Pass a metric= that they change, "
                "such as logit_difference(…) of an answer that depends on it, or make the two runs differ more"
            )
        for spec, changed, reported in units:
            changes = [Change(hooks, kind(spec)) for hooks in hooks_in(spec)]
            each = runs.each(spec.layer, [(some, change) for change in changes for some in changed])
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
    return reading.note(failures.note(table.sort_values(["layer", "head"], kind="stable", ignore_index=True)))


def read_source(model: Any, texts: Texts, source: Any, attention_mask: Any) -> Texts:
    """Texts of the run that is patched from, each as long as its counterpart; same padding, if any.

    Raises:
        ValueError: another number of texts, or a text of another length.
    """
    as_ids = isinstance(source, Tensor)
    if as_ids and source.shape != texts.tokens.shape and source.shape != texts.tokens.shape[1:]:
        raise ArgumentError(
            "source", f"must have the shape of tokens, {tuple(texts.tokens.shape)}, got {tuple(source.shape)}"
        )
    with naming(tokens="source"):
        other = read_texts(model, source, attention_mask if as_ids else None)
    if other.lengths != texts.lengths:
        raise ArgumentError("source", f"must be texts as long as those of tokens, {texts.lengths}, got {other.lengths}")
    return other
