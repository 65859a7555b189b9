"""An edit as a value that does not depend on a model, and an intervention: an edit of some heads of one layer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.models.reading.spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class Edit:
    """What one call of a function does to the heads that it names; edits with equal contents are equal.

    Attributes:
        call: a short form of that call.
    """

    call: str

    @property
    def tool(self) -> str:
        return self.call.partition("(")[0]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_alike(getattr(self, x.name), getattr(other, x.name)) for x in fields(self))

    def __hash__(self) -> int:
        return hash((type(self), self.call))


@dataclass(frozen=True, eq=False)
class Intervention:
    """One edit of some heads of one layer."""

    edit: Edit
    spec: AttentionSpec
    heads: tuple[int, ...]


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.device == b.device and torch.equal(a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, partial):
        return _alike((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_alike, a, b))
    return bool(a == b)
