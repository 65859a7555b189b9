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
from dataclasses import dataclass
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

_BYTES_AT_ONCE, _MOST_AT_ONCE = 2**27, 32
_Measured = TypeVar("_Measured")

HooksOf = Callable[[int, Sequence[int]], list[Hook]]
"""From the number of a group of texts and some heads of a layer to hooks that change these heads."""


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
    hooks: HooksOf


Run = Callable[[], list[Any]]
"""Returns what the model returns for each group of texts, or raises what the run raised."""


class Runs:
    """An unmodified run of each group of texts, and runs that differ from it from one layer on.

    A batch serves as many changes as fit into it. Besides the unmodified run, comparisons cost a full pass for each
    name of changes, one text in each batch, and three passes of one text to find whether blocks share more than the
    residual stream.

    Args:
        model: in evaluation mode (``running``), with the hooks of the user's, if any.
        layers: those whose heads are to be changed.
        under: hooks for each group of texts, in force in all of these runs.
    """

    def __init__(
        self, model: Any, texts: Texts, layers: Sequence[int], under: Sequence[list[Hook]] | None = None
    ) -> None:
        under = under or [[]] * len(texts.groups)
        groups = zip(texts.groups, under, strict=True)
        self._groups = [_Group(model, n, group.tokens, layers, hooks) for n, (group, hooks) in enumerate(groups)]
        self.clean: list[Any] = [group.clean.output for group in self._groups]

    def each(self, layer: int, changes: Sequence[Change]) -> Iterator[Run]:
        """Yield the run of each of some changes of one of the layers."""
        batches = zip(*(group.last_blocks(layer, changes) for group in self._groups), strict=True)
        for change, of_groups in zip(changes, batches, strict=True):
            yield partial(self._outputs, change, of_groups)

    def _outputs(self, change: Change, of_groups: Sequence[Any]) -> list[Any]:
        return [group.output(change, last) for group, last in zip(self._groups, of_groups, strict=True)]


class _Group:
    """Texts of equal length and their unmodified run."""

    def __init__(self, model: Any, number: int, tokens: Tensor, layers: Sequence[int], under: list[Hook]) -> None:
        self.model, self.number, self.tokens, self.under = model, number, tokens, under
        with applied(model, under):
            self.clean = run_clean(model, tokens, layers)
        self.compared = set[Hashable]()
        # Hooks of the user's may count on every block to run, and on the batch as it is.
        self.in_batches = bool(layers) and not has_hooks(model) and self._is_last_block_enough()
        if self.in_batches and len(layers) > 1:  # else the comparison is made in the one layer
            self.in_batches = bool(attempted(partial(are_separate, model, tokens[:1])))

    def _is_last_block_enough(self) -> bool:
        """Say whether the output, of each text, is a function of what the last block returns."""
        again: Any = attempted(partial(self._after_blocks, self.clean.last))
        return _agree(again, self.clean.output) and len(again) == len(self.tokens)

    def last_blocks(self, layer: int, changes: Sequence[Change]) -> Iterator[Any]:
        """Yield what the last block returns under each change, or None where a full pass must be made."""
        size = max(1, texts_at_once(self.model.cfg, self.tokens.shape[1]) // len(self.tokens))
        n_batches = ceil(len(changes) / size)
        for n in range(n_batches):  # of about one size
            batch = changes[n * len(changes) // n_batches : (n + 1) * len(changes) // n_batches]
            yield from self._in_a_batch(layer, batch) if self.in_batches else [None] * len(batch)

    def output(self, change: Change, last: Any) -> Any:
        """Return the model's output under a change, given what the last block returns (None: by a full pass)."""
        if last is not None:
            return self._after_blocks(last)
        hooks = self.under + change.hooks(self.number, change.heads)  # a sum: lists of this package act together
        with torch.no_grad(), applied(self.model, hooks):
            return output_of(self.model, self.tokens)

    def _after_blocks(self, last: Any) -> Any:
        return run_after(self.model, self.tokens, last, self.under)

    def _in_a_batch(self, layer: int, changes: Sequence[Change]) -> list[Any]:
        """Return what the last block returns under each change, from one pass that begins at the layer."""
        changed = [attempted(partial(self._changed_z, layer, change)) for change in changes]
        possible = [n for n, z in enumerate(changed) if z is not None]  # a full pass shows why the others fail
        of_changes: list[Any] = [None] * len(changes)
        last = self._from_layer(layer, [z for z in changed if z is not None]) if possible else None
        if last is None:
            self.in_batches = self.in_batches and not possible
            return of_changes
        n_texts = len(self.tokens)
        for place, n in enumerate(possible):
            of_changes[n] = of_texts(last, slice(place * n_texts, (place + 1) * n_texts))
        self.in_batches = self._agrees(changes, of_changes)
        return of_changes if self.in_batches else [None] * len(changes)

    def _changed_z(self, layer: int, change: Change) -> Float[Tensor, "text pos head d_head"] | None:
        hooks = self.under + change.hooks(self.number, change.heads)
        return changed_results(self.model, self.tokens, layer, self.clean.after.get(layer - 1), hooks)

    def _from_layer(self, layer: int, changed: Sequence[Tensor]) -> Any:
        """Return the last block's output for all changes, or None if it changes that of an unmodified text."""
        n_changed = len(changed) * len(self.tokens)

        def write(z: Tensor) -> Tensor:
            return torch.cat([*(new.to(z) for new in changed), z[n_changed:]])

        try:
            last = attempted(partial(self._run_rows, layer, len(changed), write))
        except torch.OutOfMemoryError:
            return None
        if last is None:
            return None
        unmodified, clean = hidden(last)[-1], hidden(self.clean.last)[0]
        size = clean.abs().amax(-1, keepdim=True)  # of each token: a sink's may be huge
        return last if _agree(unmodified / size, clean / size) else None

    def _run_rows(self, layer: int, n_changes: int, write: Callable[[Tensor], Tensor]) -> Any:
        """Run all texts once for each change, and an unmodified text, from a layer on."""
        rows = torch.tensor([*range(len(self.tokens))] * n_changes + [0], device=self.tokens.device)
        before = of_texts(self.clean.after[layer - 1], rows) if layer else None
        hooks = [*self.under, at_results(layer, self.model.cfg.n_heads, write)]
        return run_to(self.model.blocks[-1], self.model, self.tokens[rows], layer, before, hooks)

    def _agrees(self, changes: Sequence[Change], of_changes: Sequence[Any]) -> bool:
        """Compare the largest change of each name with a full pass, until one with a visible effect agrees."""
        clean = hidden(self.clean.last)
        for name in dict.fromkeys(change.name for change in changes if change.name not in self.compared):
            sizes = {
                n: mismatch(hidden(last), clean)
                for n, (change, last) in enumerate(zip(changes, of_changes, strict=True))
                if change.name == name and last is not None
            }
            if not sizes:
                continue
            largest = max(sizes, key=lambda n: sizes[n])
            in_batch = attempted(partial(self.output, changes[largest], of_changes[largest]))
            in_full = attempted(partial(self.output, changes[largest], None))
            if not _agree(in_batch, in_full):
                return False
            if not _agree(in_full, self.clean.output):
                self.compared.add(name)
        return True


@torch.no_grad()
def run_under(model: Any, tokens: Int[Tensor, "batch pos"], hooks: Sequence[Hook]) -> Any:
    """Run the model under hooks, and return its output."""
    with running(model), applied(model, hooks):
        return output_of(model, tokens)


def run_texts(model: Any, texts: Texts, hooks: Sequence[Sequence[Hook]] | None = None) -> list[Any]:
    """Run the model on each group of texts, under the group's hooks if any, and return the outputs."""
    hooks = [[]] * len(texts.groups) if hooks is None else hooks
    return [run_under(model, group.tokens, some) for group, some in zip(texts.groups, hooks, strict=True)]


def _agree(output: Any, expected: Any) -> bool:
    """Say whether tensors are equal up to rounding."""
    tensors = isinstance(output, Tensor) and isinstance(expected, Tensor)
    return tensors and output.shape == expected.shape and mismatch(output, expected) <= 1


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
            measured = measure()
        except (ValueError, RuntimeError) as error:
            label = "all layers" if layer is None else f"L{layer}" if head is None else head_label(layer, head)
            self.reasons.setdefault(label, f"{type(error).__name__}: {error}")
            self.errors.append(error)
            return None
        self.n_measured += 1
        return measured

    def note(self, table: pd.DataFrame, stacklevel: int = 3) -> pd.DataFrame:
        """Add the reasons to ``table.attrs`` and warn once; raise the first error if nothing was measured.

        ``stacklevel`` is that of ``warnings.warn``: 3 if this is called by a function that users call.
        """
        if not self.errors:
            return table
        if not self.n_measured:
            raise self.errors[0]
        label, reason = next(iter(self.reasons.items()))
        warnings.warn(
            f"{len(self.reasons)} of the heads or layers could not be measured, their rows are NaN: {label}: {reason} "
            '(table.attrs["failures"] lists all)',
            stacklevel=stacklevel,
        )
        table.attrs["failures"] = self.reasons
        return table
