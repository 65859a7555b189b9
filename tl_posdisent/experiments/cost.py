"""Estimates of the memory and operations of a measurement before it runs.

Not of its time, which depends on the machine: divide the operations by the rate of yours.
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.models.chunked_scores import check_blocks
from tl_posdisent.models.memory import free_memory, gigabytes, model_bytes, model_devices
from tl_posdisent.models.operation_counts import Costs, Held, LiveBytes, measure_costs
from tl_posdisent.models.reading.model_reading import read_layers
from tl_posdisent.models.reading.probe import probe_tokens
from tl_posdisent.models.reading.spec import n_layers
from tl_posdisent.rope.covariance import NUMBERS_AT_ONCE
from tl_posdisent.rope.moments import Moments
from tl_posdisent.rope.rotary import Rotary
from tl_posdisent.rope.subspaces import subspace_patterns_qk
from tl_posdisent.rope.variance_decomposition import ANGLES_AT_ONCE, decompose
from tl_posdisent.utils.pictures import HasTable
from tl_posdisent.utils.validation import check_choice, check_integer

Measured = Literal["additivity", "controlled_distance", "subspace_patterns", "fit_attention"]
_HELD: dict[str, Held] = {"additivity": "nothing", "fit_attention": "layer"}
_BLOCKS = [2**n for n in range(10, 3, -1)]


@dataclass(frozen=True)
class Estimate(HasTable):
    """Memory and operations of a measurement, without the memory of other programs and other tensors.

    Attributes:
        tool, length, batch, block: the measurement.
        model_bytes: parameters and buffers.
        activation_bytes: the forward pass at its worst step, without what has the size of score matrices.
        score_bytes: score matrices, patterns and masks at that step.
        tool_bytes: what the measurement adds to that peak. Where its own work on a layer needs less, what is left is
            an allowance for the allocator and matrix routines.
        peak_bytes: all of these.
        flops: operations of matrix products, two for each multiply and add.
        available_bytes: free memory in addition to the model; None if unknown, and then everything fits.
        advice: arguments that would fit, if this does not; else empty.
    """

    tool: str
    length: int
    batch: int
    block: int | None
    model_bytes: int
    activation_bytes: int
    score_bytes: int
    tool_bytes: int
    peak_bytes: int
    flops: float
    available_bytes: int | None
    advice: str

    @property
    def path(self) -> str:
        """How the model runs."""
        return "whole score matrices" if self.block is None else f"blocks of {self.block} queries"

    @property
    def needed_bytes(self) -> int:
        """Beside the model."""
        return self.peak_bytes - self.model_bytes

    @property
    def fits(self) -> bool:
        """Whether what is needed beside the model is there."""
        return self.available_bytes is None or self.needed_bytes <= self.available_bytes

    def check(self) -> Estimate:
        """Itself, if it fits.

        Raises:
            MemoryError: it does not fit; names the needed and the free memory, and arguments that would fit.
        """
        if not self.fits:
            assert self.available_bytes is not None
            raise MemoryError(
                f"{self.tool} of {self.batch}×{self.length} tokens needs {gigabytes(self.needed_bytes)} beside the "
                f"model, of which {gigabytes(self.score_bytes)} for scores, and {gigabytes(self.available_bytes)} are "
                f"available: use {self.advice}"
            )
        return self

    def to_frame(self) -> pd.DataFrame:
        """One row, with ``path``, ``needed_bytes`` and ``fits``."""
        derived = {"path": self.path, "needed_bytes": self.needed_bytes, "fits": self.fits}
        return pd.DataFrame([asdict(self) | derived])

    def __repr__(self) -> str:
        there = "" if self.available_bytes is None else f" of {gigabytes(self.available_bytes)} available"
        return (
            f"Estimate: {self.tool} of {self.batch}×{self.length} tokens in {self.path}\n"
            f"  model {gigabytes(self.model_bytes)}, beside it {gigabytes(self.needed_bytes)}{there}: activations "
            f"{gigabytes(self.activation_bytes)}, scores {gigabytes(self.score_bytes)}, "
            f"measurement {gigabytes(self.tool_bytes)}\n"
            f"  {self.flops:.2g} FLOPs; {'fits' if self.fits else f'does not fit: use {self.advice}'}"
        )


def estimate(
    model: Any,
    length: int,
    *,
    batch: int = 1,
    tool: Measured = "additivity",
    block: int | None = None,
    available: int | None = None,
) -> Estimate:
    """Estimate memory and operations of a measurement of a text.

    The model runs on a few texts of at most 48 tokens while its tensors are counted; their sizes are polynomials of the
    length, from which the memory at each step of a long text follows. Models on ``meta`` (shapes without numbers) work
    as well. For matrix routines, the allocator and what is read of the model, 8 MiB, 0.4 MiB a layer and 5 % (at most
    16 MiB) are added, as measured.

    Args:
        model: HookedTransformer, TransformerBridge or alike.
        length: tokens of a text, at least 2.
        batch: texts that run at once.
        tool: ``"additivity"``, ``"controlled_distance"``, ``"subspace_patterns"``, or ``"fit_attention"`` of the scores
            that ``capture`` gives of one layer; other tools that run once, layer by layer, need about as much as the
            second.
        block: as in ``additivity``, which alone has it.
        available: bytes that may be used in addition to the model; default the free memory of the model's device (RAM
            or the limit of the process's control group; memory of the fullest GPU).

    Returns:
        An ``Estimate``. ``estimate(...).check()`` raises a ``MemoryError`` if it does not fit.

    Raises:
        ValueError: unusable arguments; ``block`` for another tool, or a model that takes no cache.

    Example:
        >>> from tl_posdisent import estimate, load_demo_model
        >>> plan = estimate(load_demo_model(), 4096, available=10**9)
        >>> plan.fits, plan.path, plan.advice
        (False, 'whole score matrices', 'block=1024')
        >>> estimate(load_demo_model(), 4096, available=10**9, block=1024).check().fits
        True
    """
    layers = n_layers(model)
    check_integer("length", length, 2)
    check_integer("batch", batch, 1)
    check_choice("tool", tool, get_args(Measured))
    if available is not None:
        check_integer("available", available, 0)
    if block is not None:
        check_integer("block", block, 1)
        if tool != "additivity":
            raise ValueError(f"block must be None for {tool}: only additivity runs in blocks")
    costs = measure_costs(model, stop=layers, cached=block is not None, held=_HELD.get(tool, "vectors"))
    devices, weights = model_devices(model), model_bytes(model)
    on_meta = all(device.type == "meta" for device in devices)
    free = free_memory(devices) if available is None else available
    if available is None and on_meta and free is not None:
        free = max(0, free - weights)  # the model is still to come
    activations, scores, extra = _memory(model, costs, tool, length, batch, block)
    flops = costs.flops(length, length if block is None else min(block, length))
    needed = activations + scores + extra
    fits = free is None or needed <= free
    return Estimate(
        tool=tool,
        length=length,
        batch=batch,
        block=block,
        model_bytes=weights,
        activation_bytes=activations,
        score_bytes=scores,
        tool_bytes=extra,
        peak_bytes=weights + needed,
        flops=batch * flops,
        available_bytes=free,
        advice="" if fits or free is None else _advice(model, costs, tool, length, batch, block, free),
    )


# --- from the costs of a forward pass to those of a measurement -------------------------------------------------------


def _memory(model: Any, costs: Costs, tool: str, length: int, batch: int, block: int | None) -> tuple[int, int, int]:
    """Bytes of activations and of scores when the pass has most, and what the measurement adds to that."""
    rows = length if block is None else min(block, length)
    peak, of_scores = costs.peak(rows, length - rows)
    kept, work, after = _of_tool(model, tool, length, batch, rows)
    needed = kept + max(batch * peak, batch * costs.at_tool(rows, length - rows) + work, after)
    needed += 2**23 + 0.4 * 2**20 * n_layers(model) + min(0.05 * needed, 2**24)  # beside tensors, as measured
    return round(batch * (peak - of_scores)), round(batch * of_scores), round(needed - batch * peak)


def _of_tool(model: Any, tool: str, length: int, batch: int, rows: int) -> tuple[float, float, float]:
    """Bytes of a measurement's own: what it keeps of all layers, what it works on one with, and its work behind all."""
    heads, kv = int(model.cfg.n_heads), int(getattr(model.cfg, "n_key_value_heads", None) or model.cfg.n_heads)
    if tool == "additivity":
        on_gpu = next(model.parameters()).device.type not in ("cpu", "meta")
        coefficients = 3 * batch * heads * length * 8
        cells = batch * heads * length * (rows if on_gpu else min(rows, 64))
        cells = min(cells, 2**24 if on_gpu else 2**18)  # that the fit of scores converts to float64 at a time
        return float(n_layers(model) * coefficients), float(3 * cells * 8), float(12 * coefficients)
    if tool == "fit_attention":
        return 0.0, _of_attention_fit(heads * batch, length), 0.0
    d_head, dtype = int(model.cfg.d_head), next(x.dtype for x in model.parameters() if x.is_floating_point())
    points, distances = batch * length, min(length, ANGLES_AT_ONCE // -(-d_head // 2))
    at_once = min(points, max(1, NUMBERS_AT_ONCE // (heads * d_head)))
    terms = torch.tensor([1, at_once, distances], dtype=torch.float64)
    sums = 8 * (heads + kv) * d_head * (d_head + 1) if at_once < points else 0  # of the chunks before
    return 0.0, float((_of_vectors(tool, heads, kv, d_head, dtype) @ terms).max()) + sums, 0.0


@functools.lru_cache(maxsize=64)
def _of_vectors(tool: str, heads: int, kv: int, d_head: int, dtype: torch.dtype) -> Float64[Tensor, "step 3"]:
    """Bytes after each step of a measurement of one layer's queries and keys: coefficients of 1, of the number of
    points and of that of distances. Counted on a few vectors of these widths."""
    rotary, generator = Rotary(torch.ones(d_head // 2, dtype=torch.float64)), torch.Generator().manual_seed(0)

    def live(points: int, distances: int) -> list[int]:
        q, k = (torch.randn(points, n, d_head, generator=generator).to(dtype) for n in (heads, kv))

        with torch.no_grad(), LiveBytes() as counted:
            if tool == "subspace_patterns":
                subspace_patterns_qk(q, k, rotary, range(distances), scale=1.0)
            else:
                decompose(Moments.from_qk(q, k, rotary), range(distances), scale=1.0)
        steps: list[int] = counted.steps
        return steps

    few, more_points, more_distances = (torch.tensor(live(*n)).double() for n in ((8, 8), (16, 8), (8, 16)))
    of_points, of_distances = (more_points - few) / 8, (more_distances - few) / 8
    return torch.stack([few - 8 * (of_points + of_distances), of_points, of_distances], -1)


def _of_attention_fit(matrices: int, length: int) -> float:
    """Bytes of ``fit_attention``: two copies of a block of the pattern in float64 and the block before, what the solver
    holds, and the pattern of half of the queries, a guess: it forms those cell by cell that look at few keys."""
    cells = matrices * length**2
    block = min(cells, max(2**20, min(64 * length, 2**22)))
    solved_together = min(matrices, max(1, 2**14 // length))
    stored = min(solved_together * length**2 // 4, 2**26)
    return 8 * (block * (3 - block / cells) + 30 * matrices * length + stored)


# --- the nearest measurement that fits --------------------------------------------------------------------------------


def _advice(model: Any, costs: Costs, tool: str, length: int, batch: int, block: int | None, free: int) -> str:
    """Arguments with which it would fit: smaller blocks, then fewer texts, then both, then a shorter text."""

    def fits(costs: Costs, length: int, batch: int, block: int | None) -> bool:
        return sum(_memory(model, costs, tool, length, batch, block)) <= free

    blocked = costs if block is not None else _costs_of_blocks(model) if tool == "additivity" else None
    blocks = [] if blocked is None else [(blocked, size) for size in _BLOCKS]
    tries = [(x, length, batch, size, f"block={size}") for x, size in blocks if size < (block or length)]
    for n in range(batch - 1, 0, -1):
        tries.append((costs, length, n, block, f"{n} text{'s' if n > 1 else ''} at a time (batch={n})"))
    if batch > 1:
        tries += [(x, length, 1, size, f"one text at a time with block={size} (batch=1)") for x, size in blocks]
    for *arguments, words in tries:
        if fits(*arguments):
            return words
    longest = 1 + bisect.bisect(range(2, length), False, key=lambda n: not fits(costs, n, 1, block))
    if longest < 2:
        return "a smaller model, a narrower dtype or another machine: not even two tokens fit"
    return f"one text of at most {longest} tokens (length={longest}, batch=1)"


def _costs_of_blocks(model: Any) -> Costs | None:
    """None for a model that cannot be run in blocks."""
    try:
        if next(model.parameters()).device.type != "meta":  # there, nothing can be compared
            specs = read_layers(model)
            check_blocks(model, probe_tokens(model)[:1], specs)
        return measure_costs(model, stop=n_layers(model), cached=True)
    except ValueError:
        return None
