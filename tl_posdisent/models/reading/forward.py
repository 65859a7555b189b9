"""Forward passes with hooks that restore the model's state; free memory; tokens and texts as the model takes them."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tl_posdisent.utils.errors import ArgumentError, ContextExceeded
from tl_posdisent.utils.restoring import restoring, without_gradients

Hook = tuple[str | Callable[[str], bool], Callable[..., Any]]
"""What ``model.hooks(fwd_hooks=[...])`` takes: a name or a filter of names, and a function of ``(tensor, hook)``."""

UNSUPPORTED = (ValueError, RuntimeError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)
"""What a model may raise in a pass that leaves out a part of it, or with an argument that it does not take."""


def hook_name(layer: int, short: str) -> str:
    """Full name of an attention hook: ``hook_name(3, "hook_q")`` is ``"blocks.3.attn.hook_q"``."""
    return f"blocks.{layer}.attn.{short}"


def device_of(model: Any) -> torch.device:
    """Where the model takes its tokens."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def dtype_of(model: Any) -> torch.dtype:
    """Of the model's weights."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def run(
    model: Any, tokens: Int[Tensor, "batch pos"], hooks: Sequence[Hook], *, stop: int | None = None, **more: Any
) -> None:
    """One forward pass without gradients or dropout, with hooks for its duration.

    What comes after layer ``stop - 1``, the unembedding too, is left out: a bridge's own ``stop_at_layer`` cannot leave
    out the unembedding alone, which may cost more than all layers. ``more`` are arguments of the pass, such as a cache.
    """
    with without_gradients(), evaluating(model), hooked(model, hooks), _ending_after(model, stop):
        output_of(model, tokens, **more)


def output_of(model: Any, tokens: Int[Tensor, "batch pos"], **more: Any) -> Any:
    """What the model returns; an error on texts beyond its context says what to do."""
    try:
        return model(tokens, **more)
    except (RuntimeError, IndexError) as error:
        length = tokens.shape[1]
        context = getattr(model.cfg, "n_ctx", None) or length
        if length <= context or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ContextExceeded(
            "tokens",
            f"are {length} long, and the model fails beyond its context of {context}: {error}; give shorter texts, or "
            f"work within longer_context(model, {length}), which continues the rotation of rotary models",
            length,
            context,
        ) from error


class Ended(BaseException):
    """Unwinds a forward pass of which nothing more is needed."""


@contextlib.contextmanager
def _ending_after(model: Any, stop: int | None) -> Iterator[None]:
    """End the next pass of this thread after layer ``stop - 1``, but not passes that a hook makes meanwhile."""
    if stop is None:
        yield
        return
    with _in_force() as key:
        passes = [0]

        def count(step: int, *_: Any) -> None:
            passes[0] += step if key in _IN_FORCE.get() else 0

        def end(*_: Any) -> None:
            if passes == [1] and key in _IN_FORCE.get():
                raise Ended

        with removing() as handles, contextlib.suppress(Ended):
            handles.append(model.register_forward_pre_hook(functools.partial(count, 1)))
            handles.append(model.register_forward_hook(functools.partial(count, -1), always_call=True))
            handles.append(model.blocks[stop - 1].register_forward_hook(end))
            yield


@contextlib.contextmanager
def removing() -> Iterator[list[RemovableHandle]]:
    """A list for handles of torch's hooks, which are removed at the end of the block."""
    handles: list[RemovableHandle] = []

    def remove() -> None:
        for handle in handles:
            handle.remove()

    with restoring(remove):
        yield handles


_IN_FORCE: ContextVar[frozenset[object]] = ContextVar("keys of hooks that act in this thread", default=frozenset())


@contextlib.contextmanager
def _in_force() -> Iterator[object]:
    """A key of hooks that act on passes made within the block, and not on another thread's through the same model."""
    key = object()
    _IN_FORCE.set(_IN_FORCE.get() | {key})
    try:
        yield key
    finally:
        _IN_FORCE.set(_IN_FORCE.get() - {key})


@contextlib.contextmanager
def hooked(model: Any, hooks: Sequence[Hook]) -> Iterator[None]:
    """``model.hooks``, but in this thread alone, and independent of other such contexts, which may overlap it."""
    points = hook_points(model) if hooks else {}
    with _in_force() as key, removing() as handles:
        for name, function in hooks:
            chosen = [points[name]] if isinstance(name, str) else [x for full, x in points.items() if name(full)]
            for point in dict.fromkeys(chosen):  # once for a filter, which may accept several of its names
                handles.append(point.register_forward_hook(_Own(function, key)))
        yield


@dataclass(frozen=True, eq=False)
class _Own:
    """A TransformerLens hook as a hook of torch's, which acts while its key is in force."""

    function: Callable[..., Any]
    key: object

    def __call__(self, point: Any, inputs: Any, x: Any) -> Any:
        if self.key not in _IN_FORCE.get():
            return None
        conversion = getattr(point, "hook_conversion", None)  # a bridge's, to the layout of TransformerLens
        result = self.function(x if conversion is None else conversion.convert(x), hook=point)
        return result if result is None or conversion is None else conversion.revert(result)


def modules(model: Any) -> list[torch.nn.Module]:
    """All parts of a model, each once. A bridge lists those that it knows, and not all of the model that it wraps."""
    waiting = [x for x in (model, getattr(model, "original_model", None)) if isinstance(x, torch.nn.Module)]
    found: dict[int, torch.nn.Module] = {}
    while waiting:  # torch's own modules() makes a name for every part, which takes ten times as long
        part = waiting.pop()
        if id(part) not in found:
            found[id(part)] = part
            waiting += [x for x in reversed(part._modules.values()) if x is not None]
    return list(found.values())


_POINTS: ContextVar[tuple[Any, dict[str, Any]]] = ContextVar("points of the model at rest", default=(None, {}))


def hook_points(model: Any) -> dict[str, Any]:
    """``model.hook_dict``, which a bridge makes anew at every call; that of a model at rest is made once."""
    at_rest, points = _POINTS.get()
    return points if at_rest is model else model.hook_dict


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Dropout off for the duration, and neither attention patterns nor keys and values kept; hooks stay."""
    parts = modules(model)
    training = [part for part in parts if part.training]

    def train(mode: bool) -> None:
        for part in training:
            part.training = mode

    with _without_kept_patterns(parts), _without_cache(model), restoring(lambda: train(True)):
        train(False)
        yield


@contextlib.contextmanager
def _without_kept_patterns(parts: list[torch.nn.Module]) -> Iterator[None]:
    """Bridges whose queries, keys and values are one projection (GPT-NeoX, GPT-2, Falcon, Phi-3 …) store each layer's
    pattern, which nothing reads, until the next pass: with 24 layers more memory than the pass itself."""

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
    """Passes keep no keys and values of all layers unless they ask for them or are given a cache: models of
    transformers do so by default, for a next token that is not to come. Hybrids keep theirs, and so does OLMo in half
    precision, whose bridge casts its keys only there."""
    config: Any = getattr(getattr(model, "original_model", None), "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else None
    kinds = {*(getattr(config, "layer_types", None) or ())}
    olmo = str(getattr(config, "model_type", "")).startswith("olmo") and dtype_of(model).itemsize < 4
    if olmo or not getattr(config, "use_cache", False) or not kinds <= {"full_attention", "sliding_attention"}:
        yield
        return
    with restoring(lambda: setattr(config, "use_cache", True)):
        config.use_cache = False
        yield


_READING = threading.RLock()


@contextlib.contextmanager
def at_rest(model: Any) -> Iterator[None]:
    """The bare model for the duration: evaluation mode, no hooks of the user's (in this thread; a second thread waits),
    no warnings of edits without effect, which are being found out; its state is restored on exit."""
    by_name = hook_points(model)
    points = list({id(point): point for point in by_name.values()}.values())
    calls, known = [(point, vars(point).get("_call_impl")) for point in points], _POINTS.get()

    def restore() -> None:
        _POINTS.set(known)
        for point, own in calls:
            vars(point).pop("_call_impl", None)
            if own is not None:
                vars(point)["_call_impl"] = own

    with _READING, restored(model), restoring(restore):
        _POINTS.set((model, by_name))
        for point in points:
            vars(point)["_call_impl"] = _Bare(point, model, frozenset(point._forward_hooks))
        with evaluating(model), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*edit is discarded.*")
            yield


@dataclass(frozen=True, eq=False)
class _Bare:
    """A hook point's call that leaves out the hooks of the user's, in the thread that has the model at rest."""

    point: Any
    model: Any
    there: frozenset[int]  # hooks that were there before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _POINTS.get()[0] is not self.model:
            return type(self.point)._call_impl(self.point, *args, **kwargs)
        x = self.point.forward(*args, **kwargs)
        permanent = {handle.hook.id for handle in self.point.fwd_hooks if handle.is_permanent}
        for key, hook in tuple(self.point._forward_hooks.items()):
            if key in permanent or (isinstance(hook, _Own) and key not in self.there):
                result = hook(self.point, args, x)
                x = x if result is None else result
        return x


@contextlib.contextmanager
def restored(model: Any) -> Iterator[None]:
    """On exit every buffer of the model's modules, and every number and tensor that they keep beside (such as the
    longest text so far), is the object that it was, and vectors, such as frequencies, have the values that they had.

    Flags stay as they are: a bridge notes in one that it has installed hooks of its own, which stay too."""
    plain = (int, float, Tensor, type(None))
    saved = []
    vectors: dict[int, tuple[Tensor, Tensor]] = {}
    for part in modules(model):
        numbers = {k: x for k, x in vars(part).items() if isinstance(x, plain) and type(x) is not bool}
        saved.append((part, dict(part._buffers), numbers))
        found = [x for x in part._buffers.values() if x is not None and x.ndim == 1 and not x.is_meta]
        vectors |= {id(x): (x, x.clone()) for x in found if id(x) not in vectors}

    def restore() -> None:
        with without_gradients():
            for vector, values in vectors.values():
                if not torch.equal(vector, values):
                    vector.copy_(values)
        for part, buffers, numbers in saved:
            part._buffers.update(buffers)
            now = vars(part)
            kept = [name for name in numbers if isinstance(now.get(name), plain)]
            now.update({name: numbers[name] for name in kept})

    with restoring(restore):
        yield


def free_memory(devices: Iterable[torch.device | str] = ("cpu",)) -> int | None:
    """Bytes that are free on the fullest of these devices; None for devices other than CPUs and CUDA's.

    On the host no more than its control group leaves; on a GPU with what torch has reserved and not used.
    """
    found = []
    for device in map(torch.device, devices):
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            found.append(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
        elif device.type in ("cpu", "meta"):
            found.append(max(0, min(psutil.virtual_memory().available, *_left_by_group())))
    return min(found, default=None)


def _left_by_group(folder: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Bytes that the control group (version 2) of a container leaves; file cache can be given back."""
    try:
        limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return [limit - used + int(stat["inactive_file"])]
    except (OSError, ValueError, KeyError):  # no such group, or "max"
        return [2**63]


def model_devices(model: Any) -> list[torch.device]:
    """Where a model's tensors are, each device once."""
    return list(dict.fromkeys(x.device for x in _tensors(model)))


def model_bytes(model: Any) -> int:
    """Bytes of parameters and buffers, each storage once."""
    storages = [x.untyped_storage() for x in _tensors(model)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _tensors(model: Any) -> list[Tensor]:
    held = [x for part in modules(model) for x in (*part._parameters.values(), *part._buffers.values())]
    return [x for x in held if x is not None]


def require_room(model: Any, n_matrices: int, length: int) -> None:
    """Raise MemoryError for a text of which the score matrices of one layer alone are more than there is.

    The forward pass holds them at least twice, as scores and as pattern: what is refused would not have run.
    """
    size = min((x.element_size() for x in model.parameters() if x.is_floating_point()), default=4)
    scores = n_matrices * length**2 * size
    free = free_memory(model_devices(model)) if scores > 2**20 else None
    if free is not None and scores > free:
        raise MemoryError(
            f"scores of one layer take {gigabytes(scores)}, several times over, and {gigabytes(free)} are free: use "
            f"fewer or shorter texts (estimate(model, {length}) says which fit)"
        )


def gigabytes(n: int | float) -> str:
    """Bytes in GB of 10⁹, for people."""
    return f"{n / 1e9:.3g} GB" if n < 1e12 else f"{n / 1e9:,.0f} GB"


def check_tokens(model: Any, tokens: Any, *, padded: bool = False) -> Int[Tensor, "batch pos"]:
    """Token ids on the device of a model that was read, from ids or from text; ValueError for what is neither.

    Unless ``padded`` says that an attention mask tells where padding is, texts must not begin or end with padding. A
    padding id that is also that of the beginning (or end) of a text is padding where two or more of them stand.
    """
    if isinstance(tokens, list) and not tokens:
        raise ArgumentError("tokens", "must hold at least one text, got an empty list")
    if isinstance(tokens, str) or (isinstance(tokens, list) and all(isinstance(t, str) for t in tokens)):
        rows, padded = encode(model, [tokens] if isinstance(tokens, str) else tokens), True
        if len({row.shape[1] for row in rows}) != 1:  # padding is no text
            lengths = [row.shape[1] for row in rows]
            raise ArgumentError(
                "tokens", f"were given as texts of unequal length ({lengths} tokens): pass them one by one"
            )
        tokens = torch.cat(rows)
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.is_complex():
        kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ArgumentError("tokens", f"must be text or an integer tensor of shape (batch, pos), got {kind}")
    if tokens.is_nested or tokens.layout != torch.strided:
        kind = "a nested tensor" if tokens.is_nested else f"a tensor of layout {tokens.layout}"
        raise ArgumentError("tokens", f"must be a dense tensor (pad texts, and pass attention_mask=), got {kind}")
    if tokens.dtype == torch.bool or tokens.ndim not in (1, 2) or tokens.numel() == 0 or tokens.shape[-1] < 2:
        raise ArgumentError(
            "tokens",
            "must have shape (pos,) or (batch, pos) with at least two positions, got "
            f"{tokens.dtype} of shape {tuple(tokens.shape)}",
        )
    if tokens.is_meta:
        raise ArgumentError("tokens", "must have values, got a meta tensor")
    vocabulary = getattr(model.cfg, "d_vocab", None)
    if isinstance(vocabulary, int) and vocabulary > 0 and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise ArgumentError(
            "tokens", f"must be ids from 0 to {vocabulary - 1}, got {int(tokens.min())} … {int(tokens.max())}"
        )
    device = device_of(model)
    if device.type == "meta":
        raise ArgumentError("model", "must have weights, but its parameters are meta tensors: load them first")
    ids = (tokens if tokens.ndim == 2 else tokens[None]).to(device, torch.int64)
    if not padded:
        refuse_padding(model, ids)
    return ids


def special_id(model: Any, which: Literal["pad", "bos", "eos"]) -> int | None:
    """The id with which the model's tokenizer, or else its Hugging Face config, pads, begins or ends texts."""
    source = getattr(model, "tokenizer", None) or getattr(getattr(model, "original_model", None), "config", None)
    found = getattr(source, f"{which}_token_id", None)
    return found if isinstance(found, int) else None


_MASK = "pass attention_mask= (1 at tokens, 0 at padding; all ones if these are tokens of the text)"


def refuse_padding(model: Any, ids: Int[Tensor, "batch pos"], name: str = "tokens", advice: str = _MASK) -> None:
    """Refuse texts that begin or end with padding; ``name`` and ``advice`` are for the message."""
    if where := padding_in(model, ids):
        raise ArgumentError(name, f"must be without padding, got {where}: {advice}")


def padding_in(model: Any, ids: Int[Tensor, "batch pos"]) -> str | None:
    """Which texts begin or end with padding, for messages; None if none does."""
    pad = special_id(model, "pad")
    if pad is None:
        return None
    bos, eos = special_id(model, "bos"), special_id(model, "eos")
    may_begin = pad == (eos if bos is None else bos)
    for side, edge, alone in (("beginning", ids, may_begin), ("end", ids.flip(1), pad == eos)):
        run = (edge == pad).long().cumprod(1).sum(1)  # padding before the first other token
        bad = (run > int(alone)).nonzero()[:, 0].tolist()
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            return f"the padding id {pad} at the {side} of text {bad[0]}{more}"
    return None


def token_words(model: Any, ids: Int[Tensor, "pos"]) -> list[str]:
    """The tokens of a text, or their numbers where the model cannot say."""
    if getattr(model, "tokenizer", None) is None:
        return [str(i) for i in ids.tolist()]
    # One by one: of several, TransformerLens 2 with transformers 5 makes one word.
    return [str(model.to_str_tokens(one)[0]) for one in ids.split(1)]


def encode(model: Any, texts: list[str]) -> list[Int[Tensor, "1 _pos"]]:
    """The token ids of each text, by the model's tokenizer, not truncated."""
    if getattr(model, "tokenizer", None) is None:
        raise ArgumentError("tokens", "were given as text, but the model has no tokenizer: pass token ids")
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # half a surrogate pair, as a broken JSON file may hold
            raise ArgumentError("tokens", f"were given as text that is no UTF-8: {error}") from error
    return [model.to_tokens(text, truncate=False) for text in texts]
