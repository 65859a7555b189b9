"""Every number of a text in a padded batch is that of the text alone: all experiments, both sides and classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent import experiments as ex

LENGTHS = [9, 14, 9, 11]
WIDTH = max(LENGTHS)
TEXTS = [zoo.random_tokens(n, batch=1, seed=i) for i, n in enumerate(LENGTHS)]
MODELS = zoo.cases("llama-gqa")
SIDES = ["left", "right"]
Call = Callable[..., Any]


def batch(side: str, texts: list[Tensor] = TEXTS) -> tuple[Tensor, Tensor]:
    """Padded ids and their mask."""
    ends = [(WIDTH - x.shape[1], 0) if side == "left" else (0, WIDTH - x.shape[1]) for x in texts]
    pad = torch.nn.functional.pad
    tokens = torch.cat([pad(x, end) for x, end in zip(texts, ends, strict=True)])
    return tokens, torch.cat([pad(torch.ones_like(x), end) for x, end in zip(texts, ends, strict=True)])


def same(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(found, expected, check_dtype=False, rtol=1e-4, atol=1e-5)


BY_TEXT: dict[str, Call] = {
    "additivity": tp.additivity,
    "dummy_distance_check": lambda *x, **y: tp.experiments.dummy_distance_check(*x, distances=[1, 5], **y),
    "positional_symbolic": tp.positional_symbolic,
}
"""One row or more for each text, with its number in ``batch``."""

POOLED: dict[str, Call] = {
    "additivity": lambda *x, **y: tp.additivity(*x, pool=True, **y),
    "controlled_distance": lambda *x, **y: tp.controlled_distance(*x, burn_in=1, **y),
    "disentanglement": tp.disentanglement,
    "subspace_patterns": tp.subspace_patterns,
    "trained_vs_random": lambda *x, **y: ex.trained_vs_random(*x, seeds=[0], **y),
}
"""One table for all texts."""


@pytest.mark.parametrize(("kind", "name"), MODELS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name_of", BY_TEXT)
def test_rows_of_a_text(name_of: str, side: str, kind: str, name: str, shared_model: Any) -> None:
    """The rows of each text are those of a table of that text alone, in the order of the batch."""
    model, run = shared_model(kind, name), BY_TEXT[name_of]
    tokens, mask = batch(side)
    found = run(model, tokens, attention_mask=mask, progress=False)
    alone = [run(model, text, progress=False).assign(batch=i) for i, text in enumerate(TEXTS)]
    keys = [key for key in ("layer", "distance", "batch", "head") if key in found]
    same(found, pd.concat(alone).sort_values(keys, kind="stable", ignore_index=True))


@pytest.mark.parametrize(("kind", "name"), MODELS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name_of", POOLED)
def test_one_padded_text(name_of: str, side: str, kind: str, name: str, shared_model: Any) -> None:
    """Where texts are measured together: a padded text has the numbers of that text."""
    model, run = shared_model(kind, name), POOLED[name_of]
    tokens, mask = batch(side, TEXTS[:1])
    same(run(model, tokens, attention_mask=mask, progress=False), run(model, TEXTS[0], progress=False))


@pytest.mark.parametrize("name_of", POOLED)
def test_padding_changes_no_pool(name_of: str, shared_model: Any) -> None:
    """Texts of two lengths, padded on either side or grouped by hand in another order, give one table."""
    model, run = shared_model("bridge", "llama-gqa"), POOLED[name_of]
    tables = []
    for side in SIDES:
        for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
            tokens, mask = batch(side, [TEXTS[i] for i in order])
            tables.append(run(model, tokens, attention_mask=mask, progress=False))
    for table in tables[1:]:
        same(table, tables[0])


def test_pooled_fit_of_unequal_lengths(shared_model: Any) -> None:
    """As ``fit_additive`` of all scores with a mask for each text."""
    model = shared_model("bridge", "llama-gqa")
    tokens, mask = batch("right")
    found = tp.additivity(model, tokens, attention_mask=mask, pool=True, layers=1, progress=False)
    scores, inside = torch.zeros(4, 8, WIDTH, WIDTH), torch.zeros(4, 1, WIDTH, WIDTH, dtype=torch.bool)
    for i, text in enumerate(TEXTS):
        n = text.shape[1]
        (layer,) = tp.capture(model, text, layers=[1])
        scores[i, :, :n, :n], inside[i, :, :n, :n] = layer.scores[0], torch.ones(n, n).tril().bool()
    expected = tp.fit_additive(scores, mask=inside, pool=True).to_frame()
    same(found.drop(columns="layer"), expected)
