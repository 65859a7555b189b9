"""Do attention outputs leave their region beyond the training length of the demo model and of the story model?

The same tokens, the last of a text, are read behind more or less of it. A step within the training length is the
control for one beyond it. Some minutes of one core.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from shared import stories
from shared.attention_outputs import compare, outputs
from shared.rows import TABLES, Row
from shared.texts import parts
from torch import Tensor

import tl_posdisent as tp

TEXTS = 16
COMPARED, HALF, TRAINED, BEYOND = 192, 256, 512, 1024  # tokens


def comparisons(model: Any, texts: Tensor) -> Iterator[Row]:
    """Rows of a model with ``TRAINED`` positions."""

    def run(length: int, hooks: Any = ()) -> Tensor:
        last = torch.cat([texts[:, :1], texts[:, 1 - length :]], 1)
        return outputs(model, last, COMPARED, hooks)

    ceiling = tp.remap_distance(model, lambda d: d.clamp(max=TRAINED - 1))
    near = run(TRAINED)
    yield compare("256 and 512 tokens", run(HALF), near, BEYOND)
    yield compare("512 and 1024 tokens", near, run(BEYOND), BEYOND)
    yield compare("512 and 1024 tokens, ceiling", near, run(BEYOND, ceiling), BEYOND)
    yield compare("512 and 1024 tokens, Λ-mask", near, run(BEYOND, tp.lambda_mask(model, 4, HALF, HALF)), BEYOND)


def cases() -> Iterator[tuple[str, Any, Tensor]]:
    """The demo model with speeches, the story model with texts of three stories that it generated."""
    demo = tp.load_demo_model(backend="bridge", n_ctx=BEYOND)
    yield "demo", demo, parts(demo, "speeches", TEXTS, BEYOND)
    torch.manual_seed(0)
    bos = torch.full((3 * TEXTS, 1), stories.BOS)
    wanted: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 0}
    samples = stories.stories_hf().generate(bos, min_new_tokens=499, max_new_tokens=499, **wanted)
    yield "story", stories.stories_bridge(), samples.reshape(TEXTS, -1)[:, :BEYOND]


def main() -> None:
    """Write ``tables/demo_length.csv`` and ``story_length.csv``."""
    for name, model, texts in cases():
        table = pd.DataFrame(comparisons(model, texts)).round(4)
        table.insert(0, "study", "outputs")
        table.to_csv(TABLES / f"{name}_length.csv", index=False)
