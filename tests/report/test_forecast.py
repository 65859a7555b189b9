"""The forecast of passes agrees with passes that are counted, and with the bar."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import tl_posdisent as tp
from tl_posdisent.report.forecast import passes_of, remaining
from tl_posdisent.report.measurements import SECTIONS, Copies, measure, narrowed
from tl_posdisent.report.subject import read_subject

TOKENS = tp.demo_tokens(length=193)[:, 1:].view(3, 64)


@pytest.mark.parametrize("name", ["additivity", "distance", "shares", "subspaces", "perturbation"])
def test_as_many_passes_as_are_counted(name: Any) -> None:
    """Tokens that are embedded, over those of all texts, beside the short texts that check a model."""
    model, embedded = tp.load_demo_model(), 0

    def count(module: Any, inputs: Any, output: Any) -> None:
        nonlocal embedded
        embedded += output.shape[0] * output.shape[1]

    subject = read_subject(model, TOKENS, None, None, None)
    expected = passes_of(name, subject, narrowed(name, subject), 0)
    handle = model.embed.register_forward_hook(count)
    try:
        measure(subject, [name], copies=Copies(0, 0.02), seed=0, progress=False)
    finally:
        handle.remove()
    passes = embedded / TOKENS.numel()
    assert 0.95 * expected <= passes <= 1.05 * expected + 0.2


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
    assert remaining(10, 1.5, ["ladder"]) == "report: about 15 seconds for 10 passes: ladder"
    assert remaining(1, 1.0, SECTIONS[:2]) == "report: about 1 second for 1 pass: additivity, distance"
    assert remaining(100, 12.0, ["ladder"]) == "report: about 20 minutes for 100 passes: ladder"
