"""Processes that tests start: through one helper, with a time limit and the default signals."""

from __future__ import annotations

import ast
import signal
import subprocess

from support.pages import ROOT
from support.processes import python

STARTS = {
    *("subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call", "subprocess.check_output"),
    *("os.system", "os.fork", "os.popen", "ProcessPoolExecutor", "Process", "multiprocessing.Process", "pty.fork"),
}
TESTS = ROOT / "tests"
PROGRAMS = {TESTS / "support" / name for name in ("processes.py", "smoke.py")}  # no tests, but the first


def test_no_test_starts_a_process_in_another_way() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(TESTS.rglob("*.py"))
        if path not in PROGRAMS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in STARTS
    ]
    assert not found


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
