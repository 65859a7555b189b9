"""The positional subspace of the residual stream, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.models.reading.forward import run
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.texts import Tokens, read_texts
from tl_posdisent.utils.validation import check_integer, check_number

from .content_position import split_stream
from .qk_readout import keep, residual_hook


@dataclass(frozen=True, eq=False, repr=False)
class PositionalSubspace:
    """Positional subspace of the residual stream before a layer. All tensors are float64.

    Attributes:
        layer: its number.
        basis: ``[d_model, rank]``, orthonormal columns, the one of most variance first.
        variances: ``[min(pos, d_model)]``, of the positional part along its principal directions, descending.
        share: the positional part's share of the variance of the residual stream.
        noise: the share expected for this number of texts if vectors did not depend on position.
    """

    layer: int
    basis: Float64[Tensor, "d_model rank"]
    variances: Float64[Tensor, "direction"]
    share: float
    noise: float

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return self.basis.shape[1]

    def __repr__(self) -> str:
        return (
            f"PositionalSubspace of layer {self.layer}: {self.rank} of {len(self.basis)} dimensions, "
            f"{self.share:.3f} of the stream is positional ({self.noise:.3f} by chance)"
        )


def positional_subspace(
    model: Any,
    tokens: Tokens,
    layer: int,
    *,
    attention_mask: Tensor | None = None,
    rank: int | None = None,
    explained: float = 0.95,
    sinks: int = 0,
) -> PositionalSubspace:
    """Compute the principal directions of the positional part of the residual stream before a layer.

    The positional part is the mean over the texts at each position less the mean of all (arXiv 2505.13027). Two layers
    are compared by ``principal_angles`` of their bases.

    Args:
        model: HookedTransformer, TransformerBridge or alike, or its ``read_model``.
        tokens: ids ``[batch, pos]``, or a list of texts of any lengths: at least two at every position. Means and
            variances are over tokens, so that a position counts by the number of texts that reach it.
        layer: 0 … n_layers - 1; negative ones count from the end.
        attention_mask: 1 at tokens, 0 at padding, for padded ids. Texts are run without padding.
        rank: number of directions; None for the smallest number that explains the share ``explained``.
        explained: of the positional part's variance, above 0 and up to 1; used without ``rank``.
        sinks: positions to leave out at the beginning.

    Raises:
        ValueError: unusable arguments; positions that only one text reaches; a ``rank`` beyond the directions in which
            the positional part varies.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.experiments import positional_subspace
        >>> from tl_posdisent.rope import principal_angles
        >>> model, tokens = load_demo_model(), demo_tokens(length=512).view(16, 32)
        >>> first, last = (positional_subspace(model, tokens, layer, rank=2) for layer in (1, 4))
        >>> first
        PositionalSubspace of layer 1: 2 of 128 dimensions, 0.057 of the stream is positional (0.061 by chance)
        >>> principal_angles(first.basis, last.basis).shape
        torch.Size([2])
    """
    reading = read_model(model, [layer])
    model, (spec,) = reading.model, reading.specs([layer])
    layer = spec.layer
    texts = read_texts(model, tokens, attention_mask)
    if rank is not None:
        check_integer("rank", rank, 1)
    check_number("explained", explained, above=0, most=1)
    texts.require_two("positional_subspace")
    check_integer("sinks", sinks, 0, min(texts.lengths) - 2)
    streams = []
    for group in texts.groups:
        seen: dict[str, Tensor] = {}
        run(model, group.tokens, [keep(residual_hook(layer), seen)], stop=layer + 1)
        streams.append(seen[residual_hook(layer)][:, sinks:].double())
    content, position, _, counts = split_stream(streams)
    n = int(counts.sum())
    _, singular, directions = torch.linalg.svd(position * (counts / n).sqrt()[:, None], full_matrices=False)
    variances = singular.square()
    size = (sum(x.square().sum() for x in streams) / n) ** 0.5
    varying = int((singular > 1e-6 * size).sum())
    if not varying:
        raise ValueError(
            f"tokens must be texts whose residual stream before layer {layer} depends on the position, got texts in "
            "which it differs by rounding alone"
        )
    if rank is None:
        so_far = variances.cumsum(0) / variances.sum()
        rank = min(int((so_far < explained).sum()) + 1, varying)
    if not 1 <= rank <= varying:
        raise ValueError(f"rank must be at least 1 and at most {varying}, the directions with variance, got {rank}")
    within, between = sum(part.square().sum() for part in content) / n, variances.sum()
    chance = within / (n - len(position)) * (len(position) - 1)  # one-way analysis of variance
    total = within + between
    return PositionalSubspace(layer, directions[:rank].T, variances, float(between / total), float(chance / total))
