"""Estimates of the memory and operations of a measurement before it runs.

Not of its time, which depends on the machine: divide the operations by the rate of yours.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import pandas as pd

from tl_posdisent.models.chunked_scores import check_block, check_blocks
from tl_posdisent.models.memory import (
    Costs,
    free_memory,
    gigabytes,
    measure_costs,
    model_bytes,
    model_devices,
)
from tl_posdisent.models.reading.explain import probe_tokens
from tl_posdisent.models.reading.model_reading import read_layers
from tl_posdisent.models.reading.spec import n_layers
from tl_posdisent.utils.pictures import HasTable
from tl_posdisent.utils.validation import check_integer

# From the costs of a forward pass to those of a measurement, and to the nearest measurement that fits.

_BLOCKS = [2**n for n in range(10, 3, -1)]
_READ_AT_A_TIME = {"cpu": 2**18, "meta": 2**18}  # cells that the fit of scores converts to float64
_READ_ON_GPU = 2**24


def memory(model: Any, costs: Costs, tool: str, length: int, batch: int, block: int | None) -> tuple[int, int, int]:
    """Bytes of activations, of scores, and of the measurement itself."""
    rows = length if block is None else min(block, length)
    peak, of_scores = costs.peak(rows, length - rows)
    heads, kv = int(model.cfg.n_heads), int(getattr(model.cfg, "n_key_value_heads", None) or model.cfg.n_heads)
    if tool != "additivity":
        extra = 6 * length * (heads + kv) * int(model.cfg.d_head) * 8  # q and k in float64, and what is made of them
    else:
        device = next(model.parameters()).device.type
        coefficients = 3 * heads * length * 8
        cells = min(_READ_AT_A_TIME.get(device, _READ_ON_GPU), heads * rows * length)
        extra = 12 * coefficients + 3 * cells * 8  # those of the solver; blocks that are read
        extra += 0 if block is None else n_layers(model) * coefficients
    return round(batch * (peak - of_scores)), round(batch * of_scores), batch * extra


def advice(model: Any, costs: Costs, tool: str, length: int, batch: int, block: int | None, free: int) -> str:
    """Arguments with which it would fit."""

    def fits(costs: Costs, length: int, batch: int, block: int | None) -> bool:
        return sum(memory(model, costs, tool, length, batch, block)) <= free

    in_blocks = costs if block is not None else _costs_of_blocks(model) if tool == "additivity" else None
    if in_blocks is not None:
        for smaller in (b for b in _BLOCKS if b < (block or length)):
            if fits(in_blocks, length, batch, smaller):
                return f"block={smaller}"
    if batch > 1 and fits(costs, length, 1, block):
        most = max(n for n in range(1, batch) if fits(costs, length, n, block))
        return f"{most} text{'s' if most > 1 else ''} at a time (batch={most})"
    if in_blocks is not None and batch > 1 and fits(in_blocks, length, 1, _BLOCKS[-1]):
        return f"one text at a time with block={max(b for b in _BLOCKS if fits(in_blocks, length, 1, b))} (batch=1)"
    low, high = 1, length
    while high - low > 1:  # the longest that fits, by halving
        middle = (low + high) // 2
        low, high = (middle, high) if fits(costs, middle, 1, block) else (low, middle)
    if low < 2:
        return "a smaller model, a narrower dtype or another machine: not even two tokens fit"
    return f"one text of at most {low} tokens (length={low}, batch=1)"


def _costs_of_blocks(model: Any) -> Costs | None:
    """None for a model that cannot be run in blocks."""
    try:
        if next(model.parameters()).device.type != "meta":  # there, nothing can be compared
            specs = read_layers(model)
            check_blocks(model, probe_tokens(model)[:1], specs)
        return measure_costs(model, stop=n_layers(model), cached=True)
    except ValueError:
        return None


Measured = Literal["additivity", "controlled_distance", "subspace_patterns"]


@dataclass(frozen=True)
class Estimate(HasTable):
    """Memory and operations of a measurement, without the memory of other programs and other tensors.

    Attributes:
        tool, length, batch, block: the measurement.
        model_bytes: parameters and buffers.
        activation_bytes: the forward pass at its worst step, without what has the size of score matrices.
        score_bytes: score matrices, patterns and masks at that step.
        tool_bytes: additional memory of the measurement.
        peak_bytes: all of these.
        flops: operations of matrix products, two for each multiply and add.
        available_bytes: free memory in addition to the model; None if unknown, and then everything fits.
        advice: arguments that would fit, if this does not; else empty.

    Example:
        >>> from tl_posdisent import estimate, load_demo_model
        >>> plan = estimate(load_demo_model(), 4096, available=10**9)
        >>> plan.fits, plan.path, plan.advice
        (False, 'whole score matrices', 'block=1024')
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
    as well. The internal memory of matrix routines is not counted.

    Args:
        model: HookedTransformer, TransformerBridge or alike.
        length: tokens of a text, at least 2.
        batch: texts that run at once.
        tool: ``"additivity"``, ``"controlled_distance"`` or ``"subspace_patterns"``; other tools that run
            once, layer by layer, need about as much as the second.
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
        >>> plan.fits, plan.advice
        (False, 'block=1024')
        >>> estimate(load_demo_model(), 4096, available=10**9, block=1024).check().fits
        True
    """
    layers = n_layers(model)
    check_integer("length", length, 2)
    check_integer("batch", batch, 1)
    if tool not in get_args(Measured):
        raise ValueError(f"tool must be one of {', '.join(get_args(Measured))}, got {tool!r}")
    if available is not None:
        check_integer("available", available, 0)
    if block is not None:
        check_block(block)
        if tool != "additivity":
            raise ValueError(f"block must be None for {tool}: only additivity runs in blocks")
    costs = measure_costs(model, stop=layers, cached=block is not None)
    devices, weights = model_devices(model), model_bytes(model)
    on_meta = all(device.type == "meta" for device in devices)
    free = free_memory(devices) if available is None else available
    if available is None and on_meta and free is not None:
        free = max(0, free - weights)  # the model is still to come
    activations, scores, extra = memory(model, costs, tool, length, batch, block)
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
        advice="" if fits or free is None else advice(model, costs, tool, length, batch, block, free),
    )
