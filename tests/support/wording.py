"""Words and turns of phrase that this project does not use, and where they are left: ``python -m support.wording``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from support.links import text_of
from support.pages import PAGES, ROOT

AVOIDED = {
    r"\bl(?:ie|ies|ied|ying) (?:to|about)\b|\b(?:a|the|of|under|more|when \w+) lies?\b": "intervention",
    r"\bdoors?\b": "hook, function, or the thing itself",
    r"\brooms\b|\b(?:each|every|own|other|whose|which|this|that) room\b": "folder",
    r"\bhand(?:s|ed)? on\b": "output, pass",
    r"\bmissed\b": "the loss without it",
    r"\bsilent(?:ly)?\b|\bin silence\b": "without an error",
    r"\btrue to (?:its|their) word\b": "exact",
    r"\bwhat (?:still )?holds\b": "results",
    r"\bput(?:s|ting)? (?:it )?right\b": "corrects",
    r"\bthat (?:are none|there (?:are|is) not|is none)\b": "invalid",
    r"\ball (?:is|the) one\b": "the same",
    r"\bfor want of\b": "without, because of",
    r"\bwhat (?:they|it) (?:were|was|is|are) good for\b": "their effect",
    r"\bfor a look\b": "to inspect",
    r"\bbear(?:s)? not\b|\bdoes not bear\b": "support",
    r"\bforesee": "predict",
    r"\bthe house\b(?! of)": "the package",
    r"\*(?:read|what (?:it means|it does not|follows|does not))[.:]\*": "Result, Not supported by this",
    r"\b(?:said|learned|found|asked|meant|alike) (?:is|they are)\b(?! (?:not|None)\b)": "subject, verb, object",
    r"\b(?:says?|tells?|means?) (?:something|nothing|so little)\b": "does not show, is meaningful if",
    r"\bloud(?:er|est|ness)?\b|\bquiet(?:er|est)\b": "high, low",
    r"\bstand(?:s|ing)? (?:in for|beside)\b|\bset(?:s)? beside\b": "replace, compensate for, compare with",
    r"\b(?:is|are|was|were|be) told\b(?! apart)": "receives",
    r"\bat hand\b": "available",
    r"\bon trust\b": "checked, assumed",
    r"\bgiven up\b": "falls back to, drops",
    r"\bfor the while\b": "temporarily",
    r"\bgo(?:es)? by\b": "uses, depends on",
    r"\b(?:part company|far from home|loses? (?:its|their) way|a stranger|no merit of)\b": "the plain term",
    r"\bdearer\b": "costs more",
    r"\bnext to nothing\b": "almost nothing",
    r"\b(?:some|no|any)body\b": "a reader, a user, or passive voice",
    r"\b(?:taken|takes?|taking) (?:a |each |one )?heads? away\b|\btaken up again\b": "ablate, resume",
    r"\bof its own making\b|\b(?:it )?(?:had )?wr(?:ote|itten) itself\b": "that it generated",
    r"\bhow (?:things|matters) (?:stand|are)\b": "state",
    r"\bis worth (?:something|most|nothing)\b": "has an effect",
    r"\bdisorder\b": "perturbed order",
    r"\b(?:look(?:s|ed)? at|tr(?:y|ies|ied)) it all\b": "repeat",
    r"\banew\b": "again, at random",
    r"\bor alike\b": "or a similar model",
    r"\bunusable\b": "invalid",
    r"\b(?:gives?|takes?) back (?:most|more|less|nothing|0)|\bwhat comes back\b": "recovers",
}
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
PROSE = [*PAGES, ROOT / "tl_posdisent" / "demo" / "MODEL_CARD.md", *NOTEBOOKS]
SOURCES = sorted((ROOT / "tl_posdisent").rglob("*.py"))
_QUESTION = re.compile(r"^#+ (?:(?:how|what|which|where|why|when|whose|does|is|are|can|if)\b.*|.*\?)$", re.I | re.M)
_CODE = re.compile(r"^```(?!\{).*?^```$", re.DOTALL | re.MULTILINE)


def left_over(path: Path) -> Iterator[str]:
    """``file:line: phrase → what to write`` for each place of a file."""
    text = text_of(path)
    for pattern, instead in AVOIDED.items():
        for found in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{path.relative_to(ROOT)}:{line}: {' '.join(found[0].split())} → {instead}"


def questions(text: str) -> list[str]:
    """Headings of a page that are questions; a table of contents needs nouns."""
    return [found[0] for found in _QUESTION.finditer(_CODE.sub("", text))]


if __name__ == "__main__":
    print("\n".join(place for path in (*PROSE, *SOURCES) for place in left_over(path)))
