"""Metadata of a GGUF file about a model's architecture: each key is used for what it means, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tl_posdisent.utils.validation import is_integer, is_number, printable, shown

_NEEDED: Any = object()
_LARGEST = 2**31 - 1  # limit for sizes, which also have 32 bits in llama.cpp

# Keys on which no computation depends.
_HARMLESS = frozenset(
    (
        "pooling_type",  # for embedding models only
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",  # for yarn and longrope only, which are refused
        "tensor_data_layout",
    )
)
# Keys with the value that changes nothing. Any other value is refused, unless an architecture uses the key.
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
    """The metadata of a file's architecture; ``finish`` refuses keys that no call has used.

    Every method raises ValueError with the key's name if the value has the wrong type or is out of range.
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
        """Return an integer; an array of equal integers (one per layer) counts as one."""
        found = self._take(key, default)
        if isinstance(found, np.ndarray) and found.size and (found == found[0]).all():
            found = found[0].item()
        if found is default and found is not _NEEDED:
            return found
        if not is_integer(found) or not least <= found <= most:
            raise self.wrong(key, found, f"an integer from {least} to {most}, the same in all layers")
        return found

    def number(self, key: str, default: Any = _NEEDED) -> Any:
        """Return a finite number above 0."""
        found = self._take(key, default)
        if found is default and found is not _NEEDED:
            return found
        if not (is_number(found) and math.isfinite(found) and found > 0):
            raise self.wrong(key, found, "a finite number above 0")
        return float(found)

    def cap(self, key: str, default: Any = _NEEDED) -> float | None:
        """Return a soft cap of logits, or None if it is 0."""
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
        """Return the sliding window in tokens, or None if the file states 0."""
        found: int | None = self.integer("attention.sliding_window", default, least=0)
        return found or None

    def sliding_layers(self, n_layers: int, period: int) -> list[bool]:
        """Say which layers have a sliding window: all but every ``period``-th, unless the file states another pattern.

        A file states the pattern as a number, the period (0: all layers), or as an array with a truth value per layer.
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
        """Say which layers of a hybrid have attention: those with key heads. Return None if the key is not an array."""
        key = "attention.head_count_kv"
        found = self._left.get(key)
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or not found.any():
            return None
        self._left[key] = found[found != 0]
        return [bool(x) for x in found]

    def must_be(self, key: str, value: Any, why: str) -> None:
        """Refuse the key if the file states it with a value other than this one."""
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
        """Discard a truth value that changes nothing for this architecture."""
        found = self._left.pop(key, True)
        if found is not True and found is not False:
            raise self.wrong(key, found, "a truth value")

    def finish(self) -> None:
        """Refuse by name the keys that are left: they may change what the model computes."""
        for key, value in _NEUTRAL.items():
            self.must_be(key, value, "as nothing else is computed for this architecture")
        if left := [key for key in self._left if key not in _HARMLESS]:
            key = left[0]
            raise ValueError(
                f"it states {printable(self.named(key))}, {shown(self._left[key])}, which is not read for this "
                "architecture and may change what it computes"
            )
