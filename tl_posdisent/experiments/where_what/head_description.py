"""The answer for one head, with what it rests on: a result that says it in words and shows it in figures."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tl_posdisent.experiments.where_what.head_example import HeadExample
from tl_posdisent.experiments.where_what.head_looks import HeadLooks
from tl_posdisent.experiments.where_what.rows import COLUMNS
from tl_posdisent.experiments.where_what.sentences import (
    Cost,
    disagreement_sentence,
    hooks_sentences,
    nats_of_list,
    needs_sentences,
)
from tl_posdisent.experiments.where_what.verdicts import Verdict
from tl_posdisent.utils.lazy_names import public_name
from tl_posdisent.utils.tables import HasTable
from tl_posdisent.utils.validation import head_label

_Row = tuple[str, str, float, float]


@dataclass(frozen=True, eq=False, repr=False)
class HeadDescription(HasTable):
    """Whether one head needs *where* keys are or *what* they are, what it looks like, and why at one query.

    Attributes:
        layer, head: the head.
        needs: its row of the table of ``where_or_what``, a table of one row, measured by runs.
        costs: what it costs to put every key but the query's own at one distance, for several distances: KL(unmodified
            ‖ changed) and the change of the loss, in nats per predicted token, with standard errors over texts.
        looks: what its scores and its attention look like, beside random weights.
        example: why it looks at a key, at one query.
        passes: the cost in forward passes of all measured texts, without those of random copies.
    """

    layer: int
    head: int
    needs: pd.DataFrame
    costs: tuple[Cost, ...]
    looks: HeadLooks
    example: HeadExample
    passes: float

    @property
    def verdict(self) -> Verdict:
        """The verdict of ``where_or_what``."""
        verdict: Verdict = self.needs["verdict"].item()
        return verdict

    @property
    def answer(self) -> str:
        """The answer in one sentence."""
        return needs_sentences(self._row, self.needs.attrs["df"])[0]

    @property
    def _row(self) -> dict[Any, Any]:
        (row,) = self.needs.to_dict("records")
        return row

    def sections(self) -> dict[str, list[str]]:
        """Return all sentences but the answer, by part: ``needs``, ``looks`` and ``why``."""
        _, *needs = needs_sentences(self._row, self.needs.attrs["df"])
        differs = disagreement_sentence(self._row, self.looks.shares, self.looks.random)
        return {
            "needs": [*needs, _costs_in_words(self.costs), *hooks_sentences(self.needs)],
            "looks": [*self.looks.sentences(), *([differs] if differs else [])],
            "why": self.example.sentences(),
        }

    def to_frame(self) -> pd.DataFrame:
        """Return all numbers as a tidy table: ``part`` (needs, looks or why), ``quantity``, ``value`` and ``se``.

        ``se`` is the standard error over texts, NaN where there is none. ``attrs["answer"]`` is the answer.
        """
        rows = [*self._needs_rows(), *self._looks_rows(), *self._example_rows()]
        table = pd.DataFrame(rows, columns=["part", "quantity", "value", "se"])
        table.attrs["answer"] = self.answer
        return table

    def _needs_rows(self) -> Iterator[_Row]:
        for name in COLUMNS:
            yield "needs", name, self._row[name], self._row[f"{name}_se"]
        for cost in self.costs:
            yield "needs", f"kl at distance {cost.distance:g}", cost.kl, cost.kl_se
        for cost in self.costs:
            yield "needs", f"added loss at distance {cost.distance:g}", cost.loss, cost.loss_se

    def _looks_rows(self) -> Iterator[_Row]:
        nan = float("nan")
        for name, value in self.looks.shares.items():
            yield "looks", name, value, nan
        for name, value in (self.looks.random or {}).items():
            yield "looks", f"{name} of random weights", value, nan
        yield "looks", "attention to the first token", self.looks.first_token, nan
        for distance, attention in zip(self.looks.profile["distance"], self.looks.profile["attention"], strict=True):
            yield "looks", f"attention at distance {distance}", attention, nan

    def _example_rows(self) -> Iterator[_Row]:
        nan, example = float("nan"), self.example
        for name in ("text", "query", "key", "other"):
            yield "why", name, float(getattr(example, name)), nan
        yield "why", "contribution at the query", nan if example.contribution is None else example.contribution, nan
        for name in ("key", "other"):
            yield "why", f"attention to the {name}", float(example.attention[getattr(example, name)]), nan
        for name in ("content", "distance", "rest"):
            yield "why", f"{name}, key minus other", getattr(example, name), nan
        if example.effect is not None:
            for token, word in example.effect_words.items():
                yield "why", f"direct effect on the logit of {word!r}", float(example.effect.logits[token]), nan

    def plot(self, **options: Any) -> Any:
        """Plot the head in the where–what plane: ``plot_where_or_what``, with its options."""
        return public_name("viz", "plot_where_or_what")(self.needs, **options)

    def show(self, **options: Any) -> Any:
        """Plot the head's mean attention by distance, without the first token: ``plot_distance``, with its options."""
        profile = self.looks.profile.assign(layer=self.layer, head=self.head)
        options = {"value": "attention", "title": f"Mean attention of {head_label(self.layer, self.head)}"} | options
        return public_name("viz", "plot_distance")(profile, **options)

    def __repr__(self) -> str:
        lines = [self.answer]
        for name, sentences in self.sections().items():
            lines += [f"{name.capitalize()}:", *(f"  {sentence}" for sentence in sentences)]
        return "\n".join([*lines, f"{self.passes:.1f} forward passes of the measured texts."])

    def _repr_html_(self) -> str:
        parts = [f"<p><b>{html.escape(self.answer)}</b></p>"]
        for name, sentences in self.sections().items():
            items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
            parts.append(f"<p>{name.capitalize()}</p><ul>{items}</ul>")
        return "".join(parts)


def _costs_in_words(costs: tuple[Cost, ...]) -> str:
    distances = ", ".join(f"{cost.distance:g}" for cost in costs)
    kl, loss = nats_of_list([cost.kl for cost in costs]), nats_of_list([cost.loss for cost in costs], sign="+")
    return (
        f"Every other key at distance {distances}: KL {', '.join(kl)}; added loss {', '.join(loss)} nats per predicted "
        "token."
    )
