"""Projection of attention outputs (``hook_z``) on the principal components of those within the training length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.experiments.robustness.attention_outputs import for_each_output
from tl_posdisent.hooks.applied import check_hooks
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import Hook
from tl_posdisent.models.running.texts import Tokens, read_texts
from tl_posdisent.utils.validation import check_integer


def output_projection(
    model: Any,
    tokens: Tokens,
    hooks: Sequence[Hook] | None = None,
    *,
    attention_mask: Tensor | None = None,
    in_range: int | None = None,
    start: int = 0,
    layers: Layers = None,
) -> pd.DataFrame:
    """Project the attention outputs of each layer on the principal components of those within the training length.

    This gives the figure of arXiv 2503.13305, §6. An output is the concatenated ``z`` of all heads of a layer at one
    position. The reference is the outputs at positions ``start … in_range - 1`` of the same texts, in a pass that ends
    there, without ``hooks``. Each coordinate is the deviation from the reference's mean in its standard deviations.

    Args:
        model, attention_mask: as in ``head_ablation``.
        tokens: as there; each text is read up to the length of the shortest.
        hooks: an intervention on the pass that is projected, such as ``lambda_mask``. Default: none.
        in_range: the training length in tokens. Default: the length of the texts.
        start: the first position to include.
        layers: default all.

    Returns:
        One row per layer, text and position from ``start``: ``layer``, ``text``, ``pos``, ``in_range`` (whether the
        position is within the training length), and ``pc1`` and ``pc2``. The sign of a component makes its largest
        weight positive. ``table.attrs["explained"]`` holds the share of the reference's variance that each component
        explains, by layer.

    Raises:
        ValueError: invalid arguments; a layer without ``hook_z``; outputs that are not finite, or that do not vary
            within range; a text that is too long for the model.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.experiments import output_projection
        >>> model, tokens = load_demo_model(n_ctx=600), demo_tokens(length=600)
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
    with torch.no_grad():
        reference = _outputs(model, read[:, :end], specs, [])
        outputs = _outputs(model, read, specs, [] if hooks is None else check_hooks(model, hooks))
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
    table = reading.note(pd.concat(tables, ignore_index=True))
    table.attrs["explained"] = explained
    return table


def _outputs(
    model: Any, tokens: Tensor, specs: list[AttentionSpec], hooks: list[Hook]
) -> dict[int, Float[Tensor, "batch pos coordinate"]]:
    outputs: dict[int, Tensor] = {}
    for_each_output(model, tokens, specs, lambda layer, z: outputs.update({layer: z.flatten(2).double()}), hooks)
    return outputs
