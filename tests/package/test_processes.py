"""The helper that starts processes for tests."""

from __future__ import annotations

import signal
import subprocess

from support.processes import python


def test_a_child_can_be_interrupted_although_this_process_cannot() -> None:
    """As where a script runs the tests in the background."""
    code = "import sys, time; print('here', flush=True); time.sleep(600)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with python(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            assert child.stdout
            assert child.stdout.readline() == b"here\n"
            child.send_signal(signal.SIGINT)
            assert b"KeyboardInterrupt" in child.communicate()[1]
    finally:
        signal.signal(signal.SIGINT, before)
