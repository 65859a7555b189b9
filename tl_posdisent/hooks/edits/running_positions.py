"""Read positions and rotation table of the running text during a forward pass.

Padding and ``position_ids`` show in what a layer computes: in its table of cosines, and in its vectors before and after
rotation.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posdisent.hooks.edits.running_mask import RunningMask
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.rope.rotary import Rotary, rotate, table_like, to_complex
from tl_posdisent.utils.errors import ArgumentError

_CANDIDATES = 4096  # positions to try if a table is not that of 0, 1, 2 …
_CELLS_PER_BLOCK = 2**22


def end_of_known(expected: Int[Tensor, " pos"]) -> int:
    """Return the position below which those of a running text are recognised in its table."""
    return max(_CANDIDATES, 2 * int(expected.max()) + 2)


def positions_from_table(
    cos: Float[Tensor, "one_or_batch pos columns"], rotary: Rotary, expected: Int[Tensor, " pos"]
) -> Int[Tensor, "*batch pos"] | None:
    """Find the positions at which ``rotary`` gives this cosine table, first those that are expected, or None."""

    def fits(positions: Tensor) -> bool:
        table = table_like(cos, rotary, positions, "cos")
        if table.shape[1:] != cos.shape[1:]:
            return False
        error = (cos.detach().double() - table.double()).abs().amax()
        return bool(error <= (2 * torch.finfo(cos.dtype).eps + rounding(rotary, positions)) * rotary.attention_factor)

    if fits(expected):
        return expected
    candidates = torch.arange(end_of_known(expected), device=cos.device)
    table = table_like(cos, rotary, candidates, "cos")[0].float()
    if table.shape[-1] != cos.shape[-1]:
        return None
    blocks = cos.detach().float().flatten(0, 1).split(max(1, _CELLS_PER_BLOCK // len(table)))
    distances = (torch.cdist(block, table, compute_mode="donot_use_mm_for_euclid_dist") for block in blocks)
    positions = torch.cat([x.argmin(-1) for x in distances]).view(cos.shape[:2])
    return (positions[0] if len(positions) == 1 else positions) if fits(positions) else None


def positions_from_vectors(
    before: Float[Tensor, "batch pos head d_head"],
    after: Float[Tensor, "batch pos head d_head"],
    rotary: Rotary,
    expected: Int[Tensor, " pos"],
) -> Int[Tensor, "*batch pos"] | None:
    """Find the positions to which a model has rotated these vectors, first those that are expected, or None."""
    before, after = before.detach().to(after.dtype), after.detach()  # autocast rounds those before rotation alone

    def fits(positions: Tensor) -> bool:
        error = (after.double() - rotate(before, positions, rotary).double()).abs().amax()
        return bool(error <= (8 * torch.finfo(after.dtype).eps + rounding(rotary, positions)) * after.abs().amax())

    if fits(expected):
        return expected
    start, end = (to_complex(x.double(), rotary)[0] for x in (before, after))
    turns = (end * start.conj()).sum(2).flatten(0, 1)  # its argument is the angle of each subspace
    candidates = torch.arange(end_of_known(expected), device=before.device)
    possible = torch.exp(-1j * rotary.angles(candidates)).to(turns.dtype)
    blocks = turns.split(max(1, _CELLS_PER_BLOCK // len(candidates)))
    positions = torch.cat([(block @ possible.T).real.argmax(-1) for block in blocks]).view(before.shape[:2])
    return positions if fits(positions) else None


def rounding(rotary: Rotary, positions: Int[Tensor, "*pos"]) -> float:
    """Bound the error of angles in radians: frequencies are rounded to float32, so far positions are less exact."""
    return 1e-4 + 4 * torch.finfo(torch.float32).eps * float(positions.max() * rotary.frequencies.abs().max())


def unknown_positions(layer: int, expected: Int[Tensor, " pos"]) -> ValueError:
    """Return the error for a rotation at no known positions."""
    end = end_of_known(expected)
    return ValueError(
        f"the rotation table of layer {layer} is not that of positions 0, 1, 2 … nor of any others below {end}, which "
        f"are those that are recognised in a text of this length: run the model on a whole text, unpadded and with "
        f"position_ids below {end}, if any, and make the hooks again if its tables have changed"
    )


def restarts(positions: Int[Tensor, "*batch pos"]) -> bool:
    """Say whether positions begin again at 0 within a row."""
    return bool(((positions[..., 1:] == 0) & (positions[..., :-1] > 0)).any())


def check_packed(positions: Int[Tensor, "*batch query"], mask: RunningMask) -> None:
    """Refuse texts packed into one row by their positions alone, which the mask does not hide from each other."""
    real = ~mask.padding
    positions, both = positions.expand(real.shape), real[:, 1:] & real[:, :-1]
    begins = both & (positions[:, 1:] == 0) & (positions[:, :-1] > 0)
    packed = begins.any(-1) & (begins | ~both | (positions.diff() == 1)).all(-1)
    text = torch.nn.functional.pad(begins.cumsum(-1), (1, 0))
    seen = mask.seen & ~mask.after[:, :, None]
    if bool((seen & (text[:, :, None] != text[:, None, :]))[packed].any()):
        raise ArgumentError(
            "position_ids",
            "must not begin again at 0 in a pass whose tokens see those before, got packed texts: pass a batch of "
            "texts, or a mask [batch, 1, query, key] (with use_cache=False and no attention_mask, transformers makes "
            "one for most models)",
        )


def check_one_text(spec: AttentionSpec, inside: Bool[Tensor, "*lead query key"], tool: str) -> None:
    """Refuse several texts packed into one row, each masked from the others: scores are fitted text by text."""
    real = inside.diagonal(0, -2, -1)
    whole = spec.mask(inside.shape[-1], inside.device) & real[..., :, None] & real[..., None, :]
    if not torch.equal(whole, inside):
        raise ArgumentError(
            "attention_mask",
            f"must leave one text in each row for {tool}, got a mask that hides tokens of a text "
            "from each other, as of packed texts: pass them as a batch of texts",
        )
