"""Compare the numbers in two results of the package, of any type."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor


def numbers_in(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each numeric array with its path."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        yield path, (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    elif isinstance(value, pd.DataFrame):
        for name, column in value.items():
            if column.dtype != object:
                yield f"{path}.{name}", column.to_numpy()
    elif isinstance(value, (bool, int, float, np.ndarray)):
        yield path, np.asarray(value)
    elif isinstance(value, Mapping):
        for name, x in value.items():
            yield from numbers_in(x, f"{path}[{name!r}]")
    elif isinstance(value, (list, tuple)):
        for n, x in enumerate(value):
            yield from numbers_in(x, f"{path}[{n}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        compared = {x.name for x in dataclasses.fields(value) if x.compare}  # what is left out is no result: addresses
        yield from numbers_in({name: x for name, x in vars(value).items() if name in compared}, path)


def assert_same(found: Any, expected: Any, *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Assert that two results are equal to rounding."""
    left, right = dict(numbers_in(found)), dict(numbers_in(expected))
    assert left.keys() == right.keys()
    for path, x in right.items():
        if x.dtype.kind in "biufc" and "seconds" not in path:
            np.testing.assert_allclose(left[path], x, rtol=rtol, atol=atol, err_msg=path)
