"""How much of the scores of small models, and of their terms, is a function of the distance?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from shared.rows import Row, row
from shared.trained_models import NAMES, STEPS, TASK, TRAINED, trained
from torch import Tensor

from tl_posdisent.experiments import content_position_terms, rope_hadamard
from tl_posdisent.rope import toeplitz_share
from tl_posdisent.synthetic.tasks.task import long_texts


def synthetic_rows() -> Iterator[Row]:
    """How much of the scores, and of their terms of content and position, is a function of the distance."""
    texts = long_texts(TASK, 64)
    for encoding, seeds in TRAINED.items():
        for state, step in {"untrained": 0, "trained": STEPS[-1]}.items():
            models = [trained(encoding, seed)[0][step] for seed in seeds]
            split = [
                [content_position_terms(model, texts, layer, grand_mean="bias") for layer in range(3)]
                for model in models
            ]
            name = f"{NAMES[encoding]}, {state}"
            whole = torch.stack([of_scores([(x.scores(), x.mask) for x in layers]) for layers in split])
            yield row(f"toeplitz, scores, {name}", whole, len(texts[0]), "toeplitz_share(...)", "seeds")
            yield from terms(split, name, len(texts[0]))
            if encoding == "rope":
                forms = [[rope_hadamard(model, texts, layer) for layer in range(3)] for model in models]
                before = torch.stack([of_scores([(x.content(), x.mask) for x in layers]) for layers in forms])
                yield row(
                    f"toeplitz, scores before rotation, {name}", before, len(texts[0]), "rope_hadamard(...)", "seeds"
                )


def of_scores(layers: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The mean over layers and heads of what one function of the distance explains of scores of all texts."""
    return torch.stack([toeplitz_share(scores, mask=mask, pool=True).nanmean() for scores, mask in layers]).mean()


def terms(split: list[list[Any]], name: str, length: int) -> Iterator[Row]:
    """Sizes of terms, and how far each is a function of the distance: mean over heads of all layers."""
    tables = [
        pd.concat([x.to_frame() for x in layers]).groupby("term")[["size", "toeplitz"]].mean() for layers in split
    ]
    for term in ("content:content", "content:position", "position:position", "attention bias"):
        for column in ("size", "toeplitz"):
            values = torch.tensor([table.loc[term, column] for table in tables])
            if bool(values.isfinite().all()):
                yield row(f"{column}, {term}, {name}", values, length, "content_position_terms(...)", "seeds")
