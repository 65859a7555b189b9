"""Run a model: read and edit at hooks, stop after a layer, skip layers, and restore the model.

This is the only file that registers hooks or replaces a module's ``forward``. ``with running(model) as p`` puts the
model into evaluation mode, and ``p.run(tokens, hooks, stop=layer)`` is one forward pass. Everything is undone at the
end of the block, however it ends: with an exception, or a loop that is left early.

A user's hook may run the model within a pass. That inner pass belongs to the user: hooks, stops and skipped modules of
this file act only on the outermost pass of a block.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tl_posdisent.models.running.model_parts import architecture, dtype_of, modules
from tl_posdisent.utils.errors import ArgumentError

Hook = tuple[str | Callable[[str], bool], Callable[..., Any]]
"""An entry of ``model.hooks(fwd_hooks=[...])``: a name or a filter of names, and a function of ``(tensor, hook)``."""


UNSUPPORTED = (ValueError, RuntimeError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)
"""Exceptions that a model may raise in a pass that skips a part of it, or given an argument that it does not accept."""


class Ended(BaseException):
    """Raised to end a forward pass once nothing more of it is needed."""


@contextlib.contextmanager
def running(model: Any, *, bare: bool = False) -> Iterator[Pass]:
    """Prepare a model for forward passes, and restore it at the end of the block.

    Dropout is off, and neither attention patterns nor keys and values are kept. Blocks may be nested.

    Args:
        model: the model to run.
        bare: disable the user's hooks, except permanent ones, and also restore buffers and numbers of modules.
    """
    p, nothing = Pass(model), contextlib.nullcontext()
    nested = isinstance(vars(model).get("forward"), _Forward)
    with (
        restored(model) if bare else nothing,
        nothing if nested else _evaluating(model),
        p.counting(),
        _bare(p) if bare else nothing,
    ):
        yield p


class Pass:
    """Forward passes of one model in a block of ``running``."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.depth = 0  # number of nested passes of the model that are running

    # --- one pass

    def run(
        self,
        tokens: Int[Tensor, "batch pos"],
        hooks: Sequence[Hook] = (),
        *,
        stop: int | torch.nn.Module | None = None,
        gradients: bool = False,
        **more: Any,
    ) -> Any:
        """Run the model once and return its output.

        Args:
            tokens: token ids.
            hooks: hooks for this pass. A filter that accepts several names of one hook point acts on it once.
            stop: end the pass after this many layers, or after a module, and return None. (A bridge's own
                ``stop_at_layer`` still computes the unembedding, which may cost more than all layers.)
            gradients: record gradients, even within the caller's ``no_grad``.
            more: arguments of the model's forward pass, such as a cache.

        Raises:
            ArgumentError: the model fails on a text beyond its context.
        """
        recording = with_gradients(self.model) if gradients else torch.no_grad()
        with recording, removing() as handles, contextlib.suppress(Ended):
            self._add(hooks, handles)
            if stop is not None:
                end = self.model.blocks[stop - 1] if isinstance(stop, int) else stop
                handles.append(end.register_forward_hook(self._end))
            return output_of(self.model, tokens, **more)

    def record(
        self,
        tokens: Int[Tensor, "batch pos"],
        names: Iterable[str],
        hooks: Sequence[Hook] = (),
        *,
        stop: int | torch.nn.Module | None = None,
        **more: Any,
    ) -> Recorded:
        """Run the model once (see ``run``) and return the activations at these hooks, after the edits of ``hooks``."""
        found = Recorded()
        self.run(tokens, [*hooks, *found.hooks(names)], stop=stop, **more)
        return found

    def _add(self, hooks: Sequence[Hook], handles: list[RemovableHandle]) -> None:
        for name, function in hooks:
            if isinstance(name, str):
                if name not in self.points:
                    raise ArgumentError("model", f"must have the hook {name}, which {architecture(self.model)} lacks")
                chosen = [self.points[name]]
            else:
                chosen = [point for full, point in self.points.items() if name(full)]
            for point in dict.fromkeys(chosen):
                handles.append(point.register_forward_hook(partial(self._call, function)))

    def _call(self, function: Callable[..., Any], point: Any, inputs: Any, x: Any) -> Any:
        """Call a TransformerLens hook from a torch hook."""
        if self.depth != 1:
            return None
        conversion = getattr(point, "hook_conversion", None)  # a bridge's, to the layout of TransformerLens
        result = function(x if conversion is None else conversion.convert(x), hook=point)
        return result if result is None or conversion is None else conversion.revert(result)

    def _end(self, *_: Any) -> None:
        if self.depth == 1:
            raise Ended

    @cached_property
    def points(self) -> dict[str, Any]:
        """``model.hook_dict``, computed once: a bridge rebuilds it at each access."""
        return self.model.hook_dict  # type: ignore[no-any-return]

    # --- all passes of a block

    @contextlib.contextmanager
    def keeping(self, kept: Sequence[Any]) -> Iterator[dict[Any, Any]]:
        """Store what some modules return in passes within the block, by module."""
        outputs: dict[Any, Any] = {}

        def keep(module: Any, inputs: Any, output: Any) -> None:
            if self.depth == 1:
                outputs[module] = output

        with removing() as handles:
            for module in kept:
                handles.append(module.register_forward_hook(keep))
            yield outputs

    @contextlib.contextmanager
    def receiving(self, readers: Sequence[Any]) -> Iterator[dict[Any, Any]]:
        """Store the first argument of some modules in passes within the block, by module."""
        inputs: dict[Any, Any] = {}

        def keep(module: Any, args: Any) -> None:
            if self.depth == 1 and args:
                inputs[module] = args[0]

        with removing() as handles:
            for module in readers:
                handles.append(module.register_forward_pre_hook(keep))
            yield inputs

    @contextlib.contextmanager
    def counting_tokens(self) -> Iterator[list[int]]:
        """List the number of tokens each time a layer's attention runs, in passes within the block."""
        counts: list[int] = []

        def count(module: Any, inputs: Any, output: Any) -> None:
            residual = output[0] if isinstance(output, (tuple, list)) else output
            if self.depth == 1:
                counts.append(residual.shape[0] * residual.shape[1])

        with removing() as handles:
            for block in self.model.blocks:
                if attention := getattr(block, "attn", None):
                    handles.append(attention.register_forward_hook(count))
            yield counts

    @contextlib.contextmanager
    def skipping(self, skipped: Iterable[Any], output: Callable[[], Any]) -> Iterator[None]:
        """Make modules return ``output()`` without computing anything, in passes within the block."""

        def skip(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return output() if self.depth == 1 else own(*args, **kwargs)

        with _replacing({module: _Forward(module.forward, skip) for module in skipped}):
            yield

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count running passes, including those of ``run_with_hooks``, which calls ``forward`` directly."""

        def count(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                return own(*args, **kwargs)
            finally:
                self.depth -= 1

        with _replacing({self.model: _Forward(self.model.forward, count)}):
            yield


class Recorded(dict[str, Tensor]):
    """Copies of activations by the name of their hook: the model may write to its own tensors later in the pass."""

    def hooks(self, names: Iterable[str]) -> list[Hook]:
        """Return hooks that record the tensors at these names."""

        def keep(name: str, x: Any, hook: Any) -> None:
            if isinstance(x, Tensor):
                self[name] = x.detach().clone()

        return [(name, partial(keep, name)) for name in names]

    def __missing__(self, name: str) -> Tensor:
        raise ArgumentError("model", f"must call its hook {name} in a pass, and does not")


def output_of(model: Any, tokens: Int[Tensor, "batch pos"], **more: Any) -> Any:
    """Return the model's output; if it fails on a text beyond its context, raise an error that says what to do."""
    try:
        return model(tokens, **more)
    except (RuntimeError, IndexError) as error:
        length = tokens.shape[1]
        context = getattr(model.cfg, "n_ctx", None) or length
        if length <= context or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ArgumentError(
            "tokens",
            f"are {length} long, and the model fails beyond its context of {context}: {error}; give shorter texts, or "
            f"load a rotary model with n_ctx={length}",
        ) from error


# --- replaced forward functions


@dataclass(frozen=True, eq=False)
class _Forward:
    """A replacement for a module's ``forward``: ``call`` receives the module's ``own`` forward and the arguments."""

    own: Callable[..., Any]
    call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.own, *args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """For ``inspect.signature``."""
        return self.own


@contextlib.contextmanager
def _replacing(forwards: dict[Any, _Forward]) -> Iterator[None]:
    before = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward  # bypasses __setattr__, which a bridge forwards
        yield
    finally:
        for module, own in before.items():
            vars(module).pop("forward", None)
            if own is not None:
                vars(module)["forward"] = own


# --- hooks of torch and of TransformerLens


@contextlib.contextmanager
def removing() -> Iterator[list[RemovableHandle]]:
    """Yield a list for handles of torch hooks, which are removed at the end of the block."""
    handles: list[RemovableHandle] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def installed(placed: Sequence[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Add hooks as ``model.hooks`` does, but at given hook points: a bridge searches all its points for each name."""
    added: list[tuple[Any, Any]] = []
    try:
        for point, function in placed:
            point.add_hook(function)
            added.append((point, point.fwd_hooks[-1]))
        yield
    finally:
        for point, handle in added:
            handle.hook.remove()
            point.fwd_hooks = [other for other in point.fwd_hooks if other is not handle]


# --- the state of a model in a block


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Switch off dropout, and keep neither attention patterns nor keys and values."""
    parts = modules(model)
    training = [part for part in parts if part.training]
    with _without_kept_patterns(parts), _without_cache(model):
        try:
            for part in training:
                part.training = False
            yield
        finally:
            for part in training:
                part.training = True


@contextlib.contextmanager
def _without_kept_patterns(parts: list[torch.nn.Module]) -> Iterator[None]:
    """Discard the pattern that a bridge stores for each layer if queries, keys and values are one projection.

    This concerns GPT-NeoX, GPT-2, Falcon, Phi-3 … Nothing reads the stored pattern, and with 24 layers it takes more
    memory than the pass itself.
    """

    def forget(part: torch.nn.Module, *_: Any) -> None:
        vars(part)["_pattern"] = None

    keeping = [part for part in parts if isinstance(vars(part).get("_pattern", 0), Tensor | None)]
    with removing() as handles:
        for part in keeping:
            handles.append(part.register_forward_hook(forget, always_call=True))
            forget(part)
        yield


@contextlib.contextmanager
def _without_cache(model: Any) -> Iterator[None]:
    """Do not keep keys and values unless a pass asks for them or is given a cache.

    Hugging Face models keep them by default, although no further token is generated. Hybrids continue to, and so does
    OLMo in half precision, whose bridge casts its keys only there.
    """
    config: Any = getattr(getattr(model, "original_model", None), "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else None
    kinds = {*(getattr(config, "layer_types", None) or ())}
    olmo = str(getattr(config, "model_type", "")).startswith("olmo") and dtype_of(model).itemsize < 4
    if olmo or not getattr(config, "use_cache", False) or not kinds <= {"full_attention", "sliding_attention"}:
        yield
        return
    config.use_cache = False
    try:
        yield
    finally:
        config.use_cache = True


@contextlib.contextmanager
def _bare(p: Pass) -> Iterator[None]:
    """Disable the user's hooks, except permanent ones, and suppress warnings about edits without effect."""
    points = list({id(point): point for point in p.points.values()}.values())
    before = [(point, point._forward_hooks) for point in points]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*edit is discarded.*")
        try:
            for point, hooks in before:
                permanent = {handle.hook.id for handle in point.fwd_hooks if handle.is_permanent}
                point._forward_hooks = OrderedDict((key, hook) for key, hook in hooks.items() if key in permanent)
            yield
        finally:
            for point, hooks in before:
                point._forward_hooks = hooks


@contextlib.contextmanager
def restored(model: Any) -> Iterator[None]:
    """Restore every buffer and number of a model's modules on exit.

    Buffers, and other numbers and tensors that modules store (such as the longest text so far), are again the same
    objects, and vectors, such as frequencies, have their previous values. Flags are not restored: a bridge sets one
    when it installs its own hooks, which also remain.
    """
    plain = (int, float, Tensor, type(None))
    saved = []
    vectors: dict[int, tuple[Tensor, Tensor]] = {}
    for part in modules(model):
        numbers = {k: x for k, x in vars(part).items() if isinstance(x, plain) and type(x) is not bool}
        saved.append((part, dict(part._buffers), numbers))
        found = [x for x in part._buffers.values() if x is not None and x.ndim == 1 and not x.is_meta]
        vectors |= {id(x): (x, x.clone()) for x in found if id(x) not in vectors}
    try:
        yield
    finally:
        with torch.no_grad():
            for vector, values in vectors.values():
                if not torch.equal(vector, values):
                    vector.copy_(values)
        for part, buffers, numbers in saved:
            part._buffers.update(buffers)
            now = vars(part)
            kept = [name for name in numbers if isinstance(now.get(name), plain)]
            now.update({name: numbers[name] for name in kept})


@contextlib.contextmanager
def with_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Record gradients, also within the caller's ``no_grad`` or ``inference_mode``."""
    if any(x.is_inference() for x in (*model.parameters(), *model.buffers())):
        raise ArgumentError(
            "model",
            "must be created outside torch.inference_mode(), whose tensors never record gradients: load it outside",
        )
    with torch.inference_mode(False), torch.enable_grad():
        yield
