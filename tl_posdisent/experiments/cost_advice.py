"""From the costs of a forward pass to those of a measurement, and to the nearest measurement that fits."""

from __future__ import annotations

from typing import Any

from tl_posdisent.models.chunked_scores import check_blocks
from tl_posdisent.models.forward_costs import Costs, Rates, measure_costs
from tl_posdisent.models.probe.explain import probe_tokens
from tl_posdisent.models.spec import n_layers, read_layers

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


def seconds(model: Any, costs: Costs, rates: Rates, tool: str, length: int, batch: int, block: int | None) -> float:
    """Matrix products, what is written to memory, the start of each step, and the reading of the scores."""
    rows = length if block is None else min(block, length)
    written, flops = costs.total(length, rows)
    if tool == "additivity":
        written += n_layers(model) * int(model.cfg.n_heads) * length**2 * 8  # the visible half, converted and summed
    blocks = -(-length // rows)
    return batch * (flops / rates.flops + written / rates.written) + costs.steps * blocks / rates.steps


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
