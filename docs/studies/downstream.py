"""Questions made from held-out text, asked of two models whose context is perturbed."""

from __future__ import annotations

import pandas as pd
import torch
from shared.questions_from_text import questions_from_text
from shared.rows import TABLES
from shared.two_models import Case, both

import tl_posdisent as tp
from tl_posdisent.experiments import MultipleChoice

QUESTIONS = 200
KINDS = ("order", "index")
FRACTIONS = [0, 0.1, 0.5, 1]
TASKS = {"last_word": "last word", "next_sentence": "next sentence"}


def questions(case: Case, ask: str) -> list[MultipleChoice]:
    """Convert the questions to token ids, so that both models have tokens perturbed."""
    drawn = questions_from_text(case.text, ask)
    short = [q for q in drawn if len(str(q.context)) < 1000]
    asked = [short[int(i)] for i in torch.linspace(0, len(short) - 1, min(QUESTIONS, len(short)))]

    def ids(text: str) -> torch.Tensor:
        return torch.tensor(case.encode(text))

    def choice(text: str) -> torch.Tensor:
        return ids(text.strip() if case.name == "story model" else text)  # SentencePiece puts a space before it itself

    start = torch.tensor([case.bos])
    return [
        MultipleChoice(torch.cat([start, ids(str(q.context))]), [choice(str(c)) for c in q.choices], q.answer)
        for q in asked
    ]


def main() -> None:
    """Write ``tables/downstream.csv``: some minutes of one core."""
    tables = []
    for case in both():
        for ask in TASKS:
            asked = questions(case, ask)
            curve = tp.perturbation_curve(
                case.model, case.long[:, :400], KINDS, FRACTIONS, seeds=1, downstream=asked, progress=False
            )
            right = curve["downstream"]
            error = (right * (1 - right) / len(asked)) ** 0.5  # of the questions, which are a sample
            columns = {"model": case.name, "task": ask, "questions": len(asked), "downstream_se": error}
            tables.append(curve[["kind", "fraction", "added_loss", "downstream"]].assign(**columns))
            print(tables[-1].round(3).to_string(), flush=True)
    table = pd.concat(tables, ignore_index=True)
    table.round(4).to_csv(TABLES / "downstream.csv", index=False)
