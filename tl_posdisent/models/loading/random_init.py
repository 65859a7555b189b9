"""The random-weights baseline: the same architecture at random initialisation."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tl_posdisent.models.loading.load import bridge_from_hf
from tl_posdisent.models.reading.attributes import table_slots
from tl_posdisent.models.reading.forward import device_of, dtype_of
from tl_posdisent.models.reading.spec import n_layers
from tl_posdisent.utils.validation import check_seeds

_STD = 0.02  # Hugging Face's usual initializer_range, so that both model classes start alike
_DRAWING = threading.Lock()  # torch's random state and default dtype are those of all threads


def random_control(model: Any, seeds: int | Iterable[int] = 1) -> Iterator[Any]:
    """Yield copies of a model with new random weights, one per seed, one in memory at a time.

    Compare every figure of a trained model with this baseline. A TransformerBridge is rebuilt with the initialisation
    of its Hugging Face class; any other model is copied, with weights drawn from N(0, 0.02²), gains of norms set to 1
    and biases to 0. Hooks on the model are not copied; made within ``longer_context``, copies read as long texts.

    Args:
        model: HookedTransformer, TransformerBridge or alike; read, not changed.
        seeds: how many copies (seeds 0, 1 …), or a list of seeds; the global random state is left as it was.

    Yields:
        A model of the same class, device and dtype, in evaluation mode.

    Raises:
        ValueError: seeds that are not integers, repeated, or none; a model that is not TransformerLens's.

    Example:
        >>> from tl_posdisent import additivity, demo_tokens, load_demo_model, random_control
        >>> model, tokens = load_demo_model(), demo_tokens(length=64)
        >>> chance = next(random_control(model))
        >>> r = [additivity(m, tokens, layers=[0], progress=False)["r"].mean() for m in (model, chance)]
        >>> bool(r[0] > r[1])
        True
    """
    n_layers(model)
    original = getattr(model, "original_model", None)
    one = _reinitialised if getattr(original, "config", None) is None else _built_anew
    return (one(model, seed) for seed in check_seeds(seeds))


def _reinitialised(model: Any, seed: int) -> Any:
    fresh = copy.deepcopy(model)
    fresh.reset_hooks()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            last = name.rsplit(".", 1)[-1]
            if last.lstrip("_").startswith("b_") or last in ("b", "bias"):  # grouped keys have `_b_K`
                parameter.zero_()
            elif parameter.ndim == 1 and last in ("w", "weight"):
                parameter.fill_(1.0)
            else:
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
                parameter.copy_(drawn * _STD)
    return fresh.eval()


def _built_anew(model: Any, seed: int) -> Any:
    with _DRAWING:
        state, default = torch.random.get_rng_state(), torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float32)  # in which the weights are drawn
            torch.default_generator.manual_seed(seed)  # of the CPU alone: torch.manual_seed is of all GPUs too
            fresh = type(model.original_model)(copy.deepcopy(model.original_model.config))
            fresh = fresh.to(device_of(model), dtype_of(model.original_model))
            bridge = bridge_from_hf(fresh, tokenizer=getattr(model, "tokenizer", None))
        finally:
            torch.set_default_dtype(default)
            torch.random.set_rng_state(state)
    for block, trained in zip(bridge.blocks, model.blocks, strict=True):  # within longer_context: as long texts
        if hasattr(block, "attn"):
            for slot, longer in zip(table_slots(bridge, block.attn), table_slots(model, trained.attn), strict=True):
                setattr(slot.owner, slot.name, longer.table.clone())
    return bridge
