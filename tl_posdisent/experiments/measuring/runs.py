"""Runs of the whole model in which heads of one layer are changed. Only this file makes them.

Later layers see changed heads only through ``z`` (``hook_z``). So a change can be run in two ways: by a full pass under
its hooks; or from the layer on, several changes in a batch, with the ``z`` that a pass up to this layer computes under
the hooks. The second way takes a fraction of the time. It is compared with the first, and a layer where the two differ
is run by full passes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice, takewhile
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
from tl_posdisent.utils.restoring import without_gradients
from tl_posdisent.utils.validation import head_label

_BYTES_AT_ONCE, _MOST_AT_ONCE = 2**27, 32
_Measured = TypeVar("_Measured")

HooksOf = Callable[[int, Sequence[int]], list[Hook]]
"""From the number of a group of texts and some heads of a layer to hooks that change these heads, and no others."""


@dataclass(frozen=True, eq=False)
class Change:
    """A change of heads of a layer.

    Attributes:
        name: changes of one name act at the same hook points: only one of them is compared with a full pass.
        heads: the heads that change.
        hooks: changes that share this function are computed together, in one pass up to the layer.
        coupled: whether a head's change depends on the others in ``heads``, or other heads change as well. Such a
            change takes a pass of its own up to the layer.
    """

    name: Hashable
    heads: tuple[int, ...]
    hooks: HooksOf
    coupled: bool = False


Trusted = dict[Hashable, bool]
"""Results of comparisons with full passes, by text length and change."""

Run = Callable[[], list[Any]]
"""Returns what the model returns for each group of texts, or raises what the run raised."""


class Runs:
    """An unmodified run of each group of texts, and runs that differ from it from one layer on.

    Args:
        model: in evaluation mode (``running``), with the hooks of the user's, if any.
        layers: those whose heads are to be changed.
        under: hooks for each group of texts, in force in all of these runs.
        trusted: names that were compared with full passes in other runs of the model, and ``separate`` for their texts.
    """

    def __init__(
        self,
        model: Any,
        texts: Texts,
        layers: Sequence[int],
        under: Sequence[list[Hook]] | None = None,
        trusted: Trusted | None = None,
    ) -> None:
        of_groups = zip(texts.groups, under or [[]] * len(texts.groups), strict=True)
        trusted = {} if trusted is None else trusted
        self._groups = [
            _Group(model, n, group.tokens, layers, hooks, trusted) for n, (group, hooks) in enumerate(of_groups)
        ]
        self.clean: list[Any] = [group.clean.output for group in self._groups]

    def before(self, layer: int) -> list[Any]:
        """Return what the block before one of the layers returned, for each group of texts; None before the first."""
        return [group.clean.after.get(layer - 1) for group in self._groups]

    def each(self, layer: int, changes: Sequence[Change]) -> Iterator[Run]:
        """Yield the run of each of some changes of one of the layers."""
        for outputs in zip(*(group.each(layer, changes) for group in self._groups), strict=True):
            yield partial(lambda functions: [function() for function in functions], outputs)


class _Group:
    """Texts of equal length and their unmodified run."""

    def __init__(
        self,
        model: Any,
        number: int,
        tokens: Tensor,
        layers: Sequence[int],
        under: list[Hook],
        trusted: Trusted,
    ) -> None:
        self.model, self.number, self.tokens, self.under, self.trusted = model, number, tokens, under, trusted
        with applied(model, under):
            self.clean = run_clean(model, tokens, layers)
        self.of_one_layer = len(layers) == 1
        # Hooks of the user's may count on every block to run, and on the batch as it is.
        self.shortcuts = bool(layers) and not has_hooks(model)
        if self.shortcuts:  # is the output, of each text, a function of what the last block returns?
            again: Any = attempted(partial(self._after_blocks, self.clean.last))
            self.shortcuts = _agree(again, self.clean.output) and len(again) == len(tokens)

    @property
    def most(self) -> int:
        """Number of changes that share a batch."""
        return max(1, texts_at_once(self.model.cfg, self.tokens.shape[1]) // len(self.tokens))

    def each(self, layer: int, changes: Sequence[Change]) -> Iterator[Callable[[], Any]]:
        """Yield a function for each change that returns the output: from the layer on, and then by full passes."""
        rest, most = list(changes), self.most
        changed_z = _ChangedZ(self, layer, changes)
        while rest and self.shortcuts:
            even = ceil(len(rest) / ceil(len(rest) / most))  # batches of one size
            some = [*takewhile(changed_z.is_known, rest[:even])]
            if not some:  # the full pass shows why
                yield partial(self._full_pass, rest.pop(0))
                continue
            try:
                last = self._from_layer(layer, some, [changed_z.of(change) for change in some])
            except torch.OutOfMemoryError:
                most = len(some) // 2
                if not most:
                    break
                continue
            if last is None or not self._agrees(layer, some, last):
                break
            yield from self._outputs(last, len(some))
            rest = rest[len(some) :]
            changed_z.keep(rest)
        yield from (partial(self._full_pass, change) for change in rest)

    def _compared(self, layer: int, name: Hashable) -> Hashable:
        """Return the key of a comparison, which has the layer if blocks share more than the residual stream."""
        length = self.tokens.shape[1]
        if self.of_one_layer:
            return length, layer, name
        if (length, "separate") not in self.trusted:
            separate = attempted(partial(are_separate, self.model, self.tokens[:1]))
            self.trusted[length, "separate"] = bool(separate)
        return length, None if self.trusted[length, "separate"] else layer, name

    def _from_layer(self, layer: int, changes: Sequence[Change], changed: Sequence[Tensor]) -> Any:
        """Return the last block's output for all changes, or None if it changes that of an unmodified text."""
        n = len(self.tokens)

        def edit(z: Tensor) -> Tensor:
            z = z.clone()
            for i, (change, new) in enumerate(zip(changes, changed, strict=True)):
                rows = z[i * n : (i + 1) * n]
                if change.coupled:
                    rows.copy_(new)
                else:
                    rows[:, :, list(change.heads)] = new[:, :, list(change.heads)].to(z.device)
            return z

        def run() -> Any:
            rows = torch.tensor([*range(n)] * len(changes) + [0], device=self.tokens.device)
            before = of_texts(self.clean.after[layer - 1], rows) if layer else None
            hooks = [*self.under, at_results(layer, self.model.cfg.n_heads, edit)]
            return run_to(self.model.blocks[-1], self.model, self.tokens[rows], layer, before, hooks)

        last = attempted(run)
        if last is not None:
            own, clean = hidden(last)[-1], hidden(self.clean.last)[0]
            size = clean.abs().amax(-1, keepdim=True)  # of each token: a sink's may be huge
            last = last if _agree(own / size, clean / size) else None
        self.shortcuts = last is not None
        return last

    def _agrees(self, layer: int, changes: Sequence[Change], last: Any) -> bool:
        """Compare the largest change of each name with a full pass, until one with a visible effect agrees."""
        clean, n = hidden(self.clean.last), len(self.tokens)
        for name in dict.fromkeys(change.name for change in changes):
            comparison = self._compared(layer, name)
            if comparison in self.trusted:
                continue
            sizes = {
                i: mismatch(hidden(last)[i * n : (i + 1) * n], clean)
                for i, change in enumerate(changes)
                if change.name == name
            }
            largest = max(sizes, key=lambda i: sizes[i])
            found = attempted(next(islice(self._outputs(last, len(changes)), largest, None)))
            expected = attempted(partial(self._full_pass, changes[largest]))
            if not _agree(found, expected):
                return False
            if not _agree(expected, self.clean.output):
                self.trusted[comparison] = True
        return True

    def _outputs(self, last: Any, n_changes: int) -> Iterator[Callable[[], Any]]:
        """Yield a function for each change that returns the output, from the last block's; small ones share a batch."""
        n, each = len(self.tokens), 4 * self.clean.output.numel()
        at_once = max(1, _BYTES_AT_ONCE // max(1, each))
        for first in range(0, n_changes, at_once):
            some = of_texts(last, slice(first * n, min(first + at_once, n_changes) * n))
            together = cache(partial(self._after_blocks, some))
            for i in range(min(at_once, n_changes - first)):
                yield partial(self._output, together, some, slice(i * n, (i + 1) * n))

    def _output(self, together: Callable[[], Any], last: Any, texts: slice) -> Any:
        try:
            return together()[texts]
        except torch.OutOfMemoryError:
            return self._after_blocks(of_texts(last, texts))

    def _full_pass(self, change: Change) -> Any:
        hooks = self.under + change.hooks(self.number, change.heads)  # a sum: lists of this package act together
        with without_gradients(), applied(self.model, hooks):
            return output_of(self.model, self.tokens)

    def _after_blocks(self, last: Any) -> Any:
        tokens = self.tokens.repeat(len(hidden(last)) // len(self.tokens), 1)
        return run_after(self.model, tokens, last, self.under)


class _ChangedZ:
    """z of one layer under each change; changes with the same hooks share a pass, unless they are coupled."""

    def __init__(self, group: _Group, layer: int, changes: Sequence[Change]) -> None:
        self.group, self.layer = group, layer
        self.held: dict[Hashable, Float[Tensor, "text pos head d_head"] | None] = {}
        self.heads: dict[HooksOf, set[int]] = {}
        for change in changes:
            self.heads.setdefault(change.hooks, set()).update(change.heads)

    def is_known(self, change: Change) -> bool:
        """Compute z for a change, and say whether that was possible."""
        key = self._key(change)
        if key not in self.held:
            heads = change.heads if change.coupled else sorted(self.heads[change.hooks])
            z = attempted(partial(self._compute, change.hooks, heads))
            by_head = (*self.group.tokens.shape, self.group.model.cfg.n_heads)
            usable = z is not None and (change.coupled or (z.ndim == 4 and z.shape[:3] == by_head))
            self.held[key] = z if usable else None
        return self.held[key] is not None

    def of(self, change: Change) -> Tensor:
        """Return z for a change for which it is known."""
        z = self.held[self._key(change)]
        assert z is not None
        return z

    def keep(self, changes: Sequence[Change]) -> None:
        """Drop what none of these changes needs."""
        for key in {*self.held} - {self._key(change) for change in changes}:
            del self.held[key]

    def _compute(self, hooks: HooksOf, heads: Sequence[int]) -> Tensor | None:
        group = self.group
        together = group.under + hooks(group.number, heads)
        before = group.clean.after.get(self.layer - 1)
        return changed_results(group.model, group.tokens, self.layer, before, together)

    def _key(self, change: Change) -> Hashable:
        return (change.hooks, change.heads if change.coupled else None)


@without_gradients()
def run_under(model: Any, tokens: Int[Tensor, "batch pos"], hooks: Sequence[Hook]) -> Any:
    """Run the model under hooks, and return its output."""
    with running(model), applied(model, hooks):
        return output_of(model, tokens)


def run_texts(model: Any, texts: Texts, hooks: Sequence[Sequence[Hook]] | None = None) -> list[Any]:
    """Run the model on each group of texts, under the group's hooks if any, and return the outputs."""
    hooks = [[]] * len(texts.groups) if hooks is None else hooks
    return [run_under(model, group.tokens, some) for group, some in zip(texts.groups, hooks, strict=True)]


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
