"""What a piece of code holds in tensors at each of its steps, and how many operations it takes: counted, not looked up.

Nothing here depends on the device: a model on ``meta``, which has shapes and no numbers, is counted as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


class Counted(NamedTuple):
    """Of one run.

    Attributes:
        live: bytes in tensors that were made since counting began, after each step.
        written: bytes of all results, kept or not.
        flops: of all matrix products, two for each multiply and add.
    """

    live: list[int]
    written: int
    flops: int


def count(prepare: Callable[[], Any], work: Callable[[Any], Any]) -> Counted:
    """Run ``prepare``, whose tensors count as live, and then ``work`` on what it returned, step by step."""
    with torch.no_grad(), _Live() as live:
        ready = prepare()
        live.steps.clear()
        live.written = 0
        with FlopCounterMode(display=False) as flops:
            work(ready)
    return Counted(live.steps, live.written, flops.get_total_flops())


class _Live(TorchDispatchMode):
    """Follows every new storage until it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[int] = []
        self.written = 0
        self._now = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in given:
                self._follow(storage)
        self.steps.append(self._now)
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        name, size = storage._cdata, storage.nbytes()
        if name in self._known:
            return
        self._known[name] = size
        self._now += size
        self.written += size
        weakref.finalize(storage, self._forget, name).atexit = False

    def _forget(self, name: int) -> None:
        self._now -= self._known.pop(name, 0)
