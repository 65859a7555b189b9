"""Perturb a text's order, the positions that RoPE receives, or RoPE's phases, by exchanging the same pairs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from tl_posdisent.hooks.edit import Noise
from tl_posdisent.hooks.hook_list import hooks_for
from tl_posdisent.models.reading.model_reading import ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Hook
from tl_posdisent.models.running.texts import Tokens, are_strings, read_texts
from tl_posdisent.rope.rotary import Rotary
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_choice, check_integer, check_number

Kind = Literal["order", "index", "feature"]
Unit = Literal["word", "token"]


@dataclass(frozen=True)
class Perturbed:
    """A perturbed text and the hooks to run it with.

    Attributes:
        tokens: ``[batch, pos]``, in the new order if the order is perturbed, else unchanged.
        hooks: for ``model.hooks(fwd_hooks=...)`` or ``applied``; empty if only the order is perturbed.
        moved: ``[batch, pos]``, True at the positions that moved, the same for all three kinds.
        attention_mask: ``[batch, pos]``, False at padding; pass it to the model if there is padding.
    """

    tokens: Int[Tensor, "batch pos"]
    hooks: list[Hook]
    moved: Bool[Tensor, "batch pos"]
    attention_mask: Bool[Tensor, "batch pos"]

    @property
    def intact(self) -> Bool[Tensor, "batch _"]:
        """``[batch, pos - 1]``: True where neither this position nor the next has moved.

        There all three kinds have the same token and the same next token; only the context before them is perturbed.
        """
        changed = self.moved | ~self.attention_mask
        return ~(changed[:, :-1] | changed[:, 1:])


Perturb = Callable[..., Perturbed]
"""``perturb(tokens, attention_mask=None, *, until=None, unit=None)`` with model, kind, fraction and seed chosen."""


def perturb(
    model: Any,
    tokens: Tokens,
    kind: Kind,
    fraction: float | int,
    *,
    attention_mask: Tensor | None = None,
    seed: int = 0,
    window: int = 1,
    unit: Unit | None = None,
    until: int | None = None,
) -> Perturbed:
    """Perturb the order, the positions or the rotary phases of a fraction of a text (arXiv 2503.13305).

    Of the n units that can move, ``round(fraction · n / 2)`` disjoint pairs are exchanged, at most n // 2. The first
    position never moves (it is often an attention sink), nor do special tokens of the model's tokenizer or the word
    after one. Depending on ``kind``,

    * ``"order"``: the tokens have the new order;
    * ``"index"``: the tokens are unchanged, and RoPE receives for each its position under ``"order"``;
    * ``"feature"``: the tokens are unchanged, and in each of RoPE's subspaces the displacements of ``"index"`` are
      permuted among the positions that moved.

    Args:
        model, tokens, attention_mask: as in ``head_ablation``; the model has rotary embeddings unless ``kind`` is
            ``"order"``. Each text is perturbed independently of the others.
        kind: what to perturb.
        fraction: fraction of the units that can move, from 0 (unmodified, no hooks) to 1.
        seed: seed of the pairs, which are the same for every kind.
        window: largest distance between the two units of a pair, in units: 1 exchanges neighbours.
        unit: ``"word"`` moves whole words with the space before them, ``"token"`` single tokens. Default ``"word"`` for
            text and ``"token"`` for ids.
        until: position in each text from which on nothing moves; default the end.

    Raises:
        ValueError: invalid arguments; fewer than two units that can move; ``"word"`` for a model without tokenizer;
            a kind other than ``"order"`` for a model without rotary embeddings.

    Example:
        >>> from tl_posdisent import load_demo_model
        >>> from tl_posdisent.experiments import perturb
        >>> model = load_demo_model()
        >>> scrambled = perturb(model, "We the people of the United States, in order", "order", 0.5)
        >>> model.tokenizer.decode(scrambled.tokens[0])
        '<|endoftext|>We people the of the United States, order in'
        >>> told = perturb(model, "We the people of the United States, in order", "index", 0.5)
        >>> bool((told.moved == scrambled.moved).all())
        True
    """
    check_choice("kind", kind, get_args(Kind))
    check_number("fraction", fraction, least=0, most=1)
    if unit is not None:
        check_choice("unit", unit, get_args(Unit))
    for name, value, least in (("window", window, 1), ("seed", seed, 0), ("until", 0 if until is None else until, 0)):
        check_integer(name, value, least)
    reading = read_model(model)
    specs = [] if kind == "order" else _rotary_specs(reading)
    texts = read_texts(reading.model, tokens, attention_mask)
    unit = unit or ("word" if are_strings(tokens) else "token")
    places = torch.arange(texts.tokens.shape[1])
    source = places.repeat(len(texts.tokens), 1)
    shifts = torch.zeros_like(source, dtype=torch.float64)
    generators = []
    for row, (ids, real) in enumerate(zip(texts.tokens, texts.real.cpu(), strict=True)):
        generator = torch.Generator().manual_seed(seed)  # one per text: pairs do not depend on the batch
        text_places = places[real]
        units = _movable(reading.model, ids[text_places].tolist(), unit, len(text_places) if until is None else until)
        order = _reordered(units, len(text_places), fraction, window, generator)
        source[row, text_places] = text_places[order]
        shifts[row, text_places] = order.argsort().double() - places[: len(text_places)]
        generators.append(generator)
    moved = (source != places).to(texts.tokens.device)
    if kind == "order":
        return Perturbed(texts.tokens.gather(1, source.to(texts.tokens.device)), [], moved, texts.real)
    hooks: list[Hook] = []
    if bool(moved.any()):
        chosen = [(spec, range(spec.n_heads)) for spec in specs]
        if kind == "index":
            hooks = hooks_for(chosen, "perturb", positions=shifts + places)
        else:
            hooks = hooks_for(chosen, "perturb", noise=_phases(specs, shifts, generators))
    return Perturbed(texts.tokens, hooks, moved, texts.real)


def _rotary_specs(reading: ModelReading) -> list[AttentionSpec]:
    try:
        return reading.rotary(None, "perturb")
    except ValueError as error:
        raise ArgumentError(
            "kind", f'must be "order" for a model without rotary position embeddings: {error}'
        ) from error


def _phases(specs: Sequence[AttentionSpec], shifts: Tensor, generators: Sequence[torch.Generator]) -> Noise:
    """Permute the displacements in each subspace, in the same way in all layers."""
    subspaces = max(len(spec.require_rotary("perturb").frequencies) for spec in specs)
    permuted = shifts.new_zeros(*shifts.shape, subspaces)
    for row, shift, generator in zip(permuted, shifts, generators, strict=True):
        displaced = shift.nonzero()[:, 0]
        order = torch.rand(len(displaced), subspaces, generator=generator)
        row[displaced] = shift[displaced][order.argsort(0)]

    return Noise(partial(_phase_angles, permuted))


def _phase_angles(displacements: Float64[Tensor, "batch pos subspace"], rotary: Rotary) -> Tensor:
    """Return the angles by which RoPE turns more, of displacements in each subspace."""
    return displacements[..., : len(rotary.frequencies)] * rotary.frequencies.cpu()


def _reordered(
    units: Sequence[range], length: int, fraction: float | int, window: int, generator: torch.Generator
) -> Int[Tensor, " pos"]:
    """Return the old position of each new one: pairs of units are exchanged, units between them keep their order."""
    order = _exchanged(len(units), fraction, window, generator)
    old, end, pieces = torch.arange(length), 0, []
    for slot, n in zip(units, order, strict=True):
        pieces += [old[end : slot.start], old[units[n].start : units[n].stop]]
        end = slot.stop
    return torch.cat([*pieces, old[end:]])


def _exchanged(n: int, fraction: float | int, window: int, generator: torch.Generator) -> list[int]:
    """Return 0 … n - 1 with ``round(fraction · n / 2)`` disjoint pairs exchanged.

    Going from left to right, each number is paired with a free one in its window (whose far end is always free, so that
    only the last number is left over if n is odd), and some of the pairs are then exchanged. Whether the first pair
    begins with 0 or 1 is random if both are possible.
    """
    n_pairs = min(int(fraction * n / 2 + 0.5), n // 2)
    first = int(torch.randint(2, (), generator=generator))
    free = list(range(first if n_pairs < n // 2 else 0, n))
    draws = torch.rand(len(free), generator=generator).tolist()
    pairs = []
    while len(free) > 1:
        left = free.pop(0)
        near = [x for x in free[:window] if x - left <= window]
        right = near[int(draws.pop() * len(near))]
        free.remove(right)
        pairs.append((left, right))
    order = list(range(n))
    for pair in torch.randperm(len(pairs), generator=generator)[:n_pairs].tolist():
        left, right = pairs[pair]
        order[left], order[right] = right, left
    return order


def _movable(model: Any, ids: list[int], by: Unit, until: int) -> list[range]:
    """Return the units that can move, as ranges of positions."""
    tokenizer = getattr(model, "tokenizer", None)
    if by == "word" and tokenizer is None:
        raise ArgumentError("unit", 'must be "token" for a model without a tokenizer, got "word"')
    special = set(getattr(tokenizer, "all_special_ids", None) or ())
    begins = _word_begins(tokenizer, ids, special) if by == "word" else [True] * len(ids)
    starts = [0, *(i for i in range(1, len(ids)) if begins[i]), len(ids)]
    units = [range(a, b) for a, b in itertools.pairwise(starts)]
    # A word directly after a special token has no space before it; elsewhere it would merge with its neighbour.
    stays = {
        i + behind for i, token in enumerate(ids) if token in special for behind in range(2 if by == "word" else 1)
    }
    movable = [unit for unit in units[1:] if unit.stop <= until and unit.start not in stays]
    if len(movable) < 2:
        raise ArgumentError(
            "tokens",
            f"must have at least two {by}s that can move (not the first one or special tokens), got {len(movable)}",
        )
    return movable


def _word_begins(tokenizer: Any, ids: list[int], special: set[int]) -> list[bool]:
    """Say for each token whether a word begins there. Whitespace belongs to the word after it."""

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    begins, last_piece = [True], decode(ids[:1])
    for last, token in itertools.pairwise(ids):
        # With its neighbour: decoded alone, tokens of some tokenizers lose their space or are part of a character.
        piece = decode([last, token])[len(decode([last])) :]
        parted = (piece[:1].isspace() or last_piece[-1:].isspace()) and not last_piece.isspace()
        begins.append(parted or token in special or last in special)
        last_piece = piece
    return begins
