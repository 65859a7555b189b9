"""The two small models of the documentation, each with texts that it was not trained on.

The demo model comes with the package. Its texts here are speeches from after its training texts, and the story model is
not part of the package: both are read from the folder that ``POSDISENT_DATA`` names, by default ``../shared/data``.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import tl_posdisent as tp
from shared import stories


@dataclass(frozen=True)
class Case:
    """A model, a text for questions, tokens longer than its context of 512, and its tokenizer (ids without BOS)."""

    name: str
    model: Any
    text: str
    long: torch.Tensor
    encode: Callable[[str], list[int]]
    bos: int


def demo() -> Case:
    text = gzip.decompress(stories.data_file("speeches-heldout.txt.gz").read_bytes()).decode()
    text = re.sub(r"\([A-Z][a-z ]+\.\)|THE PRESIDENT:", "", text)  # (Applause.)
    encode = partial(tp.demo.demo_tokenizer().encode, add_special_tokens=False)
    return Case("demo model", tp.load_demo_model(), text, tp.demo_tokens(length=1537), encode, 0)


def story() -> Case:
    tokenizer, samples = stories.stories_tokenizer(), [stories.sample_story(500, seed, 0.7) for seed in range(5)]
    text = " ".join(tokenizer.decode(sample[0].tolist()) for sample in samples)
    long = torch.cat(samples, 1)
    encode = partial(tokenizer.encode, bos=False)
    return Case("story model", stories.stories_hooked(), text, long, encode, stories.BOS)


def both() -> list[Case]:
    torch.set_num_threads(1)
    return [demo(), story()]
