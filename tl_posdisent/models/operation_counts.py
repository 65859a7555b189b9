"""Memory and operations of a forward pass as functions of the length: counted on short texts, not looked up.

Every tensor's size is a product of lengths and constants, so what is live after each step of the pass is a polynomial
of the length; some short texts determine it exactly. The step at which most is live may be another one in a long text
than in a short one, which is why it is looked for at the length asked about. Nothing here depends on the device: a
model on ``meta``, which has shapes and no numbers, is counted as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tl_posdisent.models.chunked_scores import empty_cache, with_mask
from tl_posdisent.models.reading.forward import Hook, at_rest, hook_name, hook_points, run
from tl_posdisent.models.reading.probe import probe_tokens


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made while this context is entered, until they are freed.

    Attributes:
        now: bytes that are live.
        steps: bytes after each operation of torch.

    Example:
        >>> import torch
        >>> from tl_posdisent.models.operation_counts import LiveBytes
        >>> with LiveBytes() as live:
        ...     x = torch.zeros(1000)
        ...     y = x + 1
        ...     del x
        >>> live.now, max(live.steps)
        (4000, 8000)
    """

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
    columns = [0, 1, 2, 3, 4, 5] if cached else [0, 1, 3]
    terms = torch.stack([_terms(*point) for point in points])[:, columns]

    def interpolated(values: Sequence[Sequence[int]]) -> Tensor:
        found = torch.linalg.solve(terms, torch.tensor(values, dtype=torch.float64)).T
        full: Tensor = found.new_zeros(len(found), 6)
        full[:, columns] = found
        return full

    # Where the steps depend on the text (experts chosen by it), only the peaks can be compared.
    alike = len({len(one.live) for one in counted}) == 1
    live = interpolated([one.live if alike else [max(one.live)] for one in counted])
    (products,) = interpolated([[one.flops] for one in counted])
    return Costs(live, interpolated([one.given for one in counted]), products)


class _Counted(NamedTuple):
    live: list[int]
    given: list[int]
    flops: int


def _count(model: Any, rows: int, before: int, stop: int, cached: bool, held: Held) -> _Counted:
    """One pass over ``rows`` tokens, behind a cache of ``before`` others if ``cached``."""
    tokens = probe_tokens(model)[:1, :1].expand(1, before + rows).contiguous()  # one token, one route through experts
    given: list[int] = []
    kept: list[Any] = []
    with torch.no_grad(), LiveBytes() as live:
        cache = empty_cache(model, tokens) if cached else {}
        if cached:
            run(model, tokens[:, :before], [], stop=stop, **with_mask(cache, tokens[:, :before]))
        live.steps.clear()
        layers = range(stop) if held != "layer" else [stop - 1]
        hooks = _as_a_tool(model, layers, held, kept, lambda: given.append(live.now))
        with FlopCounterMode(display=False) as flops:
            run(model, tokens[:, before:], hooks, stop=stop, **with_mask(cache, tokens[:, before:]))
        return _Counted(live.steps, [live.now] if kept else given, flops.get_total_flops())


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


def _terms(rows: int, before: int) -> Float64[Tensor, "6"]:
    return torch.tensor([1, rows, before, rows**2, rows * before, before**2], dtype=torch.float64)
