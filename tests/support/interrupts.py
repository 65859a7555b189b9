"""Ctrl-C at the n-th place where Python checks for signals, in this package and in the code that runs models."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tl_posdisent

_PACKAGE = str(Path(tl_posdisent.__file__).parent)
_BESIDE = ("contextlib.py", "grad_mode.py", "hook_points.py")
_LOOKS = {"CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "RESUME"}
"""Instructions after which Python looks for signals: calls of C functions, the ends of loops, the beginnings of
functions."""


@functools.cache
def _instructions(code: CodeType) -> dict[int, str]:
    return {each.offset: each.opname for each in dis.get_instructions(code)}


class Interrupt:
    """Run a function and interrupt it at one of these places; ``count`` is how many were passed."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.count, self.last = at, 0, dict[FrameType, str]()

    def run(self, function: Callable[[], Any]) -> bool:
        """Return whether the interrupt came before the function ended."""
        sys.settrace(self._trace)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
            self.last.clear()
        return False

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call" and frame.f_back in self.last:
            self.last[frame.f_back] = "a function of Python, after which it does not look"
        if not frame.f_code.co_filename.startswith(_PACKAGE) and not frame.f_code.co_filename.endswith(_BESIDE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            if self.last.get(frame) in _LOOKS:
                self.count += 1
                if self.count == self.at:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            self.last[frame] = _instructions(frame.f_code).get(frame.f_lasti, "")
        elif event == "return":
            self.last.pop(frame, None)
        return self._trace
