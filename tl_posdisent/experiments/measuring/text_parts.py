"""Texts that are run together: in batches padded on the right, or of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.running.partial_forward import BlockFacts
from tl_posdisent.models.running.texts import TextGroup, Texts, ordinary_ids

RUN_TOKENS: Final = 512
"""Short texts share a batch of at most so many tokens, whose passes take little longer than those of one of them."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Texts of one pass, in ascending order of length, padded on the right to that of the longest.

    Attributes:
        tokens: their ids; padding is an ordinary token, which no token of a text before it sees.
        groups: the texts of each length.
        places: the rows of each group in ``tokens``.
    """

    tokens: Int[Tensor, "text pos"]
    groups: list[TextGroup]
    places: list[slice]


@dataclass(frozen=True, eq=False)
class Part:
    """Texts that are compared together.

    Attributes:
        rows: of these texts in the whole batch, in ascending order.
        texts: the texts, grouped as in ``batches``.
        batches: the passes that they need.
    """

    rows: list[int]
    texts: Texts
    batches: list[Batch]

    def of_groups(self, outputs: Sequence[Any]) -> list[Any]:
        """Separate the outputs of the batches, one for each, by groups of texts of equal length, without padding."""
        return [
            output if len(batch.groups) == 1 else output[place, : group.tokens.shape[1]]
            for batch, output in zip(self.batches, outputs, strict=True)
            for group, place in zip(batch.groups, batch.places, strict=True)
        ]


def can_pad(reading: ModelReading, facts: BlockFacts) -> bool:
    """Say whether padding after a text changes nothing of it: every layer is causal, and the output is by token."""
    return facts.by_token and all(spec.causal for spec in reading.attention)


def parts_of(model: Any, texts: Texts, *, padded: bool, together: bool, limit: int = RUN_TOKENS) -> list[Part]:
    """Separate texts into parts.

    Args:
        padded: whether texts of unequal length may share a batch (see ``can_pad``).
        together: whether all texts are compared together. Then texts of equal length also share a batch.
        limit: number of tokens of a batch of several texts, padding included.
    """
    lengths, batches = texts.lengths, list[list[int]]()
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches:
            alike = lengths[batches[-1][-1]] == lengths[row]
            small = (len(batches[-1]) + 1) * lengths[row] <= limit
            if (alike and together) or (small and (alike or padded)):
                batches[-1].append(row)
                continue
        batches.append([row])
    return [_part(model, texts, of_part) for of_part in ([batches] if together else [[rows] for rows in batches])]


def _part(model: Any, texts: Texts, batches: Sequence[Sequence[int]]) -> Part:
    rows = sorted(row for batch in batches for row in batch)
    own = texts.take(rows)
    made = [_batch(model, own, [rows.index(row) for row in batch]) for batch in batches]
    return Part(rows, replace(own, groups=[group for batch in made for group in batch.groups]), made)


def _batch(model: Any, texts: Texts, rows: Sequence[int]) -> Batch:
    """Make a batch of some of the texts, given in ascending order of length."""
    groups = texts.take(rows).groups
    fill = int(ordinary_ids(model)[0])
    tokens = pad_sequence([text for group in groups for text in group.tokens], batch_first=True, padding_value=fill)
    places, first = list[slice](), 0
    for group in groups:
        places.append(slice(first, first + len(group.tokens)))
        first += len(group.tokens)
    of_part = [replace(group, rows=group.rows.new_tensor(rows)[group.rows]) for group in groups]
    return Batch(tokens, of_part, places)
