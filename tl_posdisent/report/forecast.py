"""How many forward passes the sections of a report take, before they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tl_posdisent.report.every_head import DRAWS, PASSES, affordable
from tl_posdisent.report.subject import Subject
from tl_posdisent.utils.words import plural

_ONCE: Mapping[str, float] = {"additivity": 2, "distance": 1, "shares": 1, "subspaces": 1, "heads": 0.1, "labels": 1.4}
_PERTURBATIONS = 25
_ESTIMATE = {"ablation": DRAWS + 6, "ladder": 2 * DRAWS + 10}
"""Passes of the estimates for heads that are not run; a backward pass counts as two."""


def passes_of(name: str, subject: Subject, part: Subject, copies: int) -> float:
    """Estimate the forward passes of a section, in passes of all texts of ``subject``; it reads ``part`` of them.

    Those of a section that runs heads are by processor time, and an upper bound: a head without effect needs fewer.
    """
    if name in PASSES:
        n = affordable(name, part)
        passes = PASSES[name] * n + (_ESTIMATE[name] if n < len(part.pairs) else 2)
    elif name == "perturbation":
        passes = float(_PERTURBATIONS)
    else:
        passes = _ONCE[name] * (1 + copies if name == "labels" else 1)
    return passes * sum(part.lengths) / sum(subject.lengths)


def forecast(passes: float, subject: Subject) -> str:
    """State the work ahead, in forward passes."""
    return f"report: about {plural(max(1, round(passes)), 'pass', 'passes')} over {subject.sizes()}"


def remaining(passes: float, seconds_each: float, sections: Sequence[str]) -> str:
    """State the time ahead, at the speed of the section that was measured first."""
    seconds = passes * seconds_each
    time = plural(max(1, round(seconds)), "second") if seconds < 100 else plural(round(seconds / 60), "minute")
    return f"report: about {time} for {plural(max(1, round(passes)), 'pass', 'passes')}: {', '.join(sections)}"
