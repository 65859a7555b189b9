"""The installed command in a process of its own: streams, exit codes, help without torch, completion."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from support.processes import PIPES, process, run
from typer.main import get_command

from tl_posdisent import demo_tokens, head_ablation, load_demo_model
from tl_posdisent.cli import app
from tl_posdisent.cli.threads import limit_threads, spin_briefly

pytestmark = pytest.mark.slow

PROGRAM = "import sys; sys.argv[0] = 'tl-posdisent'; from tl_posdisent.cli import app; app()"
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


def program(*arguments: str, env: dict[str, str] | None = None) -> AbstractContextManager[subprocess.Popen[bytes]]:
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "60"} | (env or {})
    return process(sys.executable, "-c", PROGRAM, *arguments, env=environment, **PIPES)


def test_in_a_pipe(tmp_path: Path) -> None:
    """Text from stdin; on stdout results alone, whole lines; progress on stderr; the table beside."""
    out = tmp_path / "table.csv"
    words = "fit --text - --length 16 --texts 1 --layers 0 --control 0 --out"
    with program(*words.split(), str(out)) as running:
        stdout, stderr = running.communicate(b"We the people of these free and equal states. " * 4)
    assert running.returncode == 0, stderr
    lines = stdout.decode().splitlines()
    assert lines[0] == "r of the three-axis fit, by layer and head: demo, 1 × 16 tokens"
    assert [line.split()[0] for line in lines[2:4]] == ["layer", "0"]
    assert b"layers: 100%" in stderr
    assert out.exists()


SHORT = ("fit", "--length", "16", "--layers", "0", "--control", "0", "--no-progress")


THREADS = """
import os, sys, warnings
from tl_posdisent.cli import app
from tl_posdisent.experiments.attention_scores import additivity as module
measure = module.additivity
def warn(*given, **options):
    warnings.warn("few\\ntokens")
    return measure(*given, **options)
module.additivity = warn
sys.argv = ["tl-posdisent", *sys.argv[1:]]
try:
    app()
except SystemExit as end:
    assert not end.code, end
import torch
print("found", torch.get_num_threads(), os.environ.get("GOMP_SPINCOUNT"), file=sys.stderr)
"""
SET_BY_USERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def test_a_small_model_takes_one_thread() -> None:
    """Without progress only results are printed: the bars of other libraries are turned off too.

    Warnings are lines of their own, without the place in the library where they were raised.
    """
    environment = {name: value for name, value in os.environ.items() if name not in SET_BY_USERS}
    done = run(sys.executable, "-c", THREADS, *SHORT, env=environment)
    assert done.stderr == "warning: few tokens\nfound 1 1000\n"
    assert "mean r" in done.stdout


@pytest.mark.parametrize("name", SET_BY_USERS)
def test_what_the_user_has_said_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads by the first two names, how long they wait by the others."""
    for each in SET_BY_USERS:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "2")
    before, waiting = torch.get_num_threads(), name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    try:
        torch.set_num_threads(3)
        spin_briefly()
        limit_threads(torch.nn.Linear(1, 1))
        assert torch.get_num_threads() == (1 if waiting else 3)
        assert os.environ.get("GOMP_SPINCOUNT") == ("2" if name == "GOMP_SPINCOUNT" else None if waiting else "1000")
    finally:
        torch.set_num_threads(before)


def test_larger_models_take_more_threads_and_the_library_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each ten million parameters, and never more than there were."""
    for name in SET_BY_USERS:
        monkeypatch.delenv(name, raising=False)
    before, found = torch.get_num_threads(), []
    try:
        torch.set_num_threads(5)
        head_ablation(load_demo_model(), demo_tokens(length=8), layers=[0], heads=[0], progress=False)
        found.append(torch.get_num_threads())
        for parameters in (100_000_000, 41_000_000, 25_000_000, 1_000_000, 100_000_000):
            limit_threads(torch.nn.Linear(1000, parameters // 1000, bias=False, device="meta"))
            found.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert found == [5, 5, 4, 2, 1, 1]


def test_interrupted() -> None:
    """Of the package as a module."""
    arguments = (sys.executable, "-m", "tl_posdisent", "fit", "--length", "64", "--control", "100000")
    with process(*arguments, env=os.environ | {"NO_COLOR": "1", "COLUMNS": "60"}, **PIPES) as running:
        assert running.stderr
        seen, more = b"", b"?"
        while b"layers" not in seen and more:
            seen += (more := os.read(running.stderr.fileno(), 4096))
        running.send_signal(signal.SIGINT)
        stdout, stderr = running.communicate()
    assert running.returncode == 130, seen
    assert stdout == b""
    assert stderr.endswith(b"interrupted\n")
    assert b"Traceback" not in stderr


WRONG = [
    "fit --layers 5",
    "fit --layers first",
    "fit --heads L0H8",
    "fit --std a",
    "fit --model {folder} --heads 3",
    "head L5H0",
    "head L30H0 --model smollm2",
    "head L0H0 --model demoo",
    "fit --model {folder}/nothing",
    "report --heads 8",
    "report --layers 18 --model gemma3-270m",
    "report --section share",
]


def test_help_and_mistakes_wait_for_no_library(tmp_path: Path) -> None:
    """torch takes seconds to import, and pandas half of one; nobody who asks for help, or mistypes, needs them."""
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "num_attention_heads": 3}', encoding="utf-8")
    code = f"""
import shlex, sys, typer.testing
from tl_posdisent.cli import app
for words in (["--help"], ["--version"], *([name, "--help"] for name in {sorted(COMMANDS)!r})):
    result = typer.testing.CliRunner().invoke(app, words)
    assert result.exit_code == 0 and result.stdout, words
for line in {[x.format(folder=tmp_path) for x in WRONG]!r}:
    result = typer.testing.CliRunner().invoke(app, shlex.split(line))
    assert result.exit_code == 2 and "error: " in result.stderr, line
print(sorted({{"torch", "pandas", "numpy", "transformers", "transformer_lens", "plotly"}} & sys.modules.keys()))
"""
    assert run(sys.executable, "-c", code).stdout == "[]\n"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_has_examples_that_work(name: str) -> None:
    command = COMMANDS[name]
    assert name == "report" or "Columns" in command.help
    examples = re.findall(r"^ +(tl-posdisent .*)$", command.help.split("Examples:")[1], re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        words = shlex.split(example)
        assert words[1] == name
        command.make_context(name, words[2:])  # refuses options and values that it does not have


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tl-posdisent ", sorted(COMMANDS)),
        ("tl-posdisent fit --backend ", ["auto", "bridge", "hooked"]),
        ("tl-posdisent report --section a", ["ablation", "additivity"]),
    ],
)
def test_completion(typed: str, offered: list[str]) -> None:
    words = typed.split()
    place = len(words) - (0 if typed.endswith(" ") else 1)
    asked = {"_TL_POSDISENT_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(place)}
    with program(env=asked) as running:
        stdout, stderr = running.communicate()
    assert sorted(stdout.decode().split()) == offered, stderr
