"""The rotation of a layer, from the modules in which a model stores it.

Frequencies are read as they are at this moment, also if they were changed in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tl_posdisent.rope.rotary import Pairing, Rotary, rotary_from_table

_BY_LENGTH = ("dynamic", "longrope")  # types of models that overwrite their frequencies in a pass over a long text


def stored_rotation(model: Any, layer: int, pairing: Pairing = "half", sign: float = 1.0) -> Rotary | None:
    """Return the rotation whose frequencies a Hugging Face model stores for a layer; None if it has no module of them.

    ``sign`` is -1 for a model that rotates the other way.
    """
    module = rotary_module(model, layer)
    if module is None:
        return None
    kinds: Any = getattr(getattr(module, "config", None), "layer_types", None)
    prefix = f"{kinds[layer]}_" if kinds and hasattr(module, f"{kinds[layer]}_inv_freq") else ""
    rope_type: Any = getattr(module, "rope_type", None)
    overwritten = (rope_type[kinds[layer]] if prefix else rope_type) in _BY_LENGTH
    frequencies = getattr(module, prefix + ("original_inv_freq" if overwritten else "inv_freq"))
    factor = float(getattr(module, f"{prefix}attention_scaling", 1.0))
    return Rotary(sign * frequencies.detach().double(), pairing, factor, torch.float32, frequencies.dtype)


def rotary_module(model: Any, layer: int) -> Any:
    """Return the module with the frequencies of a layer: one of its attention, or one of the whole model."""
    original = model.original_model
    decoder = original.get_decoder() if hasattr(original, "get_decoder") else original
    for owner in (model.blocks[layer].attn.original_component, decoder, getattr(decoder, "model", None)):
        if (module := getattr(owner, "rotary_emb", None)) is not None:
            return getattr(module, "original_component", module)
    return None


class Tables:
    """The tables of cosines and sines of one model. Each is read once, since its layers have equal ones."""

    def __init__(self) -> None:
        self._read: list[tuple[Tensor, Tensor, Rotary]] = []

    def rotation(self, cos: Tensor, sin: Tensor, pairing: Pairing) -> Rotary:
        """Return the rotation of a table whose rows are positions 0, 1, 2 …."""
        for other_cos, other_sin, rotary in self._read:
            if cos.device == other_cos.device and torch.equal(cos, other_cos) and torch.equal(sin, other_sin):
                return rotary
        self._read.append((cos, sin, rotary_from_table(cos, sin, pairing=pairing)))
        return self._read[-1][-1]

    def of_gptj(self, model: Any, layer: int) -> Rotary:
        """Return the rotation of GPT-J or CodeGen, which store sines and cosines side by side."""
        shared = getattr(model.original_model.base_model, "rotary_emb", None)  # since transformers 5.24
        owner = model.blocks[layer].attn.original_component if shared is None else shared
        sin, cos = owner.embed_positions.chunk(2, -1)
        return self.rotation(cos, sin, "adjacent")
