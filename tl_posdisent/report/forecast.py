"""How many forward passes the sections of a report take, before they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tl_posdisent.experiments.attention_scores.head_labels import repeated_tokens
from tl_posdisent.experiments.passes import TOOLS, Work, label_patterns, perturbations
from tl_posdisent.models.reading.spec import n_layers
from tl_posdisent.report.every_head import ESTIMATE, PASSES, affordable
from tl_posdisent.report.subject import FRACTIONS, PERTURBATIONS, Subject
from tl_posdisent.utils.words import plural

_TOOLS: Mapping[str, tuple[int, str]] = {
    "additivity": (2, "additivity"),  # with and without the first key
    "distance": (1, "additivity"),  # the same scores, fitted to all texts together
    "shares": (1, "controlled_distance"),
    "subspaces": (1, "subspace_patterns"),
}
"""How often a section calls which tool."""
_WITH_PREDICTIONS = ("perturbation", "ablation", "ladder")


def passes_of(name: str, subject: Subject, part: Subject, copies: int) -> float:
    """Estimate the forward passes of a section, in passes of all texts of ``subject``; it reads ``part`` of them.

    Those of a section that runs heads are by processor time, and an upper bound: a head without effect needs fewer.
    """
    if name in PASSES:
        n = affordable(name, part)
        passes = PASSES[name] * n + (ESTIMATE[name] if n < len(part.pairs) else 2)
    elif name == "perturbation":
        passes = perturbations(kinds=3, fractions=sum(x > 0 for x in FRACTIONS), seeds=PERTURBATIONS)
    elif name == "heads":
        passes = part.lengths[0] / sum(part.lengths)  # the first text
    elif name == "labels":
        copied = repeated_tokens(part.model, None, 4, 0).numel()
        passes = label_patterns(_work(part, copied)) * (1 + copies)
    else:
        times, tool = _TOOLS[name]
        passes = times * TOOLS[tool].passes(_work(part))
    return passes * sum(part.lengths) / sum(subject.lengths)


def _work(part: Subject, copied: int = 0) -> Work:
    """Describe what a section reads to the table of passes, with all texts as one."""
    return Work(n_layers(part.model), part.heads, sum(part.lengths), 1, places=1, at_once=1, copied=copied)


def forecast(passes: float, subject: Subject) -> str:
    """State the work ahead, in forward passes."""
    return f"report: about {plural(max(1, round(passes)), 'pass', 'passes')} over {subject.sizes()}"


def slower(name: str, subject: Subject) -> float:
    """Return how many times longer a pass of a section takes than one that ends before the unembedding.

    By multiplications: for small models with large vocabularies, most of them are in the unembedding.
    """
    if name not in _WITH_PREDICTIONS:
        return 1.0
    cfg = subject.model.cfg
    layers: int = sum(x.numel() for block in subject.model.blocks for x in block.parameters())
    unembedding: int = getattr(cfg, "d_model", 0) * getattr(cfg, "d_vocab", 0)
    return 1 + unembedding / max(layers, 1)


def remaining(passes: float, seconds: float, sections: Sequence[str]) -> str:
    """State the passes and the time ahead."""
    time = plural(max(1, round(seconds)), "second") if seconds < 100 else plural(round(seconds / 60), "minute")
    return f"report: about {time} for {plural(max(1, round(passes)), 'pass', 'passes')}: {', '.join(sections)}"
