"""Runs of the whole model in which heads of one layer are changed. Only this file makes them.

Later layers see changed heads only through ``z`` (``hook_z``). So the changes of a layer are run in batches, from the
layer on: one pass through the layer's attention under the hooks of a change gives its ``z``, and one pass from there
on serves several changes. That takes a fraction of the time of a full pass for each change.

Whether it is right is compared, once for each kind of change: the largest change of a batch is also run by a full pass
under its hooks. Each batch has an unmodified text as well, which must give the values of the unmodified run. Where one
of these differs, where blocks share more than the residual stream, or where the model has hooks of the user's, every
change is run by a full pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, TypeVar

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.running.forward_pass import Hook, output_of, running
from tl_posdisent.models.running.partial_forward import (
    are_separate,
    attempted,
    changed_results,
    has_hooks,
    hidden,
    of_texts,
    run_after,
    run_clean,
    run_to,
)
from tl_posdisent.models.running.results import at_results
from tl_posdisent.models.running.texts import Texts
from tl_posdisent.utils.precision import mismatch
from tl_posdisent.utils.validation import head_label

_BYTES_PER_PASS = 2**27  # of the largest tensor of all texts of a pass
_MAX_TEXTS_PER_PASS = 32
_Measured = TypeVar("_Measured")

GroupHooks = Callable[[int, Sequence[int]], list[Hook]]
"""From the number of a group of texts and heads of a layer to hooks that change these heads."""


@dataclass(frozen=True, eq=False)
class Change:
    """A change of heads of a layer.

    Attributes:
        name: changes of one name act at the same hook points: one of them is compared with a full pass.
        heads: the heads that change.
        hooks: hooks that change them, in one layer's attention.
    """

    name: Hashable
    heads: tuple[int, ...]
    hooks: GroupHooks


Run = Callable[[], list[Any]]
"""Returns what the model returns for each group of texts, or raises what the run raised."""


@dataclass(frozen=True)
class Shortcut:
    """What comparisons have shown so far about running the changes of a group of texts in batches.

    Attributes:
        valid: whether changes may be run in batches; if not, each is run by a full pass.
        compared: names of changes with an effect, of which a batch agreed with a full pass.
    """

    valid: bool
    compared: frozenset[Hashable] = frozenset()


Shortcuts = tuple[Shortcut, ...]
"""One for each group of texts."""


class Runs:
    """An unmodified run of each group of texts, and runs that differ from it from one layer on.

    A batch serves as many changes as fit into it. Besides the unmodified run, comparisons cost a full pass for each
    name of changes, one text in each batch, and three passes of one text to find whether blocks share more than the
    residual stream.

    Args:
        model: in evaluation mode (``running``), with the hooks of the user's, if any.
        layers: those whose heads are to be changed.
        hooks: hooks for each group of texts, in force in all of these runs.

    Attributes:
        clean: what the model returns for each group of texts in the unmodified run.
        shortcuts: whether batches are worth trying, before any change was run.
    """

    def __init__(
        self, model: Any, texts: Texts, layers: Sequence[int], hooks: Sequence[list[Hook]] | None = None
    ) -> None:
        hooks = hooks or [[]] * len(texts.groups)
        groups = zip(texts.groups, hooks, strict=True)
        self._groups = [
            _Group(model, n, group.tokens, layers, group_hooks) for n, (group, group_hooks) in enumerate(groups)
        ]
        self.clean: list[Any] = [group.clean.output for group in self._groups]
        self.shortcuts: Shortcuts = tuple(group.shortcut() for group in self._groups)

    def changed(self, layer: int, changes: Sequence[Change], shortcuts: Shortcuts) -> Iterator[tuple[Run, Shortcuts]]:
        """Yield the run of each change of a layer, and what is known of batches after it.

        Pass that on with the next layer's changes, so that changes of one name are compared once.
        """
        batches = [
            group.last_blocks(layer, changes, shortcut) for group, shortcut in zip(self._groups, shortcuts, strict=True)
        ]
        for change, *of_groups in zip(changes, *batches, strict=True):
            last_blocks = [last for last, _ in of_groups]
            yield partial(self._outputs, change, last_blocks), tuple(shortcut for _, shortcut in of_groups)

    def _outputs(self, change: Change, last_blocks: Sequence[Any]) -> list[Any]:
        return [group.output(change, last) for group, last in zip(self._groups, last_blocks, strict=True)]


class _Group:
    """Texts of equal length and their unmodified run."""

    def __init__(self, model: Any, number: int, tokens: Tensor, layers: Sequence[int], hooks: list[Hook]) -> None:
        self.model, self.number, self.tokens, self.layers, self.hooks = model, number, tokens, layers, hooks
        with applied(model, hooks):
            self.clean = run_clean(model, tokens, layers)

    def shortcut(self) -> Shortcut:
        """Find whether batches are worth trying; the user's hooks may count on each block, and the batch as it is."""
        valid = bool(self.layers) and not has_hooks(self.model) and self._is_last_block_enough()
        if valid and len(self.layers) > 1:  # else the comparison is made in the one layer
            valid = bool(attempted(partial(are_separate, self.model, self.tokens[:1])))
        return Shortcut(valid)

    def _is_last_block_enough(self) -> bool:
        """Say whether the output, of each text, is a function of what the last block returns."""
        again: Any = attempted(partial(self._after_blocks, self.clean.last))
        return _agree(again, self.clean.output) and len(again) == len(self.tokens)

    def last_blocks(self, layer: int, changes: Sequence[Change], shortcut: Shortcut) -> Iterator[tuple[Any, Shortcut]]:
        """Yield what the last block returns under each change, or None for a full pass, and what is known after it."""
        size = max(1, texts_at_once(self.model.cfg, self.tokens.shape[1]) // len(self.tokens))
        n_batches = ceil(len(changes) / size)
        for n in range(n_batches):  # of about one size
            batch = changes[n * len(changes) // n_batches : (n + 1) * len(changes) // n_batches]
            last_blocks: list[Any] = [None] * len(batch)
            if shortcut.valid:
                last_blocks, shortcut = self._run_batch(layer, batch, shortcut)
            yield from ((last, shortcut) for last in last_blocks)

    def output(self, change: Change, last: Any) -> Any:
        """Return the model's output under a change, given what the last block returns (None: by a full pass)."""
        if last is not None:
            return self._after_blocks(last)
        hooks = self.hooks + change.hooks(self.number, change.heads)  # a sum: lists of this package act together
        with torch.no_grad(), applied(self.model, hooks):
            return output_of(self.model, self.tokens)

    def _after_blocks(self, last: Any) -> Any:
        return run_after(self.model, self.tokens, last, self.hooks)

    def _run_batch(self, layer: int, changes: Sequence[Change], shortcut: Shortcut) -> tuple[list[Any], Shortcut]:
        """Return what the last block returns under each change, from one pass that begins at the layer."""
        changed = [attempted(partial(self._changed_z, layer, change)) for change in changes]
        possible = [n for n, z in enumerate(changed) if z is not None]  # a full pass shows why the others fail
        last_blocks: list[Any] = [None] * len(changes)
        last = self._from_layer(layer, [z for z in changed if z is not None]) if possible else None
        if last is None:
            return last_blocks, replace(shortcut, valid=not possible)
        n_texts = len(self.tokens)
        for place, n in enumerate(possible):
            last_blocks[n] = of_texts(last, slice(place * n_texts, (place + 1) * n_texts))
        shortcut = self._compare(changes, last_blocks, shortcut)
        return last_blocks if shortcut.valid else [None] * len(changes), shortcut

    def _changed_z(self, layer: int, change: Change) -> Float[Tensor, "text pos head d_head"] | None:
        hooks = self.hooks + change.hooks(self.number, change.heads)
        return changed_results(self.model, self.tokens, layer, self.clean.after.get(layer - 1), hooks)

    def _from_layer(self, layer: int, changed: Sequence[Tensor]) -> Any:
        """Return the last block's output for all changes, or None if it changes that of an unmodified text."""
        try:
            last = attempted(partial(self._run_rows, layer, changed))
        except torch.OutOfMemoryError:
            return None
        if last is None:
            return None
        unmodified, clean = hidden(last)[-1], hidden(self.clean.last)[0]
        size = clean.abs().amax(-1, keepdim=True)  # of each token: a sink's may be huge
        return last if _agree(unmodified / size, clean / size) else None

    def _run_rows(self, layer: int, changed: Sequence[Tensor]) -> Any:
        """Run all texts once for each change of z, and an unmodified text, from a layer on."""
        rows = torch.tensor([*range(len(self.tokens))] * len(changed) + [0], device=self.tokens.device)
        before = of_texts(self.clean.after[layer - 1], rows) if layer else None
        hooks = [*self.hooks, at_results(layer, self.model.cfg.n_heads, partial(_write_first, changed))]
        return run_to(self.model.blocks[-1], self.model, self.tokens[rows], layer, before, hooks)

    def _compare(self, changes: Sequence[Change], last_blocks: Sequence[Any], shortcut: Shortcut) -> Shortcut:
        """Compare the largest change of each name with a full pass, until one with a visible effect agrees."""
        clean = hidden(self.clean.last)
        compared = shortcut.compared
        for name in dict.fromkeys(change.name for change in changes if change.name not in shortcut.compared):
            sizes = {
                n: mismatch(hidden(last), clean)
                for n, (change, last) in enumerate(zip(changes, last_blocks, strict=True))
                if change.name == name and last is not None
            }
            if not sizes:
                continue
            largest = max(sizes, key=lambda n: sizes[n])
            in_batch = attempted(partial(self.output, changes[largest], last_blocks[largest]))
            in_full = attempted(partial(self.output, changes[largest], None))
            if not _agree(in_batch, in_full):
                return Shortcut(False, compared)
            if not _agree(in_full, self.clean.output):
                compared |= {name}
        return Shortcut(True, compared)


def _write_first(changed: Sequence[Tensor], z: Tensor) -> Tensor:
    """Replace the first rows of z by those of all changes, and keep the others."""
    n_changed = sum(len(x) for x in changed)
    return torch.cat([*(x.to(z) for x in changed), z[n_changed:]])


@torch.no_grad()
def run_under(model: Any, tokens: Int[Tensor, "batch pos"], hooks: Sequence[Hook]) -> Any:
    """Run the model under hooks, and return its output."""
    with running(model), applied(model, hooks):
        return output_of(model, tokens)


def run_texts(model: Any, texts: Texts, hooks: Sequence[Sequence[Hook]] | None = None) -> list[Any]:
    """Run the model on each group of texts, under the group's hooks if any, and return the outputs."""
    hooks = [[]] * len(texts.groups) if hooks is None else hooks
    return [run_under(model, group.tokens, group_hooks) for group, group_hooks in zip(texts.groups, hooks, strict=True)]


def _agree(output: Any, expected: Any) -> bool:
    """Say whether tensors are equal up to rounding."""
    tensors = isinstance(output, Tensor) and isinstance(expected, Tensor)
    return tensors and output.shape == expected.shape and mismatch(output, expected) <= 1


def texts_at_once(cfg: Any, length: int) -> int:
    """Choose the number of texts to run in one pass from a rough estimate of its largest tensor for each."""
    numbers: int = length * max(cfg.n_heads * length, 4 * getattr(cfg, "d_model", 0))
    return max(1, min(_MAX_TEXTS_PER_PASS, _BYTES_PER_PASS // (4 * numbers)))


@dataclass(frozen=True, eq=False)
class Failure:
    """The error of a measurement, and the head, layer or layers whose row it was to fill, as a label."""

    label: str
    error: Exception


def attempt(measure: Callable[[], _Measured], layer: int | None, head: int | None) -> _Measured | Failure:
    """Return the result of ``measure``, or the failure if it raises an error of its input or of the model."""
    try:
        return measure()
    except (ValueError, RuntimeError) as error:
        label = "all layers" if layer is None else f"L{layer}" if head is None else head_label(layer, head)
        return Failure(label, error)


def note_failures(
    table: pd.DataFrame, failures: Sequence[Failure], n_attempts: int, stacklevel: int = 3
) -> pd.DataFrame:
    """Say in ``table.attrs["failures"]`` why rows are NaN, and warn once; raise the first error if all attempts failed.

    ``stacklevel`` is that of ``warnings.warn``: 3 if this is called by a function that users call.
    """
    if not failures:
        return table
    if len(failures) == n_attempts:
        raise failures[0].error
    reasons: dict[str, str] = {}
    for failure in failures:
        reasons.setdefault(failure.label, f"{type(failure.error).__name__}: {failure.error}")
    label, reason = next(iter(reasons.items()))
    warnings.warn(
        f"{len(reasons)} of the heads or layers could not be measured, their rows are NaN: {label}: {reason} "
        '(table.attrs["failures"] lists all)',
        stacklevel=stacklevel,
    )
    table.attrs["failures"] = reasons
    return table
