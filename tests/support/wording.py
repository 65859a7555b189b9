"""Words and turns of phrase that this project does not use, and where they are left: ``python -m support.wording``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from support.pages import PAGES, ROOT

AVOIDED = {
    r"\bl(?:ie|ies|ied|ying) (?:to|about)\b|\b(?:a|the|of|under|more|when \w+) lies?\b": "intervention",
    r"\bdoors?\b": "hook, function, or the thing itself",
    r"\brooms?\b(?! to spare)": "folder",
    r"\bhand(?:s|ed)? on\b": "output, pass",
    r"\bmissed\b": "the loss without it",
    r"\bsilent(?:ly)?\b|\bin silence\b": "without an error",
    r"\btrue to (?:its|their) word\b": "exact",
    r"\bwhat (?:still )?holds\b": "results",
    r"\bput(?:s|ting)? (?:it )?right\b": "corrects",
    r"\bthat (?:are none|there (?:are|is) not|is none)\b": "invalid",
    r"\ball (?:is|the) one\b": "the same",
    r"\bfor want of\b": "without, because of",
    r"\bwhat (?:they|it) (?:were|was) good for\b": "their effect",
    r"\bfor a look\b": "to inspect",
    r"\bbear(?:s)? not\b|\bdoes not bear\b": "support",
    r"\bforesee": "causal",
    r"\bthe house\b": "the package",
}
SOURCES = sorted((ROOT / "tl_posdisent").rglob("*.py"))


def left_over(path: Path) -> Iterator[str]:
    """``file:line: phrase → what to write`` for each place of a file."""
    text = path.read_text(encoding="utf-8")
    for pattern, instead in AVOIDED.items():
        for found in re.finditer(pattern, text, re.IGNORECASE):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{path.relative_to(ROOT)}:{line}: {found[0]} → {instead}"


if __name__ == "__main__":
    print("\n".join(place for path in (*PAGES, *SOURCES) for place in left_over(path)))
