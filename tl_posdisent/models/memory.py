"""Free memory of devices, and memory and time of a model's forward pass."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tl_posdisent.models.chunked_scores import empty_cache
from tl_posdisent.models.reading.explain import probe_tokens
from tl_posdisent.models.reading.forward import Hook, at_rest, hook_name, hook_points, modules, run

# What a piece of code holds in tensors at each of its steps, and how many operations it takes: counted, not looked up.
#
# Nothing here depends on the device: a model on ``meta``, which has shapes and no numbers, is counted as well.


class Counted(NamedTuple):
    """Of one run.

    Attributes:
        live: bytes in tensors that were made since counting began, after each step.
        flops: of all matrix products, two for each multiply and add.
    """

    live: list[int]
    flops: int


def count(prepare: Callable[[], Any], work: Callable[[Any, Callable[[], int]], Any]) -> Counted:
    """Run ``prepare``, whose tensors count as live, and then ``work`` on what it returned, step by step; ``work`` is
    also given a function that says how many bytes are live now."""
    with torch.no_grad(), _Live() as live:
        ready = prepare()
        live.steps.clear()
        with FlopCounterMode(display=False) as flops:
            work(ready, lambda: live.now)
    return Counted(live.steps, flops.get_total_flops())


class _Live(TorchDispatchMode):
    """Follows every new storage until it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[int] = []
        self.now = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in given:
                self._follow(storage)
        self.steps.append(self.now)
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        name, size = storage._cdata, storage.nbytes()
        if name in self._known:
            return
        self._known[name] = size
        self.now += size
        weakref.finalize(storage, self._forget, name).atexit = False

    def _forget(self, name: int) -> None:
        self.now -= self._known.pop(name, 0)


# What a forward pass costs as a function of the length, from a few passes over short texts.
#
# Every tensor's size is a product of lengths and constants, so what is live after each step of the pass is a polynomial
# of the length; some short texts determine it exactly. The step at which most is live may be another one in a long text
# than in a short one, which is why it is looked for at the length asked about.

Held = Literal["nothing", "vectors", "layer"]
"""What a tool holds of a layer: nothing of its own; queries and keys until the scores come; all until the end."""


@dataclass(frozen=True, eq=False)
class Costs:
    """Polynomials of ``rows`` queries after ``before`` others: coefficients of 1, rows, before, rows², rows·before,
    before².

    Attributes:
        live: bytes after each step.
        given: bytes while a tool works on a layer: when the scores of each come, or behind the pass (``Held``).
        products: operations of matrix products.
    """

    live: Float64[Tensor, "step 6"]
    given: Float64[Tensor, "layer 6"]
    products: Float64[Tensor, "6"]

    def peak(self, rows: int, before: int = 0) -> tuple[float, float]:
        """Bytes at the worst step, and how many of them are in tensors of the size of score matrices."""
        terms = _terms(rows, before)
        at = self.live @ terms
        worst = int(at.argmax())
        of_scores = (self.live[worst, 3:5] * terms[3:5]).sum()
        return float(at[worst]), float(of_scores)

    def at_tool(self, rows: int, before: int = 0) -> float:
        """Bytes of the pass while a tool works, in the worst layer."""
        return max((self.given @ _terms(rows, before)).tolist(), default=0.0)

    def flops(self, length: int, rows: int) -> float:
        """Operations of a whole text in blocks of ``rows``."""
        firsts = range(0, length, rows)
        terms = torch.stack([_terms(min(rows, length - first), first) for first in firsts]).sum(0)
        return float(self.products @ terms)


def measure_costs(model: Any, *, stop: int, cached: bool, held: Held = "nothing") -> Costs:
    """Costs of one text through the layers before ``stop``: in one pass, or of a block of it behind a cache.

    Raises:
        ValueError: ``cached`` for a model that takes no cache.
    """
    unit = max(2, min(16, (getattr(model.cfg, "n_ctx", None) or 48) // 3))
    once = [(unit, 0), (2 * unit, 0), (3 * unit, 0)]
    half = max(1, unit // 2)
    twice = [(half * rows, half * before) for rows, before in ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2))]
    points = twice if cached else once
    with at_rest(model):
        counted = [_count(model, rows, before, stop, cached, held) for rows, before in points]
    terms = torch.stack([_terms(*point) for point in points])
    columns = [0, 1, 2, 3, 4, 5] if cached else [0, 1, 3]
    return _interpolated(counted, terms[:, columns], columns)


class _CountedPass(NamedTuple):
    live: list[int]
    given: list[int]
    flops: int


def _count(model: Any, rows: int, before: int, stop: int, cached: bool, held: Held) -> _CountedPass:
    tokens = probe_tokens(model)[:1, :1].expand(1, before + rows).contiguous()  # one token, one route through experts
    given: list[int] = []

    def first() -> dict[str, Any]:
        cache = empty_cache(model, tokens) if cached else {}
        if cached:
            run(model, tokens[:, :before], [], stop=stop, **_with_mask(cache, tokens[:, :before]))
        return cache

    def second(cache: dict[str, Any], now: Callable[[], int]) -> None:
        kept: list[Any] = []
        hooks = _as_a_tool(
            model, range(stop) if held != "layer" else [stop - 1], held, kept, lambda: given.append(now())
        )
        run(model, tokens[:, before:], hooks, stop=stop, **_with_mask(cache, tokens[:, before:]))
        if kept:
            given[:] = [now()]

    counted = count(first, second)
    return _CountedPass(counted.live, given, counted.flops)


_VECTORS = ("hook_q", "hook_k", "hook_q_normed", "hook_k_normed", "hook_rot_q", "hook_rot_k")


def _as_a_tool(model: Any, layers: Iterable[int], held: Held, kept: list[Any], note: Callable[[], None]) -> list[Hook]:
    """Hooks that hold what a tool does of these layers, and call ``note`` when the scores of one come; where a layer
    shows none, when its pattern comes, for scores that are computed. By names: a model on ``meta`` cannot be read."""
    vectors: dict[str, Tensor] = {}
    arrived: set[int] = set()

    def hold(name: str, x: Tensor, hook: Any) -> None:
        vectors[name] = x.detach()

    def arrive(layer: int, shown: bool, x: Tensor, hook: Any) -> None:
        if layer in arrived:
            return
        arrived.add(layer)
        own = [] if held == "vectors" else [x.detach()] if shown else [torch.empty_like(x) for _ in range(2)]
        if held != "nothing" and not any("rot" in name for name in vectors):
            own += [torch.empty_like(vector) for vector in vectors.values()]
        note()
        if held == "layer":
            kept.append((own, dict(vectors)))
        vectors.clear()

    wanted = [(layer, name, partial(hold, name)) for layer in layers for name in _VECTORS if held != "nothing"]
    wanted += [(layer, "hook_attn_scores", partial(arrive, layer, True)) for layer in layers]
    wanted += [(layer, "hook_pattern", partial(arrive, layer, False)) for layer in layers]
    points = hook_points(model)
    return [(hook_name(layer, name), f) for layer, name, f in wanted if hook_name(layer, name) in points]


def _with_mask(cache: dict[str, Any], tokens: Tensor) -> dict[str, Any]:
    return cache | {"attention_mask": torch.ones_like(tokens)} if "past_kv_cache" in cache else cache


def _interpolated(counted: Sequence[_CountedPass], terms: Tensor, columns: list[int]) -> Costs:
    steps = {len(one.live) for one in counted}
    # Where the steps depend on the text (experts chosen by it), only the peaks can be compared.
    live = [one.live if len(steps) == 1 else [max(one.live)] for one in counted]

    def solved(values: Sequence[Sequence[int]]) -> Tensor:
        found = torch.linalg.solve(terms, torch.tensor(values, dtype=torch.float64)).T
        full: Tensor = found.new_zeros(len(found), 6)
        full[:, columns] = found
        return full

    return Costs(solved(live), solved([one.given for one in counted]), solved([[one.flops] for one in counted])[0])


def _terms(rows: int, before: int) -> Float64[Tensor, "6"]:
    return torch.tensor([1, rows, before, rows**2, rows * before, before**2], dtype=torch.float64)


_NO_LIMIT = 1 << 60  # control groups say "none" as a huge number


def free_memory(devices: Iterable[torch.device | str] = ("cpu",)) -> int | None:
    """Bytes that are free on the fullest of these devices; None where the system does not say.

    On the host the smaller of what Linux calls available and what the control group of the process leaves; on a GPU
    what CUDA has free and what torch has reserved and not used.
    """
    found = [_of_device(torch.device(device)) for device in devices]
    known = [free for free in found if free is not None]
    return min(known) if known else None


def model_devices(model: Any) -> list[torch.device]:
    """Where a model's tensors are, each device once."""
    return list(dict.fromkeys(x.device for x in _tensors(model)))


def model_bytes(model: Any) -> int:
    """Bytes of parameters and buffers, each storage once."""
    sizes = {}
    for x in _tensors(model):
        storage = x.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def require_room(model: Any, n_matrices: int, length: int, block: int | None) -> None:
    """Refuse a text of which the score matrices of one layer alone are more than there is.

    The forward pass holds them at least twice, as scores and as pattern: what is refused would not have run.

    Raises:
        MemoryError: says what would.
    """
    size = min((x.element_size() for x in model.parameters() if x.is_floating_point()), default=4)
    scores, free = n_matrices * (length if block is None else min(block, length)) * length * size, None
    if scores > 2**20:
        free = free_memory(model_devices(model))
    if free is not None and scores > free:
        smaller = max(1, free // (8 * n_matrices * length * size))
        raise MemoryError(
            f"scores of one layer take {gigabytes(scores)}, several times over, and {gigabytes(free)} are free: use "
            f"block={smaller} or less (estimate(model, {length}, block={smaller}) says what it takes), or fewer texts"
        )


def gigabytes(n: int | float) -> str:
    """Bytes in GB of 10⁹, for people."""
    return f"{n / 1e9:.3g} GB" if n < 1e12 else f"{n / 1e9:,.0f} GB"


def _tensors(model: Any) -> list[Tensor]:
    return [
        x for part in modules(model) for x in (*part._parameters.values(), *part._buffers.values()) if x is not None
    ]


def _of_device(device: torch.device) -> int | None:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type not in ("cpu", "meta"):
        return None
    known = [x for x in (_available(), _left_by_group()) if x is not None]
    return min(known) if known else None


def _available() -> int | None:
    """Of the whole machine."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_by_group() -> int | None:
    """What the control groups that this process sees leave, of version 2 or 1; file cache can be given back."""
    left = math.inf
    for folder, limit, used, cache in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
    ):
        try:
            text = Path(folder, limit).read_text(encoding="ascii").strip()
            if text == "max" or int(text) >= _NO_LIMIT:
                continue
            stat = Path(folder, "memory.stat").read_text(encoding="ascii").splitlines()
            spare = next((int(line.split()[1]) for line in stat if line.startswith(cache)), 0)
            left = min(left, int(text) - int(Path(folder, used).read_text(encoding="ascii")) + spare)
        except (OSError, ValueError):
            continue
    return None if left == math.inf else max(0, int(left))
