"""Do attention outputs leave their region beyond the training length of the demo model and of the story model?

The same tokens, the last of a text, are read behind more or less of it, or at other positions behind the same tokens. A
step within the training length is the control for one beyond it. Ten minutes of one core.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from shared import stories
from shared.attention_outputs import Outputs, compare, outputs, positions
from shared.rows import TABLES, Row
from shared.texts import parts
from torch import Tensor

import tl_posdisent as tp

TEXTS = 16
COMPARED, HALF, TRAINED, FARTHER, BEYOND = 192, 256, 512, 768, 1024  # tokens


def last(texts: Tensor, length: int) -> Tensor:
    """BOS and the last tokens of each text."""
    return torch.cat([texts[:, :1], texts[:, 1 - length :]], 1)


def comparisons(model: Any, texts: Tensor) -> Iterator[Row]:
    """Rows of a model with ``TRAINED`` positions."""

    def run(length: int, hooks: Any = ()) -> Outputs:
        return outputs(model, last(texts, length), COMPARED, hooks)

    def gap(size: int) -> Any:
        return tp.swap_positions(model, positions(HALF, COMPARED, size))

    ceiling = tp.remap_distance(model, lambda d: d.clamp(max=TRAINED - 1))
    window = tp.lambda_mask(model, 4, HALF, HALF)
    halved = tp.position_interpolation(model, BEYOND / TRAINED)
    early, near, farther, far = (run(length) for length in (HALF, TRAINED, FARTHER, BEYOND))
    to_512, to_768, to_1024 = (run(HALF, gap(end - HALF)) for end in (TRAINED, FARTHER, BEYOND))
    masked_near, masked = run(TRAINED, window), run(BEYOND, window)
    pairs = {
        "256 and 512 tokens": (early, near),
        "512 and 768 tokens": (near, farther),
        "512 and 1024 tokens": (near, far),
        "positions to 256 and to 512": (early, to_512),
        "positions to 512 and to 768": (to_512, to_768),
        "positions to 512 and to 1024": (to_512, to_1024),
        "512 and 1024 tokens, ceiling": (near, run(BEYOND, ceiling)),
        "512 and 1024 tokens, Λ-mask": (near, masked),
        "512 and 1024 tokens, Λ-mask in both": (masked_near, masked),
        "512 tokens, without and with Λ-mask": (near, masked_near),
        "512 and 1024 tokens, positions halved": (near, run(BEYOND, halved)),
    }
    for name, (a, b) in pairs.items():
        yield from compare(name, a, b, BEYOND)


def cases() -> Iterator[tuple[str, Any, Tensor]]:
    """The demo model with speeches, the story model with texts of three stories that it generated."""
    demo = tp.load_demo_model(backend="bridge")
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
