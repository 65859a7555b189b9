"""What a GGUF file states about a model's architecture: each key is taken by what it means, or refused by its name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tl_posdisent.utils.validation import is_integer, is_number, printable, shown

_NEEDED: Any = object()
_LARGEST = 2**31 - 1  # of a size; llama.cpp's are 32 bits too

# Keys that describe what no computation depends on.
_HARMLESS = frozenset(
    (
        "pooling_type",  # of embeddings, which are not asked for
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",  # of yarn and longrope alone, which are refused
        "tensor_data_layout",
    )
)
# Keys with a value that changes nothing. Any other is refused, unless an architecture takes the key.
_NEUTRAL: Mapping[str, float | bool] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "use_parallel_residual": False,
}


class Stated:
    """The metadata of a file's architecture; ``finish`` refuses what no call has taken.

    Every method raises ValueError with the key's name if the value has another type or is out of range.
    """

    def __init__(self, architecture: str, metadata: Mapping[str, Any]) -> None:
        self.architecture = architecture
        begin = f"{architecture}."
        self._left = {key.removeprefix(begin): value for key, value in metadata.items() if key.startswith(begin)}

    def named(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def wrong(self, key: str, value: Any, needed: str) -> ValueError:
        return ValueError(f"{self.named(key)} must be {needed}, and is {shown(value)}")

    def _take(self, key: str, default: Any) -> Any:
        if key not in self._left and default is _NEEDED:
            raise ValueError(f"it does not state {self.named(key)}, which is needed")
        return self._left.pop(key, default)

    def integer(self, key: str, default: Any = _NEEDED, *, least: int = 1, most: int = _LARGEST) -> Any:
        """An integer, or an array of equal ones, as where layers may differ."""
        found = self._take(key, default)
        if isinstance(found, np.ndarray) and found.size and (found == found[0]).all():
            found = found[0].item()
        if found is default and found is not _NEEDED:
            return found
        if not is_integer(found) or not least <= found <= most:
            raise self.wrong(key, found, f"an integer from {least} to {most}, the same in all layers")
        return found

    def number(self, key: str, default: Any = _NEEDED) -> Any:
        """A finite number above 0."""
        found = self._take(key, default)
        if found is default and found is not _NEEDED:
            return found
        if not (is_number(found) and math.isfinite(found) and found > 0):
            raise self.wrong(key, found, "a finite number above 0")
        return float(found)

    def cap(self, key: str, default: Any = _NEEDED) -> float | None:
        """A bound of logits, None where it is 0."""
        if not isinstance(self._left.get(key), np.ndarray) and self._left.get(key) == 0:
            return self._left.pop(key) or None
        found: float | None = self.number(key, default)
        return found

    def text(self, key: str, default: Any = _NEEDED) -> Any:
        found = self._take(key, default)
        if found is not default and not isinstance(found, str):
            raise self.wrong(key, found, "a string")
        return found

    def window(self, default: Any = _NEEDED) -> int | None:
        """The sliding window in tokens, None where the file states 0."""
        found: int | None = self.integer("attention.sliding_window", default, least=0)
        return found or None

    def sliding_layers(self, n_layers: int, period: int) -> list[bool]:
        """Which layers have a sliding window: all but each ``period``-th, unless the file states another pattern.

        A file states it as a number, the period (0: all layers), or as an array with a truth value for each layer.
        """
        key = "attention.sliding_window_pattern"
        found = self._take(key, period)
        if isinstance(found, np.ndarray):
            if len(found) != n_layers or found.dtype.kind not in "biu" or not np.isin(found, (0, 1)).all():
                raise self.wrong(key, found.tolist()[:20], f"a number, or {n_layers} truth values")
            return [bool(x) for x in found]
        if not is_integer(found) or not 0 <= found <= _LARGEST:
            raise self.wrong(key, found, f"a number, or {n_layers} truth values")
        return [found == 0 or n % found < found - 1 for n in range(n_layers)]

    def attending(self) -> list[bool] | None:
        """Which layers attend, of a hybrid: those with heads of keys, as many in all of them; None if not stated so."""
        key = "attention.head_count_kv"
        found = self._left.get(key)
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or not found.any():
            return None
        self._left[key] = found[found != 0]
        return [bool(x) for x in found]

    def must_be(self, key: str, value: Any, why: str) -> None:
        """Refuse the key's value, if it is stated, unless it is this one."""
        found = self._left.pop(key, value)
        if isinstance(found, np.ndarray) and found.size and (found == found[0]).all():
            found = found[0].item()
        if isinstance(value, float) and is_number(found):
            same = math.isclose(found, value, rel_tol=1e-5)
        else:
            same = type(found) is type(value) and found == value
        if not same:
            raise self.wrong(key, found, f"{shown(value)}, {why}")

    def leave_out(self, key: str) -> None:
        """Take a truth value that changes nothing for this architecture."""
        found = self._left.pop(key, True)
        if found is not True and found is not False:
            raise self.wrong(key, found, "a truth value")

    def finish(self) -> None:
        """Refuse by name what is left: it may change what a model computes."""
        for key, value in _NEUTRAL.items():
            self.must_be(key, value, "as nothing else is computed for this architecture")
        if left := [key for key in self._left if key not in _HARMLESS]:
            key = left[0]
            raise ValueError(
                f"it states {printable(self.named(key))}, {shown(self._left[key])}, which is not read for this "
                "architecture and may change what it computes"
            )
