"""Every public function on a device against the CPU, in float32 and in bfloat16, on models of two layers.

The truth is what the CPU computes in float64. In a narrower type the device may be ``FLOOR`` from it, or four times as
far as the CPU itself. The CPU's rounding to bfloat16 is drawn several times: weights and arguments change in their last
place.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import device
from support import on_devices, zoo
from support.on_devices import NAMES, Place
from support.results import numbers_in
from support.support_laws import try_laws

import tl_posdisent as tp

FLOOR = {torch.float32: 1e-4, torch.bfloat16: 0.03}
FACTOR, MASKED = 4.0, 1e30
Numbers = dict[str, np.ndarray]


class Found(NamedTuple):
    """What a check found: it holds if ``value`` is at most ``bound``."""

    value: float
    bound: float
    note: str = ""


def numbers(name: str, kind: str, place: Place) -> Numbers | Exception:
    """All numbers in what a function returns, or what it raises."""
    try:
        found = numbers_in(on_devices.outcome(name, kind, place))
        return {at: np.asarray(x, float) for at, x in found if x.dtype.kind in "biuf" and "seconds" not in at}
    except Exception as error:  # noqa: BLE001 - of any kind: the CPU has to raise the same
        return error


@functools.cache
def truth_of(name: str, kind: str) -> Numbers | Exception:
    return numbers(name, kind, Place(dtype=torch.float64))


def error(found: Numbers | Exception, truth: Numbers | Exception) -> float:
    """The largest difference, relative to the largest number of its array; infinite where the shapes differ, or what is
    finite. An error is as far from a result as can be, and is at no distance from one of its type."""
    if isinstance(found, Exception) or isinstance(truth, Exception):
        return 0.0 if type(found) is type(truth) else math.inf
    if {at: x.shape for at, x in found.items()} != {at: x.shape for at, x in truth.items()}:
        return math.inf
    worst = 0.0
    for at, x in truth.items():
        seen, finite = found[at], np.abs(x) < MASKED  # the mask's number depends on the dtype
        if (finite != (np.abs(seen) < MASKED)).any():
            return math.inf
        if finite.any():
            worst = max(worst, np.abs(seen[finite] - x[finite]).max() / (np.abs(x[finite]).max() + 0.01))
    return float(worst)


def compared(kind: str, dtype: torch.dtype, draws: int, names: list[str]) -> Found:
    """The largest ratio of an error to what is allowed, over functions; the note names those above 1."""
    ratios, without = dict[str, float](), list[str]()
    more = draws if dtype == torch.bfloat16 else 0
    for name in names:
        truth = truth_of(name, kind)
        here = [numbers(name, kind, Place(dtype=dtype, jitter=float(n > 0), seed=n)) for n in range(1 + more)]
        there = numbers(name, kind, Place(str(device()), dtype))
        if isinstance(here[0], Exception):  # the CPU refuses the dtype: so must the device
            truth = here[0]
        allowed = max(FLOOR[dtype], FACTOR * max(error(x, truth) for x in here))
        if math.isinf(allowed):
            without.append(name)
        ratios[name] = error(there, truth) / allowed if math.isfinite(allowed) else 0.0
    worst = max(ratios, key=lambda name: ratios[name])
    bad = [f"{name} {ratio:.3g}" for name, ratio in ratios.items() if not ratio <= 1]
    said = f"wrong: {', '.join(bad)}" if bad else f"{len(ratios) - len(without)} functions, worst {worst}"
    return Found(ratios[worst], 1.0, said + f"; not comparable: {', '.join(without)}" * bool(without))


def laws(kind: str, dtype: torch.dtype) -> Found:
    """Laws of every tool, on whole and padded texts: the number that do not hold."""
    model = on_devices.put(zoo.load(kind, "llama-gqa"), Place(str(device()), dtype))
    table = try_laws(model)
    wrong = table[table["verdict"] == "wrong"]
    said = "; ".join(f"{tool} ({text}): {why}" for tool, text, why in wrong[["tool", "text", "reason"]].to_numpy())
    return Found(len(wrong), 0, said or f"{len(table)} checks, {(table['verdict'] == 'refused').sum()} refused")


def page(kind: str) -> Found:
    """Sections of the report that an error ended."""
    model: Any = on_devices.put(zoo.load(kind, "llama-gqa"), Place(str(device())))
    with tempfile.TemporaryDirectory() as folder:
        path = tp.report(model, zoo.random_tokens(), Path(folder, "report.html"), progress=False)
        text = path.read_text(encoding="utf-8")
    return Found(text.count("<strong>Not measured.</strong>"), 0, f"a page of {len(text) // 1024} KiB")


def checks(draws: int, kinds: tuple[str, ...], names: list[str] = NAMES) -> Iterator[tuple[str, Callable[[], Found]]]:
    """By name: the bridge first, then a ``HookedTransformer`` where there is one."""
    for kind in kinds:
        for dtype in FLOOR:
            said = f"{kind}, {str(dtype).removeprefix('torch.')}"
            yield f"error over what is allowed, {said}", partial(compared, kind, dtype, draws, names)
            yield f"laws of tools, wrong, {said}", partial(laws, kind, dtype)
    yield f"report, sections that failed, {kinds[0]}", partial(page, kinds[0])
