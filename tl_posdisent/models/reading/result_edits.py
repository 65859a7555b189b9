"""Find out whether an edit of the output of a layer's heads, at ``hook_z``, reaches the model's output."""

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

    One pass over as many copies of a short text as layers: in each copy, z of one layer is perturbed.
    """
    seen: dict[int, tuple[int, ...]] = {}
    tokens = probe_tokens(model)[:1].expand(len(layers) + 2, -1)  # the first and the last copy are unmodified
    generator = torch.Generator().manual_seed(3)

    def disturb(copy: int, layer: int, z: Tensor, hook: Any) -> Tensor:
        seen[layer] = tuple(z.shape)
        z = z.clone()
        noise = torch.randn(z[copy].shape, dtype=torch.float32, generator=generator, device="cpu").to(z)
        z[copy] += noise * (10 * z.detach().double().square().mean().sqrt().clamp_min(1e-3)).to(z)
        return z

    names = [hook_name(layer, "hook_z") for layer in layers]
    with running(model, bare=True) as p:
        copies = enumerate(zip(names, layers, strict=True), 1)
        edits = [(name, partial(disturb, copy, layer)) for copy, (name, layer) in copies if name in p.points]
        output = p.run(tokens, edits)
    # Not relative to the logits: in 16 bits a late layer may change them by less than the tolerance for rounding.
    changes = (output - output[-1]).masked_fill(output == output[-1], 0).abs().flatten(1).amax(-1)  # also of infinities
    found = dict.fromkeys(layers, "")
    for layer, change in zip(layers, changes[1:-1].tolist(), strict=True):
        n_heads, shape = model.cfg.n_heads, seen.get(layer, ())
        if layer not in seen:
            found[layer] = "hook_z does not fire, so no head can be ablated"
        elif change <= 4 * float(changes[0]):  # as much as copies differ that are the same
            found[layer] = "another z at hook_z does not change the output, so no head can be ablated"
        elif shape[:2] != tokens.shape or prod(shape[2:]) % n_heads:
            layout = ", ".join(("batch", "pos", *map(str, shape[2:])) if shape[:2] == tokens.shape else map(str, shape))
            found[layer] = (
                f"hook_z must carry (batch, pos, {n_heads} heads, d_head) for heads to be ablated, got ({layout})"
            )
    return found
