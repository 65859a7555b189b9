"""Runs in which some heads of one layer are changed: later layers only, several heads in one batch, checked.

Whatever an experiment changes in heads of one layer (ablation, another attention pattern, patched queries), the rest of
the model sees it in ``z``, what these heads hand to the output projection. So one pass through that layer gives the
changed ``z`` of all heads, and each head's run needs only what follows, in which several heads share a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.partial_forward import (
    Clean,
    attempted,
    attention_from,
    has_hooks,
    of_texts,
    run_clean,
    run_from,
)
from tl_posdisent.models.reading.forward import Hook, hook_name, output_of
from tl_posdisent.models.reading.tolerance import mismatch
from tl_posdisent.models.texts import Texts
from tl_posdisent.utils.validation import head_label

_BYTES_HELD = 2**28
_BYTES_PER_TENSOR = 2**22
_Measured = TypeVar("_Measured")

HooksOf = Callable[[int, Sequence[int]], list[Hook]]
"""From the number of a group of texts and some heads of a layer to hooks that change these heads, and no others."""

Z = Float[Tensor, "text pos head d_head"]


class Runs:
    """An unmodified run of each group of texts, and runs that differ from it from one layer on.

    Args:
        model: in evaluation mode (``evaluating``), with the hooks of the user's, if any.
        texts: what is run.
        layers: those that are to be changed.
        batch_size: texts in one forward pass at most, default by a rough estimate of what is fast.
    """

    def __init__(self, model: Any, texts: Texts, layers: Sequence[int], batch_size: int | None = None) -> None:
        self._groups = [_Group.of(model, group.tokens, layers, batch_size) for group in texts.groups]
        self.clean: list[Any] = [group.clean.output for group in self._groups]

    def each(
        self, layer: int, units: Sequence[Sequence[int]], hooks_of: HooksOf, kind: Hashable = None
    ) -> Iterator[Callable[[], list[Any]]]:
        """What the model returns for each group of texts, with each unit of heads of a layer changed in turn.

        Args:
            layer: one of ``layers``.
            units: heads that are changed together.
            hooks_of: the hooks that change them.
            kind: of change. The first of each kind is compared with a full pass under its hooks; shortcuts are given up
                for those that differ. None for changes of z itself.

        Yields:
            For each unit a function that returns the outputs, or raises what the run raised.
        """
        runs = [group.each(layer, units, partial(hooks_of, n), kind) for n, group in enumerate(self._groups)]
        for outputs in zip(*runs, strict=True):
            yield partial(_outputs, outputs)


def _outputs(found: Sequence[Any]) -> list[Any]:
    for one in found:
        if isinstance(one, Exception):
            raise one
    return list(found)


_Way = Callable[["_Group", int, Sequence[Sequence[int]], Z], Any]
"""From a layer, units of heads and their changed z to outputs: all texts for each unit, and text 0 unmodified."""


@dataclass
class _Group:
    """Texts of equal length, their unmodified run, and the shortcuts that have not failed."""

    model: Any
    tokens: Int[Tensor, "text pos"]
    clean: Clean
    at_once: int  # texts in one pass
    ways: list[_Way]
    agreeing: dict[Hashable, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, tokens: Tensor, layers: Sequence[int], batch_size: int | None) -> _Group:
        clean = run_clean(model, tokens, layers)
        # Hooks of the user's may count on every block to run, and on the batch as it is.
        separate = isinstance(clean.output, Tensor) and len(clean.output) == len(tokens) and not has_hooks(model)
        at_once = batch_size or _texts_at_once(model, tokens, clean.output)
        return cls(model, tokens, clean, at_once, [_attention_once, _from_the_layer] if separate else [])

    def each(
        self, layer: int, units: Sequence[Sequence[int]], hooks_of: Callable[[Sequence[int]], list[Hook]], kind: Any
    ) -> Iterator[Any]:
        """Outputs, or exceptions. Ways that prove wrong are removed from ``ways``."""
        z = self._changed_z(layer, units, hooks_of) if self.ways and self.agreeing.get(kind, True) else None
        waiting, limit = list(units), len(units)
        while waiting:
            if z is None or not self.ways:
                yield self._plain(hooks_of, waiting.pop(0))
                continue
            some = waiting[: min(limit, self._units_at_once())]
            try:
                outputs = self._proved(self.ways[0], layer, some, z)
            except torch.OutOfMemoryError:
                limit = len(some) // 2
                z = z if limit else None
                continue
            if outputs is None:
                del self.ways[0]
            elif not self._agrees(kind, outputs[0], partial(self._plain, hooks_of, some[0])):
                z = None
            else:
                yield from outputs
                waiting = waiting[len(some) :]

    def _agrees(self, kind: Hashable, output: Tensor, plain: Callable[[], Any]) -> bool:
        """Whether the first shortcut of its kind gives what a full pass gives."""
        if kind is not None and kind not in self.agreeing:
            expected = plain()
            self.agreeing[kind] = isinstance(expected, Tensor) and mismatch(output, expected) <= 1
        return self.agreeing.get(kind, True)

    def _plain(self, hooks_of: Callable[[Sequence[int]], list[Hook]], heads: Sequence[int]) -> Any:
        """A full forward pass under the hooks, or why there is none."""
        try:
            with torch.no_grad(), applied(self.model, hooks_of(heads)):
                return output_of(self.model, self.tokens)
        except (ValueError, RuntimeError) as error:
            return error

    def _changed_z(self, layer: int, units: Sequence[Sequence[int]], hooks_of: Any) -> Z | None:
        """z of a layer with all units changed; None where that takes full passes."""
        kept: list[Tensor] = []
        listen = (hook_name(layer, "hook_z"), lambda z, hook: kept.append(z.detach().clone()))
        try:
            hooks = [*hooks_of(sorted({head for unit in units for head in unit})), listen]
            attempted(lambda: attention_from(self.model, self.tokens, layer, self.clean, hooks))
        except ValueError:  # of one head, maybe: full passes tell which
            return None
        by_head = (*self.tokens.shape, self.model.cfg.n_heads)
        return kept[-1] if kept and kept[-1].ndim == 4 and kept[-1].shape[:3] == by_head else None

    def _proved(self, way: _Way, layer: int, units: Sequence[Sequence[int]], z: Z) -> list[Tensor] | None:
        """Outputs of each unit, if the unmodified text in the same batch has the output of the unmodified run."""
        output = attempted(lambda: way(self, layer, units, z))
        if output is None:
            return None
        same = output[-1].shape == self.clean.output[0].shape and mismatch(output[-1], self.clean.output[0]) <= 1
        return list(output[:-1].unflatten(0, (len(units), -1))) if same else None

    def _units_at_once(self) -> int:
        """For the fastest way, as many as what it stores of them leaves room for."""
        if self.ways[0] is not _attention_once:
            return max(1, self.at_once // len(self.tokens))
        output = self.clean.output
        numbers: int = 3 * output[0].numel() + self.tokens.shape[1] * 2 * getattr(self.model.cfg, "d_model", 0)
        size: int = output.element_size()
        return max(1, _room(output, _BYTES_HELD) // (len(self.tokens) * numbers * size))

    def rows(self, units: Sequence[Any]) -> Int[Tensor, "row"]:
        """The texts of a batch: all for each unit, and the first once more, as the proof."""
        return torch.tensor([*range(len(self.tokens))] * len(units) + [0], device=self.tokens.device)

    def side_by_side(self, layer: int, units: Sequence[Sequence[int]], changed: Z) -> Hook:
        """The hook that changes each unit in its own copy of the texts. It makes the copies, if there are none yet."""
        n = len(self.tokens)

        def edit(z: Tensor, hook: Any) -> Tensor:
            z = z[self.rows(units).to(z.device)] if len(z) == n else z.clone()
            for i, unit in enumerate(units):
                z[i * n : (i + 1) * n, :, list(unit)] = changed[:, :, list(unit)].to(z.device)
            return z

        return hook_name(layer, "hook_z"), edit


def _attention_once(group: _Group, layer: int, units: Sequence[Sequence[int]], z: Z) -> Any:
    """From the layer on, and its attention once for all units: only what follows z differs between them."""
    hook, rows = group.side_by_side(layer, units, z), group.rows(units)
    attention = attention_from(group.model, group.tokens, layer, group.clean, [hook])
    outputs = []
    for some in torch.arange(len(rows), device=rows.device).split(group.at_once):
        part = of_texts(attention, some)
        outputs.append(run_from(group.model, group.tokens, layer, group.clean, rows[some], [], attention=part))
    return torch.cat(outputs)


def _from_the_layer(group: _Group, layer: int, units: Sequence[Sequence[int]], z: Z) -> Any:
    """From the layer on."""
    hook = group.side_by_side(layer, units, z)
    return run_from(group.model, group.tokens, layer, group.clean, group.rows(units), [hook])


def _texts_at_once(model: Any, tokens: Int[Tensor, "text pos"], output: Any) -> int:
    """How many texts to run in one pass, by a rough estimate of the largest tensor that it makes of each."""
    length, cfg = tokens.shape[1], model.cfg
    numbers: int = length * max(cfg.n_heads * length, 4 * getattr(cfg, "d_model", 0))
    return max(1, _room(output, _BYTES_PER_TENSOR) // (4 * numbers))


def _room(output: Any, on_cpu: int) -> int:
    """Bytes that may be taken. A processor is slower with tensors beyond its cache, a GPU faster with large ones."""
    if isinstance(output, Tensor) and output.device.type == "cuda":
        return int(torch.cuda.mem_get_info(output.device)[0]) // 16
    return on_cpu


class Failures:
    """Measurements that failed: their rows are NaN, and ``table.attrs["failures"]`` says why."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self.errors: list[Exception] = []
        self.n_measured = 0

    def attempt(self, measure: Callable[[], _Measured], layer: int | None, head: int | None) -> _Measured | None:
        """What ``measure`` returns; None if it raises an error of its input or of the model."""
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
        """The table with the reasons in ``attrs``, and one warning; the first error if nothing was measured."""
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
