"""Attention outputs (``hook_z``) of some layers, their distance from a reference sample, and their projection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tl_posdisent.hooks.applied import applied
from tl_posdisent.models.longer_context import longer_context
from tl_posdisent.models.reading.forward_pass import Hook, running
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.texts import Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.restoring import without_gradients
from tl_posdisent.utils.validation import check_integer


@dataclass(frozen=True, eq=False, repr=False)
class ReferenceSample:
    """A sample of vectors as a Gaussian: its mean, and its covariance shrunk towards a multiple of the identity.

    The covariance of n vectors, ``S = Σ (x - mean)(x - mean)ᵀ / n``, is replaced by ``(1 - ρ) S + ρ μ I`` with
    ``μ = tr S / d`` and the ρ of Ledoit and Wolf (J. Multivariate Anal. 88, 2004).

    Attributes:
        axes, spread: eigenvectors (in columns) and eigenvalues of S.
        shrinkage: ρ, from 0 to 1.
        sample: the deviations from the mean along the axes.
    """

    mean: Float64[Tensor, "*batch d"]
    axes: Float64[Tensor, "*batch d d"]
    spread: Float64[Tensor, "*batch d"]
    shrinkage: Float64[Tensor, "*batch"]
    sample: Float64[Tensor, "*batch n d"]

    def distance(self, x: Float[Tensor, "*batch m d"]) -> Float64[Tensor, "*batch m"]:
        """Mahalanobis distance of each vector from the mean."""
        deviation = (x.double() - self.mean[..., None, :]) @ self.axes
        return (deviation**2 / self._variances(1.0)[..., None, :]).sum(-1).sqrt()

    def distance_without(self, x: Float[Tensor, "*batch m d"], member: Int[Tensor, "m"]) -> Float64[Tensor, "*batch m"]:
        """The distance of each vector if one member of the sample had been left out (its own place, for instance).

        A member is nearer to a sample with itself in it: compare members and strangers by this. A rank-one update of
        mean and covariance; ρ and μ are kept.
        """
        n = self.sample.shape[-2]
        left = self.sample[..., member, :]
        deviation = (x.double() - self.mean[..., None, :]) @ self.axes + left / (n - 1)
        # Without the member the covariance is n/(n-1) S - n/(n-1)² uuᵀ, with u its deviation (Sherman–Morrison).
        inverse = 1 / self._variances(n / (n - 1))[..., None, :]
        weight = (1 - self.shrinkage)[..., None] * n / (n - 1) ** 2
        own, cross, plain = (
            (a * b * inverse).sum(-1) for a, b in ((left, left), (left, deviation), (deviation, deviation))
        )
        return (plain + weight * cross**2 / (1 - weight * own)).clamp_min(0).sqrt()

    def _variances(self, factor: float) -> Tensor:
        """Of the shrunk covariance along the axes; ``factor`` multiplies S before it is shrunk."""
        shrinkage = self.shrinkage[..., None]
        level = self.spread.mean(-1, keepdim=True)
        # From a sample that does not vary, every other vector is infinitely far, and no distance is NaN.
        return ((1 - shrinkage) * factor * self.spread + shrinkage * level).clamp_min(1e-200)


def fit_reference(x: Float[Tensor, "*batch n d"]) -> ReferenceSample:
    """Mean and shrunk covariance of n ≥ 2 vectors, for each leading index."""
    if x.ndim < 2 or x.shape[-2] < 2 or not bool(x.isfinite().all()):
        what = "some that are not finite" if x.ndim >= 2 and x.shape[-2] >= 2 else f"shape {tuple(x.shape)}"
        raise ArgumentError("x", f"must be at least two finite vectors (vector, coordinate), got {what}")
    mean = x.double().mean(-2)
    centred = x.double() - mean[..., None, :]
    n, d = centred.shape[-2:]
    covariance = centred.mT @ centred / n
    identity = torch.eye(d, dtype=torch.float64, device=x.device)
    level = covariance.diagonal(0, -2, -1).mean(-1)
    off = (covariance - level[..., None, None] * identity).square().sum((-2, -1))
    noise = (centred.square().sum(-1).square().mean(-1) - covariance.square().sum((-2, -1))) / n
    shrinkage = torch.where(off > 0, (noise / off).clamp(0, 1), 1.0)
    spread, axes = torch.linalg.eigh(covariance)
    return ReferenceSample(mean, axes, spread.clamp_min(0), shrinkage, centred @ axes)


def for_each_output(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    specs: Sequence[AttentionSpec],
    function: Callable[[int, Float[Tensor, "batch pos head d_head"]], None],
    hooks: Sequence[Hook] = (),
) -> None:
    """Run the model once, under these hooks, and call ``function`` with the number and z of each of these layers.

    Raises:
        ValueError: a layer without ``hook_z``; outputs that are not finite.
    """

    def listener(spec: AttentionSpec) -> Hook:
        def listen(z: Tensor, hook: Any) -> None:
            require_finite(z, spec.layer)
            function(spec.layer, z.detach())

        if spec.z is None:
            raise ValueError(f"layer {spec.layer} of {spec.architecture} shows no hook_z")
        return spec.z, listen

    last = max(spec.layer for spec in specs) + 1
    with applied(model, list(hooks)), running(model) as p:
        p.run(tokens, [listener(spec) for spec in specs], stop=None if hooks else last)  # hooks may act later


def require_finite(z: Tensor, layer: int) -> None:
    if not bool(torch.isfinite(z).all()):
        raise ValueError(f"the attention outputs of layer {layer} are not finite")


def output_projection(
    model: Any,
    tokens: Tokens,
    hooks: Sequence[Hook] | None = None,
    *,
    attention_mask: Tensor | None = None,
    in_range: int | None = None,
    start: int = 0,
    layers: int | Iterable[int] | None = None,
) -> pd.DataFrame:
    """Project the attention outputs of each layer on the principal components of those within the training length.

    The picture of arXiv 2503.13305, §6. An output is ``z`` of all heads of a layer side by side, at one position. The
    reference is the outputs at positions ``start … in_range - 1`` of the same texts, read in a pass that ends there,
    without ``hooks``; each coordinate is in standard deviations of the reference from its mean.

    Args:
        model, attention_mask: as in ``head_ablation``.
        tokens: as there; each text is read up to the length of the shortest.
        hooks: an intervention on the pass that is projected, such as ``lambda_mask``. Default none.
        in_range: the length of the training texts; default that of the texts.
        start: the first position that counts.
        layers: default all.

    Returns:
        One row per layer, text and position from ``start``: ``layer``, ``text``, ``pos``, ``in_range`` (whether the
        position is), and ``pc1`` and ``pc2``. The sign of a component is such that its largest weight is positive.
        ``table.attrs["explained"]`` has the share of the reference's variance of each component, by layer.

    Raises:
        ValueError: unusable arguments; a layer without ``hook_z``; outputs that are not finite, or that do not vary
            within range; a model that cannot read so far (``longer_context``).

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.experiments import output_projection
        >>> model, tokens = load_demo_model(), demo_tokens(length=600)
        >>> table = output_projection(model, tokens, in_range=512, start=64, layers=[4])
        >>> table.columns.tolist()
        ['layer', 'text', 'pos', 'in_range', 'pc1', 'pc2']
        >>> table[table["in_range"]][["pc1", "pc2"]].std(ddof=0).round(3).tolist()
        [1.0, 1.0]
    """
    reading = read_model(model)
    model, specs = reading.model, reading.specs(layers)
    batch = read_texts(model, tokens, attention_mask)
    length = min(batch.lengths)
    check_integer("start", start, 0, length - 3)
    end = check_integer("in_range", length if in_range is None else in_range, start + 3, length)
    texts = batch.unpadded()
    read = torch.stack([text[:length] for text in texts])
    with without_gradients(), longer_context(reading, length):
        reference = _outputs(model, read[:, :end], specs, [])
        outputs = _outputs(model, read, specs, list(hooks or []))
    tables, explained = [], {}
    texts_at, pos = np.indices((len(texts), length - start)).reshape(2, -1)
    for spec in specs:
        x = reference[spec.layer][:, start:].flatten(0, 1)
        mean = x.mean(0)
        _, spread, axes = torch.linalg.svd(x - mean, full_matrices=False)
        variances, axes = spread.square() / len(x), axes[:2]
        if not bool(variances[1] > 1e-20 * variances.sum().clamp_min(1e-200)):
            raise ValueError(f"the attention outputs of layer {spec.layer} must vary in range along two components")
        largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
        scaled = axes * largest.sign() / variances[:2, None].sqrt()
        points = ((outputs[spec.layer][:, start:] - mean) @ scaled.T).flatten(0, 1).cpu()
        where = {"layer": spec.layer, "text": texts_at, "pos": start + pos, "in_range": start + pos < end}
        tables.append(pd.DataFrame(where | {f"pc{n + 1}": points[:, n].numpy() for n in range(2)}))
        explained[spec.layer] = (variances[:2] / variances.sum()).tolist()
    found = reading.note(pd.concat(tables, ignore_index=True))
    found.attrs["explained"] = explained
    return found


def _outputs(
    model: Any, tokens: Tensor, specs: list[AttentionSpec], hooks: list[Hook]
) -> dict[int, Float[Tensor, "batch pos coordinate"]]:
    found: dict[int, Tensor] = {}
    for_each_output(model, tokens, specs, lambda layer, z: found.update({layer: z.flatten(2).double()}), hooks)
    return found
