"""The forecast of passes agrees with passes that are counted, and with the bar."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import zoo

import tl_posdisent as tp
from tl_posdisent import head_verdicts
from tl_posdisent.report import every_head, measurements
from tl_posdisent.report.forecast import passes_of, remaining, slower
from tl_posdisent.report.measurements import SECTIONS, Copies, measure, narrowed
from tl_posdisent.report.subject import read_subject
from tl_posdisent.utils.progress import progress_bar

TOKENS = tp.demo_tokens(length=193)[:, 1:].view(3, 64)


@pytest.mark.parametrize("name", ["additivity", "distance", "shares", "subspaces", "perturbation", "labels", "heads"])
def test_as_many_passes_as_are_counted(name: Any) -> None:
    """Tokens that are embedded, over those of all texts, beside the short texts that check a model."""
    model, embedded = tp.load_demo_model(), 0

    def count(module: Any, inputs: Any, output: Any) -> None:
        nonlocal embedded
        embedded += output.shape[0] * output.shape[1]

    subject = read_subject(model, TOKENS, None, None, None)
    measured = ["additivity", name] if name == "heads" else [name]  # which chooses the heads that are shown
    expected = sum(passes_of(one, subject, narrowed(one, subject), 0) for one in measured)
    handle = model.embed.register_forward_hook(count)
    try:
        measure(subject, [name], copies=Copies(0, 0.02), seed=0, progress=False)
    finally:
        handle.remove()
    passes = embedded / TOKENS.numel()
    assert 0.95 * expected <= passes <= 1.05 * expected + 0.2


def test_fewer_layers_take_fewer_passes() -> None:
    """Those after the last chosen layer are not computed."""
    model = tp.load_demo_model()
    whole, first = (read_subject(model, TOKENS, None, layers, None) for layers in (None, [0, 1]))
    for name in ("additivity", "distance", "shares", "subspaces", "labels"):
        assert passes_of(name, first, first, 1) == pytest.approx(2 / 5 * passes_of(name, whole, whole, 1)), name


@dataclass
class Recorded:
    """A bar of a report, and how far it was after each update, by section."""

    bar: Any
    section: str = ""
    seen: dict[str, list[float]] = field(default_factory=dict)

    def update(self, passes: float) -> None:
        self.bar.update(passes)
        self.seen.setdefault(self.section, []).append(self.bar.n)

    def set_postfix_str(self, section: str) -> None:
        self.section = section

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bar, name)


def idle_where_odd(verdicts: Any) -> Any:
    return verdicts.assign(verdict=verdicts["verdict"].where(verdicts["head"] % 2 == 0, "no effect"))


@pytest.mark.parametrize("least", [8, 40], ids=["estimates", "all heads"])
def test_the_bar_moves_with_the_runs_of_the_ladder(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rungs of ten for each head that is run, eight for those that need more, and at the end what was forecast.

    Heads that are used by the estimates are run with the eight alone.
    """
    monkeypatch.setattr(every_head, "BUDGET", 1.0)
    monkeypatch.setattr(every_head, "LEAST", least)
    monkeypatch.setattr(every_head, "head_verdicts", lambda table: idle_where_odd(head_verdicts(table)))
    bars: list[Recorded] = []

    @contextmanager
    def recording(**options: Any) -> Iterator[Recorded]:
        with progress_bar(**options) as bar:
            bars.append(Recorded(bar))
            yield bars[0]

    monkeypatch.setattr(measurements, "progress_bar", recording)
    subject = read_subject(tp.load_demo_model(), TOKENS, None, None, None)
    names: Any = ["shares", "ladder", "perturbation"]
    found = measure(subject, names, copies=Copies(0, 0.02), seed=0, progress=True)
    ahead = {one: passes_of(one, subject, narrowed(one, subject), 0) for one in names}
    before, within = ahead["shares"] + ahead["perturbation"], bars[0].seen["ladder"]
    assert (np.diff([before, *within]) >= 0).all()
    table = found["ladder"].trained[found["ladder"].trained["exact"]]
    runs = table.groupby(["layer", "head"]).size()
    assert len(runs) == least
    further = int((runs > 3).sum())
    assert 0 < further < least
    estimates, short = (every_head.ESTIMATE["ladder"], least - further) if least < 40 else (0, least)
    made = [every_head.PASSES["ladder"] * (0.2 * n + 0.8 * further) for n in (short, least)]
    assert len(within) > 3 * short + 9 * further
    assert before + made[0] < within[-2] <= before + made[1] + estimates + 1e-9
    assert within[-1] == pytest.approx(before + ahead["ladder"]) == pytest.approx(sum(ahead.values()))
    assert bars[0].total == round(sum(ahead.values()), 1)


def test_more_heads_texts_and_copies_take_more_passes() -> None:
    model = tp.load_demo_model()
    whole, some = (read_subject(model, TOKENS, None, None, heads) for heads in (None, [0, 1]))
    for name in ("ablation", "ladder"):
        parts = [narrowed(name, subject) for subject in (whole, some)]
        many, few = (passes_of(name, whole, part, 0) for part in parts)
        assert many > 3 * few
    assert passes_of("labels", whole, whole, 3) == pytest.approx(2 * passes_of("labels", whole, whole, 1))
    assert passes_of("shares", whole, whole.some(64, 64), 0) == pytest.approx(1 / 3)


def test_the_forecast_is_printed_before_the_long_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sections: Any = ["additivity", "shares", "ablation"]
    options: dict[str, Any] = {"sections": sections, "control": 2}
    tp.report(tp.load_demo_model(), TOKENS, tmp_path / "r.html", **options)
    subject = read_subject(tp.load_demo_model(), TOKENS, None, None, None)
    total = sum(passes_of(name, subject, narrowed(name, subject), 2) for name in sections) + 2 * 3
    said = capsys.readouterr().err.replace("\r", "\n")
    first = f"report: about {round(total)} passes over 3 texts of 64 tokens"
    second = re.search(rf"report: about \d+ seconds? for {round(total - 2)} passes: shares, ablation", said)
    assert first in said
    assert second is not None
    assert said.index(first) < second.start() < said.index("ablation]")
    assert re.findall(r"100%\|.*?\| ([\d.]+)/([\d.]+)", said)[-1] == (f"{total:.1f}",) * 2
    tp.report(tp.load_demo_model(), TOKENS, tmp_path / "r.html", progress=False, **options)
    assert capsys.readouterr().err == ""


def test_times_are_in_seconds_or_minutes() -> None:
    assert remaining(10, 15.0, ["ladder"]) == "report: about 15 seconds for 10 passes: ladder"
    assert remaining(1, 1.0, SECTIONS[:2]) == "report: about 1 second for 1 pass: additivity, distance"
    assert remaining(100, 1200.0, ["ladder"]) == "report: about 20 minutes for 100 passes: ladder"


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_a_pass_with_predictions_takes_longer_by_the_multiplications_of_the_unembedding(
    kind: str, name: str, shared_model: Any
) -> None:
    model = shared_model(kind, name)
    subject = read_subject(model, zoo.random_tokens(32, 2), None, None, None)
    of_blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
    for section in SECTIONS:
        expected = 1 + model.W_U.numel() / of_blocks if section in ("perturbation", "ablation", "ladder") else 1
        assert slower(section, subject) == pytest.approx(expected)


@pytest.mark.parametrize("names", [("shares", "perturbation"), ("perturbation", "ablation")])
def test_the_time_ahead_counts_the_unembedding(names: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a first section of ten seconds, which may have the unembedding itself."""
    told: list[float] = []
    times = iter([0.0, 10.0])
    monkeypatch.setattr(measurements, "monotonic", lambda: next(times))
    monkeypatch.setattr(measurements, "remaining", lambda passes, seconds, names: told.append(seconds) or "")
    subject = read_subject(tp.load_demo_model(), TOKENS, None, None, None)
    measure(subject, names, copies=Copies(0, 0.02), seed=0, progress=True)
    first, ahead = (passes_of(name, subject, narrowed(name, subject), 0) for name in names)
    ratio = slower(names[1], subject) / slower(names[0], subject)
    assert told == [pytest.approx(10 / first * ahead * ratio)]
    assert (ratio > 1.1) == (names[0] == "shares")
