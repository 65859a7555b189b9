"""Count the bytes of live tensors after each operation of torch."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .nested import tensors


@functools.cache
def _may_return_what_is_given(func: Any) -> bool:
    """Return whether an operation is a view or works in place: its result may share memory with an argument."""
    return any(x.alias_info is not None for x in func._schema.returns)


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors created within this context and not yet freed: ``now``, and ``most``, the largest
    number after any operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch need not check it at each of millions of operations."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in (out,) if isinstance(out, Tensor) else tensors(out):
            storage = x.untyped_storage()
            # A view of what was there before, or changed in place, is not new.
            if storage._cdata not in self._known and not (
                _may_return_what_is_given(func)
                and storage._cdata in {y.untyped_storage()._cdata for y in tensors((args, kwargs))}
            ):
                self._follow(storage)
        self.most = max(self.most, self.now)
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        name, size = storage._cdata, storage.nbytes()
        self.now += size

        def forget(_: Any) -> None:
            del self._known[name]
            self.now -= size

        self._known[name] = weakref.ref(storage, forget)
