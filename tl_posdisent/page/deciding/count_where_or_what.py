"""The sentences that count the heads that look at *where* and at *what*."""

from __future__ import annotations

from markupsafe import Markup

from tl_posdisent.page.deciding.against_random import count_copies, count_texts
from tl_posdisent.page.deciding.links import link_section
from tl_posdisent.page.deciding.where_or_what import AS_RANDOM, KINDS, looks_at
from tl_posdisent.page.deciding.words import are
from tl_posdisent.page.measuring.measurement import Measurement
from tl_posdisent.page.measuring.subject import ENOUGH
from tl_posdisent.utils.words import plural

_DEPENDS = {"where": "more on where a key is", "what": "more on what it is"}


def count_where_or_what(measurement: Measurement, name: str) -> list[Markup]:
    """Count the heads of the section ``name`` that look at *where* and at *what*, then state the rule."""
    looks = looks_at(measurement.trained, measurement.random)["looks"]
    counts = {kind: int((looks == kind).sum()) for kind in KINDS}
    depends = ", ".join(f"{words} in {counts[kind]}" for kind, words in _DEPENDS.items() if counts[kind])
    clauses = [f"the scores depend {depends}"] if depends else []
    if n_as_random := counts[AS_RANDOM]:
        clauses.append(f"{are(n_as_random)} like random weights")
    if n_undecided := counts["undecided"]:
        few = count_texts(measurement.trained) < ENOUGH
        clauses.append(are(n_undecided) + " undecided" + few * f", and it takes at least {ENOUGH} texts to decide")
    heads = plural(sum(counts.values()), "head")
    count = Markup("Of {}, {} {}.").format(heads, "; ".join(clauses), link_section(name, measurement))
    return [count, _rule(measurement, like_random=n_as_random > 0)]


def _rule(measurement: Measurement, *, like_random: bool) -> Markup:
    """State when a head is decided."""
    rule = Markup(
        "A head is decided if the share of its scores’ variance that the key alone explains, minus that of the "
        "distance alone, is surely below (<em>where</em>) or above (<em>what</em>) {}, by a 95 % interval over texts{}."
    )
    if measurement.random is None:
        return rule.format("0", "; without a random-weights baseline this may not have been learned")
    beyond = f"0 and every head of its layer in {count_copies(measurement.random)}"
    return rule.format(beyond, "; beyond 0 alone it is like random weights" if like_random else "")
