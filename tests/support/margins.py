"""How near the comparisons of a test come to their tolerance.

`POSDISENT_MARGINS=margins.csv make test` appends one row for each test and line that compares floating-point numbers
and passes: the largest |a - b| / (atol + rtol |b|), |a - b| and the tolerance there, the data types, the test, and the
line. `sort -rg margins.csv | head` lists the tests nearest to their tolerance. An `assert x < 1e-6` is not recorded.
"""

from __future__ import annotations

import csv
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

TESTS = Path(__file__).parents[1].as_posix()
Margin = tuple[float, float, float]  # ratio, error, tolerance


def margin(actual: Any, expected: Any, rtol: float, atol: float) -> Margin | None:
    """The largest ratio of an error to its tolerance; None where nothing is compared up to a tolerance."""
    a, b = _array(actual), _array(expected)
    if a is None or b is None or not np.broadcast(a, b).size:
        return None
    with np.errstate(all="ignore"):
        error = np.where(a == b, 0, np.abs(a - b))  # infinities are equal or fail
        tolerance = np.broadcast_to(atol + rtol * np.abs(b), error.shape)
        ratio = np.nan_to_num(error / tolerance, nan=0)
    at = np.unravel_index(ratio.argmax(), ratio.shape)
    return (float(ratio[at]), float(error[at]), float(tolerance[at])) if tolerance[at] > 0 else None


def _array(x: Any) -> np.ndarray[Any, Any] | None:
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu()
        x = (x.to(torch.complex128) if x.is_complex() else x.double()).numpy()
    x = np.asarray(x)
    return x if x.dtype.kind in "fciu" else None


def dtype(x: Any) -> str:
    return str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")


def line() -> str | None:
    """The line of a test, or of an example in a docstring, that compares; None where the package itself compares."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith("<doctest") or (name.startswith(TESTS) and name != __file__):
            return f"{name.removeprefix(TESTS + '/')}:{frame.f_lineno}"
        if "/tl_posdisent/" in name:
            return None
        frame = frame.f_back  # type: ignore[assignment]
    return None


class Margins:
    """A plugin of pytest that replaces the functions that compare while a test runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, tuple[Any, ...]] = {}  # of the test that runs, by line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            self.replace(patch)
            yield
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerows((*row, item.nodeid, at) for at, row in self.rows.items())
        self.rows.clear()

    def replace(self, patch: pytest.MonkeyPatch) -> None:
        functions = {
            (torch.testing, "assert_close"): (None, None),  # as the data types have it
            (torch, "allclose"): (1e-5, 1e-8),
            (np.testing, "assert_allclose"): (1e-7, 0.0),
            (np, "allclose"): (1e-5, 1e-8),
            (np, "isclose"): (1e-5, 1e-8),
            (pd._libs.testing, "assert_almost_equal"): (1e-5, 1e-8),  # type: ignore[attr-defined]
        }
        for (module, name), defaults in functions.items():
            patch.setattr(module, name, self._recorded(getattr(module, name), *defaults))
        scalar: Any = type(pytest.approx(1.0))  # in which all its comparisons end
        equals = scalar.__eq__

        def recorded(approx: Any, actual: Any) -> bool:
            same: bool = equals(approx, actual)
            # The elements of an array are compared in turn; NaN has no tolerance.
            if same and not isinstance(actual, np.ndarray) and approx.expected == approx.expected:
                self._add(actual, approx.expected, 0.0, approx.tolerance)
            return same

        patch.setattr(scalar, "__eq__", recorded)

    def _recorded(self, compare: Callable[..., Any], rtol: float | None, atol: float | None) -> Callable[..., Any]:
        @functools.wraps(compare)
        def recorded(actual: Any, expected: Any, *args: Any, **options: Any) -> Any:
            result = compare(actual, expected, *args, **options)
            given = dict(zip(("rtol", "atol"), args, strict=False)) | options
            self._add(actual, expected, given.get("rtol", rtol), given.get("atol", atol))
            return result

        return recorded

    def _add(self, actual: Any, expected: Any, rtol: float | None, atol: float | None) -> None:
        if isinstance(actual, Mapping):
            actual, expected = [actual[key] for key in actual], [expected[key] for key in actual]
        if isinstance(actual, Sequence) and not isinstance(actual, str):
            for a, b in zip(actual, expected, strict=False):
                self._add(a, b, rtol, atol)
            return
        if rtol is None or atol is None:
            pair = torch.as_tensor(actual), torch.as_tensor(expected)
            rtol, atol = torch.testing._comparison.default_tolerances(*pair)
        found, at = margin(actual, expected, rtol, atol), line()
        if found is None or at is None or found[0] > 1:  # `not allclose(a, b)`
            return
        if at not in self.rows or found[0] > float(self.rows[at][0]):
            self.rows[at] = (*(f"{x:.4g}" for x in found), f"{dtype(actual)} {dtype(expected)}")
