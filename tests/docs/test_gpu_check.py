"""``benchmarks/gpu_check.py`` in miniature: on an imitated GPU, with the laws of its table and of its exit code."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from support.accelerator import NAME, _Module, imitated, register
from support.pages import ROOT

pytestmark = pytest.mark.usefixtures("unchecked")
FEW = ["additivity", "dummy_distance", "head_effects", "rotate", "Rotary", "train"]


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for folder in ("findings", "figures"):
            patch.syspath_prepend(str(ROOT / "docs" / folder))
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import gpu_check
        import gpu_deposit
        import gpu_large
        import gpu_tools
        import page

        yield SimpleNamespace(check=gpu_check, deposit=gpu_deposit, large=gpu_large, tools=gpu_tools, page=page)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The imitated device, with what a benchmark asks of ``torch.cuda``."""
    register()
    numbers = itertools.count()
    asked: dict[str, Any] = {"get_device_name": lambda self: "an imitated GPU", "synchronize": lambda self: None}
    asked |= {"reset_peak_memory_stats": lambda self: None}
    asked |= {name: lambda self: next(numbers) for name in ("memory_allocated", "max_memory_allocated")}
    for name, function in asked.items():
        monkeypatch.setattr(_Module, name, function, raising=False)
    monkeypatch.setenv("BENCH_DEVICE", f"{NAME}:0")
    with imitated():
        yield


def checks_of(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "checks.csv")


@pytest.mark.slow
@pytest.mark.release
def test_every_line_runs_on_a_device(
    scripts: Any, on_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.tools.checks, "__defaults__", (FEW,))
    assert scripts.check.main(["--miniature", "--out", str(tmp_path)]) == 0
    table = checks_of(tmp_path)
    assert set(table["part"]) == set(scripts.check.ENDS)
    assert (table["ok"] == "yes").all(), table[table["ok"] != "yes"].to_string()
    assert table[["value", "bound"]].notna().all(axis=None)
    assert table["device"].str.startswith("an imitated GPU").all()
    assert (tmp_path / "checks.md").read_text(encoding="utf-8").count("\n| ") == len(table) + 2
    trained = pd.read_csv(tmp_path / "deposit.csv")
    assert set(zip(trained["task"], trained["encoding"], strict=True)) == set(scripts.page.PAPER_B)
    assert (trained["steps"] >= 1).all()
    assert (trained["steps"] <= trained["planned"]).all()
    rows_on_the_page(scripts, trained, tmp_path / "gpu.csv")


def rows_on_the_page(scripts: Any, trained: pd.DataFrame, path: Path) -> None:
    """A full run's table is what the page reads."""
    trained.assign(size="paper", accuracy=0.4321, device="card X").to_csv(path, index=False)
    text = scripts.page.page(gpu=path)
    assert text.count("| 0.43 |") >= len(scripts.page.PAPER_B)
    assert "card X" in text
    assert scripts.page.page(gpu=path.with_name("none.csv")) == scripts.page.page().replace("card X", "")


@pytest.mark.slow
@pytest.mark.release
def test_every_function_is_compared_on_the_cpu(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are right here, and few have results that bfloat16 makes incomparable."""
    monkeypatch.setenv("BENCH_DEVICE", "cpu")
    for dtype in scripts.tools.FLOOR:
        value, bound, note = scripts.tools.compared("bridge", dtype, 1, scripts.tools.NAMES)
        assert value <= bound, note
        assert note.partition("not comparable: ")[2].count(", ") < 3, note


def test_a_wrong_number_is_found(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of 0.1 % of the device in float32, in one number of one function; and a missing or a raised one."""
    monkeypatch.setenv("BENCH_DEVICE", "cpu")
    right = scripts.tools.numbers
    names = ["rotate", "toeplitz_share"]

    def planted(change: Any) -> Any:
        def numbers(name: str, kind: str, place: Any) -> Any:
            found = right(name, kind, place)
            there = place.device == "cpu" and not place.jitter and place.dtype == torch.float32
            calls.append(name) if there else None
            return change(found) if there and name == "rotate" and calls.count(name) == 2 else found

        calls: list[str] = []
        return numbers

    def scaled(found: Any) -> Any:
        return {at: x * 1.001 for at, x in found.items()}

    changes = [lambda found: found, scaled, lambda found: {}, lambda found: ValueError("no"), lambda f: scaled(f) | f]
    values = []
    for change in changes:
        monkeypatch.setattr(scripts.tools, "numbers", planted(change))
        values.append(scripts.tools.compared("bridge", torch.float32, 1, names))
    right_one, wrong, missing, raised, again = values
    assert right_one.value <= 1
    assert again.value <= 1
    assert wrong.value > 1
    assert "rotate" in wrong.note
    assert math.isinf(missing.value)
    assert math.isinf(raised.value)
    monkeypatch.setattr(scripts.tools, "numbers", planted(scaled))
    monkeypatch.setattr(scripts.tools.checks, "__defaults__", (names,))
    monkeypatch.setattr(scripts.tools, "laws", lambda kind, dtype: scripts.tools.Found(0, 0))
    monkeypatch.setattr(scripts.tools, "page", lambda kind: scripts.tools.Found(0, 0))
    assert scripts.check.main(["--miniature", "--parts", "tools", "--out", str(tmp_path)]) == 1
    assert (checks_of(tmp_path)["ok"] == "no").sum() == 1


def test_exit_codes(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = scripts.tools.Found
    cases: list[tuple[Any, str, int]] = [
        (lambda: found(1.0, 1.0), "yes", 0),
        (lambda: found(1.1, 1.0), "no", 1),
        (lambda: found(math.nan, 1.0), "no", 1),
        (lambda: 1 / 0, "no", 1),
    ]
    for measure, ok, code in cases:
        rows = list(scripts.check.rows_of("part", [("x", measure)], math.inf))
        assert [row["ok"] for row in rows] == [ok]
        assert scripts.check.exit_code(rows) == code

    def full() -> Any:
        raise torch.OutOfMemoryError

    for measure, deadline in ((full, math.inf), (lambda: found(0, 1), -math.inf)):
        rows = list(scripts.check.rows_of("part", [("x", measure)], deadline))
        assert scripts.check.exit_code(rows) == 3
    monkeypatch.setenv("BENCH_DEVICE", "cpu")
    assert scripts.check.main(["--out", str(tmp_path / "none")]) == 4
    assert scripts.check.main(["--miniature", "--minutes", "0", "--out", str(tmp_path)]) == 3
    assert set(checks_of(tmp_path)["ok"]) == {"not measured"}


def test_a_training_stops_at_its_deadline_and_is_not_repeated(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_DEVICE", "cpu")
    size = scripts.deposit.miniature()
    model, steps, planned = scripts.deposit.trained(size, "count", "alibi", 50, -math.inf)
    assert (steps, planned) == (1, 50)
    assert not model.training
    (_, measure), *_ = scripts.deposit.checks(tmp_path / "d.csv", size, math.inf)
    assert measure().value == 0
    before = (tmp_path / "d.csv").read_text()
    monkeypatch.setattr(scripts.deposit, "row_of", lambda *_: 1 / 0)
    assert measure().value == 0
    assert (tmp_path / "d.csv").read_text() == before


def test_steps_are_at_most_those_planned(scripts: Any) -> None:
    """And batches are of new samples, as often as the published number of samples allows."""
    size = scripts.deposit.Size(scripts.deposit.PAPER)
    for steps in (1, 5, 546, 547, 1000, 10_000):
        how = scripts.deposit.settings(size, steps)
        assert 0.9 * steps - 1 <= how.steps <= steps
        assert how.n_train <= 70_000
