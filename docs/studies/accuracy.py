"""How well do small models learn the distance of two triggers, by position encoding?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from shared.rows import Row, row
from shared.trained_models import NAMES, TRAINED, trained


def synthetic_rows() -> Iterator[Row]:
    """Accuracy on new texts after training."""
    for encoding, seeds in TRAINED.items():
        right = torch.tensor([trained(encoding, seed)[1] for seed in seeds])
        yield row(f"accuracy, {NAMES[encoding]}", right, 0, "train_preset(...)", "seeds")
