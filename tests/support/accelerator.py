"""Imitated accelerators for machines without one: tensors on ``imitated:0`` and ``imitated:1``.

Within ``with imitated(): ...`` every operation on such tensors runs on the CPU's kernels with the CPU's tensors inside,
so numbers are those of the CPU. Errors of CUDA are raised: tensors of two devices in one operation (except CPU scalars
and CPU indices), a generator of another device, ``.numpy()``. Not imitated: streams, memory,
rounding of other kernels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from .nested import mapped, tensors

NAME = "imitated"
aten = torch.ops.aten
_KERNELS = torch.library.Library("aten", "IMPL")
_COPIES = {aten._to_copy.default, aten.copy_.default}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_NO_SCALARS = {aten.stack.default, aten.cat.default, aten.mm.default, aten.bmm.default, aten.index_select.default}
_RESIZED = [aten.arange.default, aten.arange.start, aten.arange.start_step, aten.eye.default, aten.eye.m]
_ON_HOST = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}


GENERATOR = torch.Generator()  # of both devices, where the caller names none


class _Module(backend_registration._DummyBackendModule):
    """The counterpart of ``torch.cuda``."""

    def device_count(self) -> int:
        return 2

    def get_rng_state(self, device: Any = None) -> Tensor:
        return GENERATOR.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        GENERATOR.set_state(state)

    def manual_seed_all(self, seed: int) -> None:
        GENERATOR.manual_seed(seed)

    def _is_in_bad_fork(self) -> bool:
        return False


class OnDevice(Tensor):
    """A CPU tensor that reports another device."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor, device: torch.device) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            inside.size(),
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            layout=inside.layout,
            device=device,
            requires_grad=inside.requires_grad,
        )
        made.inside = inside.detach() if inside.requires_grad else inside
        return made

    def __repr__(self) -> str:
        return f"OnDevice({self.inside!r}, device={str(self.device)!r})"

    def __format__(self, format_spec: str) -> str:
        return format(self.inside, format_spec)

    def tolist(self) -> Any:
        return self.inside.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Imitated(TorchDispatchMode):
    """Intercepts all operations, also those that create tensors on a device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch need not check it at each operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _copy(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    a, b = (x.inside if isinstance(x, OnDevice) else x for x in (into, source))
    a.copy_(b)
    return into


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    device = _device_of(func, args, kwargs)
    if device is None:
        return func(*args, **kwargs)

    if _draws(func) and kwargs.get("generator") is None:
        kwargs = {**kwargs, "generator": GENERATOR}

    def lower(x: Any) -> Any:
        if isinstance(x, OnDevice):
            return x.inside
        return torch.device("cpu") if isinstance(x, torch.device) else x

    with torch._C._DisableTorchDispatch():
        made = func(*mapped(lower, args), **mapped(lower, kwargs))
    if device.type == "cpu" or func in _ON_HOST:
        return made
    if not func._schema.returns:
        return None
    changed = _changed(func)
    if changed is not None:
        return kwargs[changed] if isinstance(changed, str) else args[changed]
    return mapped(lambda x: OnDevice(x.resolve_conj().resolve_neg(), device) if isinstance(x, Tensor) else x, made)


@functools.cache
def _draws(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


@functools.cache
def _changed(func: Any) -> int | str | None:
    """Return the argument that an operation changes and returns."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return argument.name if argument.kwarg_only else place
    return None


def _device_of(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device of the result; None if all tensors are on the CPU."""
    flat = list(tensors((args, kwargs)))
    devices = [x.device for x in flat]
    target = kwargs.get("device")
    target = None if target is None else torch.device(target)
    if not any(d.type == NAME for d in devices) and (target is None or target.type != NAME):
        return None
    if target is not None and target.type == NAME and target.index is None:
        target = torch.device(NAME, 0)
    generator = kwargs.get("generator")
    if target is None and func in _COPIES:
        return devices[0]
    if func not in _COPIES:
        counted = flat[:1] if func in _INDEXED else flat
        counted = [x for x in counted if x.ndim or x.device.type == NAME or func in _NO_SCALARS]
        if func in _INDEXED and devices[0].type == "cpu" and any(d.type == NAME for d in devices):
            raise RuntimeError(f"indices should be on the device of the indexed tensor (cpu), in {func}")
        several = sorted({str(x.device) for x in counted})
        if len(several) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {several} in {func}")
    place = target or next(d for d in devices if d.type == NAME)
    if generator is not None and generator.device != place:
        raise RuntimeError(f"Expected a '{place.type}' generator, found '{generator.device}', in {func}")
    return place


def register() -> None:
    """Register the device with torch; autograd only has threads for devices that it knows when it first runs."""
    if hasattr(torch, NAME):
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    # torch.tensor(...) goes past all modes
    _KERNELS.impl("_local_scalar_dense", lambda x: x.inside.item(), "PrivateUse1")
    _KERNELS.impl("copy_", _copy, "PrivateUse1")
    _KERNELS.impl("_copy_from", lambda source, into, block=False: _copy(into, source), "PrivateUse1")
    # The mode is this thread's alone; in others, these kernels are called, and those of torch that begin with one.
    for func in (aten.empty_strided.default, aten.empty.memory_format, *_RESIZED):
        _KERNELS.impl(func, lambda *a, func=func, **k: _run(func, a, k), "PrivateUse1")


@contextlib.contextmanager
def imitated() -> Iterator[None]:
    """Provide two devices, ``imitated:0`` and ``imitated:1``, within the block."""
    register()
    kept = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with Imitated():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(kept)
