"""Theorem 2 of [A] (Han and Ji, arXiv 2503.13305): the spread of keys bounds the interaction.

A score is ``Re Σ_c u_c(d) q_c conj(k_c)`` with a complex number per subspace c and ``u_c(d) = scale · exp(i θ_c d)``.
Over all distances, queries and keys the three factors are independent. So the variance of a component is ``½ Re Σ_cc'``
of a product of three matrices of second moments, and of three more: ``E[x_c conj(x_c')]`` and ``E[x_c x_c']``, of a
factor that takes part minus its mean, or of the mean of one that does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pandas as pd
import torch
from shared.rows import Row, row
from shared.texts import Source, how_many, parts
from torch import Tensor

import tl_posdisent as tp
from tl_posdisent.rope import to_complex

LENGTH, TEXTS = 256, 4
COMPONENTS = {"distance:key": (True, False, True), "distance:query:key": (True, True, True)}  # which factors take part


def rows(model: Any, source: Source) -> Iterator[Row]:
    """Theorem 2 of [A]: the share of interactions with the distance and its two bounds; without the first token."""
    texts = parts(model, source, how_many(model, source, TEXTS), LENGTH)
    for name, one in {"trained": model, "random": next(tp.random_control(model, [0]))}.items():
        captured = [tp.capture(one, text[None], scores=False) for text in texts]
        for component, taking_part in COMPONENTS.items():
            means = pd.DataFrame([pd.concat([bounds(x, taking_part) for x in layers]).mean() for layers in captured])
            for column in means:
                values = torch.tensor(means[column].to_numpy())
                yield row(f"{component}, {column}, {name}", values, LENGTH, "capture(model, text), second moments")


def bounds(layer: Any, taking_part: tuple[bool, ...]) -> pd.DataFrame:
    """One row per head: the share of an interaction, its bounds, and whether they are bounds, up to rounding."""
    factors = factors_of(layer)
    total = sum(variance(pairs(factors, some)) for some in product([False, True], repeat=3) if any(some))
    found = pairs(factors, taking_part)
    pairwise = found.abs().sum((0, 2, 3)) / 2  # by the triangle inequality
    separate = found[0].diagonal(dim1=-2, dim2=-1).real.clamp(min=0).sqrt().sum(-1) ** 2  # by Cauchy–Schwarz, too
    shares = {"share": variance(found), "pairwise": pairwise, "separate": separate}
    table = pd.DataFrame({name: (x / total).tolist() for name, x in shares.items()})
    in_order = (table["share"] <= table["pairwise"] + 1e-9) & (table["pairwise"] <= table["separate"] + 1e-9)
    return table.assign(valid=in_order.astype(float))


def factors_of(layer: Any) -> list[Tensor]:
    """``[head, point, subspace]``: the rotation by each distance, and the queries and keys of all but the first token;
    all of their coordinates are rotated."""
    rotary, length = layer.spec.rotary, layer.q.shape[1]
    q, k = (to_complex(x[0, 1:].double(), rotary)[0].transpose(0, 1) for x in (layer.q, layer.k))
    angle = rotary.angles(torch.arange(float(length)))
    turns = layer.spec.scale * rotary.attention_factor**2 * torch.polar(torch.ones_like(angle), angle)
    return [turns[None], q, k.repeat_interleave(len(q) // len(k), 0).conj()]


def pairs(factors: list[Tensor], taking_part: tuple[bool, ...]) -> Tensor:
    """``[2, head, c, c']``: both products of three matrices."""
    result = torch.ones(1, dtype=torch.complex128)
    for x, takes_part in zip(factors, taking_part, strict=True):
        mean = x.mean(1, keepdim=True)
        x = x - mean if takes_part else mean
        moments = [torch.einsum("hpc,hpd->hcd", x, y) / x.shape[1] for y in (x.conj(), x)]
        result = result * torch.stack(moments)
    return result


def variance(pairs: Tensor) -> Tensor:
    return pairs.sum((0, 2, 3)).real / 2
