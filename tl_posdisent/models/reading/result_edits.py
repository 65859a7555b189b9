"""Find out whether an edit of the output of a layer's heads, at ``hook_z``, takes effect."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.model_parts import hook_name
from tl_posdisent.models.running.texts import probe_tokens


def why_no_result_edits(model: Any, layers: Sequence[int]) -> dict[int, str]:
    """Return for each layer why its heads cannot be ablated, empty if they can.

    One pass, as far as the last of the layers, over a copy of a short text for each of them. In its copy, z of the
    layer is perturbed, and must change what the layer's block returns.
    """
    if not layers:
        return {}
    seen: dict[int, tuple[int, ...]] = {}
    tokens = probe_tokens(model)[:1].expand(len(layers) + 2, -1)  # the first and the last copy are unmodified
    generator = torch.Generator().manual_seed(3)

    def disturb(copy: int, layer: int, z: Tensor, hook: Any) -> Tensor:
        seen[layer] = tuple(z.shape)
        z = z.clone()
        noise = torch.randn(z[copy].shape, generator=generator).to(z)
        z[copy] += noise * (10 * z.detach().double().square().mean().sqrt().clamp_min(1e-3)).to(z)
        return z

    with running(model, bare=True) as p, p.keeping([model.blocks[layer] for layer in layers]) as outputs:
        copies = [(copy, layer, hook_name(layer, "hook_z")) for copy, layer in enumerate(layers, 1)]
        edits = [(name, partial(disturb, copy, layer)) for copy, layer, name in copies if name in p.points]
        p.run(tokens, edits, stop=max(layers) + 1)
    return {
        layer: _why_not(outputs[model.blocks[layer]], copy, seen.get(layer), tuple(tokens.shape), model.cfg.n_heads)
        for copy, layer, _ in copies
    }


def _why_not(output: Any, copy: int, shape: tuple[int, ...] | None, text: tuple[int, ...], n_heads: int) -> str:
    """Return why a layer's heads cannot be ablated, from its block's output and the shape of its z."""
    if shape is None:
        return "hook_z does not fire, so no head can be ablated"
    residual = output[0] if isinstance(output, (tuple, list)) else output
    changes = (residual - residual[-1]).masked_fill(residual == residual[-1], 0)  # also of infinities
    largest = changes.abs().flatten(1).amax(-1)
    if largest[copy] <= 4 * largest[0]:  # as much as copies differ that are the same
        return "another z at hook_z does not change the output, so no head can be ablated"
    if shape[:2] != text or prod(shape[2:]) % n_heads:
        layout = ", ".join(("batch", "pos", *map(str, shape[2:])) if shape[:2] == text else map(str, shape))
        return f"hook_z must carry (batch, pos, {n_heads} heads, d_head) for heads to be ablated, got ({layout})"
    return ""
