"""What does perturbed text cost: exchanged tokens, positions, or rotary features?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from shared.rows import Row, row
from shared.texts import Source, how_many, parts
from torch import Tensor

import tl_posdisent as tp

TEXTS, LENGTH, DRAWS = 3, 256, 6
KINDS = ("order", "index", "feature")
FRACTIONS = (0.05, 0.1, 0.25)


def rows(model: Any, source: Source) -> Iterator[Row]:
    """The loss added at intact positions (neither token nor next token moved) and accuracy, by kind and fraction;
    ratios of kinds, over draws and over texts. Where the text is not moved, the added loss at all positions, too."""
    texts, draws = parts(model, source, TEXTS, LENGTH), how_many(model, source, DRAWS)
    measured = curves(model, texts, draws)
    over = f"draws, {len(texts)} texts"
    for kind, fraction in measured["accuracy"]:
        name, call = f"{kind}, {fraction:.0%}", f'perturbation_curve(model, texts, ["{kind}"], [{fraction}])'
        for what, values in measured.items():
            if (what == "accuracy" or fraction) and (kind, fraction) in values:
                yield row(f"{what}, {name}", values[kind, fraction].mean(1), LENGTH, call, over)
    for what, a in (("added loss", "order"), ("added loss", "feature"), ("added loss at all positions", "feature")):
        for fraction in FRACTIONS:
            pair = measured[what][a, fraction], measured[what]["index", fraction]
            for unit, axis in (("draws", 1), ("texts", 0)):
                value, error = ratio(*(values.mean(axis) for values in pair))
                name = f"{what}, {a} over index, {fraction:.0%}, error over {unit}"
                yield Row(name, value, error, f"{pair[0].shape[1 - axis]} {unit}", LENGTH, "perturbation_curve")


def curves(model: Any, texts: Tensor, draws: int) -> dict[str, dict[Any, Tensor]]:
    """``[draw, text]`` added losses and accuracy, by kind and fraction; accuracy also of the unperturbed text."""
    reading = tp.read_model(model)
    tables = [
        [tp.perturbation_curve(reading, text[None], KINDS, (0, *FRACTIONS), [seed], progress=False) for text in texts]
        for seed in range(draws)
    ]
    by_case = [[table.set_index(["kind", "fraction"]) for table in of_draw] for of_draw in tables]

    def values(kind: str, fraction: float, column: str) -> Tensor:
        return torch.tensor([[table.loc[(kind, fraction), column] for table in draw_tables] for draw_tables in by_case])

    cases = [(kind, fraction) for kind in KINDS for fraction in FRACTIONS]
    unmoved = values("index", 0, "perplexity").log()  # with "order", next tokens are moved themselves
    at_all = {case: values(*case, "perplexity").log() - unmoved for case in cases if case[0] != "order"}
    return {
        "added loss": {case: values(*case, "added_loss") for case in cases},
        "added loss at all positions": at_all,
        "accuracy": {case: values(*case, "accuracy") for case in [("order", 0), *cases]},
    }


def ratio(x: Tensor, y: Tensor) -> tuple[float, float]:
    """The ratio of two means, and its standard error by leaving out one pair of values after another (jackknife)."""
    n = len(x)
    without = (x.sum() - x) / (y.sum() - y)
    return (x.mean() / y.mean()).item(), ((n - 1) / n * (without - without.mean()).square().sum()).sqrt().item()
