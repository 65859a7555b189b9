"""Marginal sums of a layer's scores in texts of several lengths, and the additive fits that they determine.

The fit of a text has its own distance profile, or none, or the profile that is fitted to all other texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tl_posdisent.additive.cells import Cells, make_cells
from tl_posdisent.additive.fit import explained_around, fit_marginals
from tl_posdisent.additive.marginals import Marginals, read_marginals
from tl_posdisent.additive.result import SUMMARY, AdditiveFit
from tl_posdisent.models.running.texts import Texts


class TextMarginals(NamedTuple):
    """Marginal sums of one layer's scores in texts of equal length.

    Attributes:
        rows: the places of the texts in the batch.
        sums, cells: the sums, and the cells over which they were taken.
        shared_distances: for the single longest text of a batch, the same over the pairs whose distance another text
            has too.
    """

    rows: Int[Tensor, " text"]
    sums: Marginals
    cells: Cells
    shared_distances: TextMarginals | None = None


def text_marginals(
    texts: Texts, rows: Int[Tensor, " text"], scores: Tensor, cells_at: Callable[[int], Cells]
) -> TextMarginals:
    """Compute the marginal sums of the scores of some of the texts; ``cells_at`` returns the cells of a length."""
    shared, length = None, scores.shape[-1]
    cells, second = cells_at(length), sorted(texts.lengths)[-2] if len(texts.tokens) > 1 else length
    if second < length:  # no other text has a profile at the largest distances, so r_held_out leaves them out
        position, cells_of_second = torch.arange(length, device=scores.device), cells_at(second)
        distance = position[:, None] - position
        known = (distance >= cells_of_second.low) & (distance < cells_of_second.low + cells_of_second.n_distance)
        known_cells = make_cells(scores.shape, cells.to_mask() & known, device=scores.device)
        shared = TextMarginals(rows, read_marginals(scores, known_cells), known_cells)
    return TextMarginals(rows, read_marginals(scores, cells), cells, shared)


def pooled_columns(parts: Sequence[TextMarginals]) -> dict[str, Tensor]:
    """Compute the columns of ``additivity`` with ``pool``, ``[head]`` each."""
    return summary_columns([fit_marginals(*pad_and_stack(parts), pool=True)])


def text_columns(parts: Sequence[TextMarginals]) -> dict[str, Tensor]:
    """Compute the columns of ``additivity`` without pooling, ``[text, head]``, texts in the order of the batch."""
    fits = [fit_marginals(part.sums, part.cells) for part in parts]
    several = sum(len(part.rows) for part in parts) > 1
    profiles = leave_one_out_profiles(parts, fits) if several else [None] * len(parts)
    r2 = [r2_with_profile(part, fit, profile) for part, fit, profile in zip(parts, fits, profiles, strict=True)]
    names = ["r_no_distance", "r_held_out"] if several else ["r_no_distance"]
    columns = summary_columns(fits) | dict(zip(names, torch.cat(r2, 1).clamp_min(0).sqrt(), strict=True))
    for name in names:  # a text too short for a fit tells nothing of its parts either
        columns[name] = columns[name].masked_fill(columns["r"].isnan(), torch.nan)
    order = torch.cat([part.rows for part in parts]).argsort()
    return {name: x[order.to(x.device)] for name, x in columns.items()}


def summary_columns(fits: Sequence[AdditiveFit]) -> dict[str, Tensor]:
    """Collect the columns of the summary, ``[*text, head]`` each, from several fits."""
    return {name: torch.cat([getattr(fit, name) for fit in fits]) for name in SUMMARY}


def r2_with_profile(
    part: TextMarginals, fit: AdditiveFit, profile: Float64[Tensor, "text head distance"] | None
) -> Float64[Tensor, "measure text head"]:
    """Compute r² without a distance profile, and with this one, if there is one."""
    no_profile = torch.zeros_like(fit.distance)
    if profile is None or part.shared_distances is None:
        profiles = [no_profile] if profile is None else [no_profile, profile]
        return explained_around(part.sums, part.cells, torch.stack(profiles))
    shared = part.shared_distances
    with_profile = explained_around(shared.sums, shared.cells, profile[None])
    return torch.cat([explained_around(part.sums, part.cells, no_profile[None]), with_profile])


def leave_one_out_profiles(
    parts: Sequence[TextMarginals], fits: Sequence[AdditiveFit]
) -> list[Float64[Tensor, "text head distance"]]:
    """Fit the distance profile of all other texts for each text, at the distances that they have."""
    if len(parts) == 1:  # with equal masks, the profile of several texts is the mean of their profiles
        (fit,) = fits
        return [(fit.distance.sum(0) - fit.distance) / (len(fit.distance) - 1)]
    by_part = [[_single_text(part, n) for n in range(len(part.rows))] for part in parts]
    texts = [text for single in by_part for text in single]
    return [
        torch.stack(
            [
                _profile((text.shared_distances or text).cells, [other for other in texts if other is not text])
                for text in single
            ]
        )
        for single in by_part
    ]


def _single_text(part: TextMarginals, n: int) -> TextMarginals:
    sums = Marginals(**{name: x[n : n + 1] for name, x in vars(part.sums).items()})
    # ``shared_distances`` is there only where the part is one text.
    return TextMarginals(part.rows[n : n + 1], sums, part.cells, part.shared_distances)


def _profile(cells: Cells, others: Sequence[TextMarginals]) -> Float64[Tensor, "head distance"]:
    """Fit the distance profile of these texts, at the distances of the cells."""
    fit = fit_marginals(*pad_and_stack(others), pool=True)
    low = cells.low - int(fit.distances[0])
    return fit.distance[..., low : low + cells.n_distance]


def pad_and_stack(parts: Sequence[TextMarginals]) -> tuple[Marginals, Cells]:
    """Stack marginal sums of texts of several lengths, along the axes of the longest."""
    if len(parts) == 1:
        return parts[0].sums, parts[0].cells
    n = max(part.cells.n_key for part in parts)
    pivot = parts[0].sums.pivot  # [text, head]
    batch, n_heads, device = sum(len(part.rows) for part in parts), pivot.shape[1], pivot.device
    places = torch.arange(batch, device=device).split([len(part.rows) for part in parts])
    inside = torch.zeros(batch, 1, n, n, dtype=torch.bool, device=device)
    for place, part in zip(places, parts, strict=True):
        inside[place, :, : part.cells.n_query, : part.cells.n_key] = part.cells.to_mask()
    cells = make_cells((batch, n_heads, n, n), inside, device=device)
    zero = cells.counts.new_zeros(batch, n_heads)
    stacked = Marginals(zero, zero.new_zeros(*zero.shape, cells.counts.shape[-1]), zero.clone())
    for place, part in zip(places, parts, strict=True):
        stacked.pivot[place], stacked.squares[place] = part.sums.pivot, part.sums.squares
        low = part.cells.low - cells.low
        ranges = (slice(low, low + part.cells.n_distance), slice(part.cells.n_query), slice(part.cells.n_key))
        for axis, indices, sums in zip(
            cells.split(stacked.sums), ranges, part.cells.split(part.sums.sums), strict=True
        ):
            axis[place, :, indices] = sums
    return stacked, cells
