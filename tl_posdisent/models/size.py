"""How many numbers a model has learned."""

from __future__ import annotations

import copy
from typing import Any

import torch


def count_parameters(model: Any) -> int:
    """Count the parameters of a model; embeddings that are tied count once, also where they are copied.

    Of a ``TransformerBridge`` they are those of the Hugging Face model that it wraps, as its class makes them of its
    configuration: a bridge may have more, such as copies of joint projections to queries, keys and values, and a bias
    behind the unembedding. Of a ``HookedTransformer`` they are its own, with the biases of 0 that it adds and without
    norms that are folded.

    Example:
        >>> from tl_posdisent import load_demo_model
        >>> from tl_posdisent.models.size import count_parameters
        >>> count_parameters(load_demo_model(backend="bridge"))
        1038720
    """
    made = _made_anew(model)
    own = {id(x): x for x in (made or model).parameters()}
    embed, unembed = (own.get(id(getattr(model, name, None))) for name in ("W_E", "W_U"))
    copied = embed is not None and unembed is not None and torch.equal(embed, unembed.T)
    return sum(x.numel() for x in own.values() if not (copied and x is unembed))


def _made_anew(model: Any) -> torch.nn.Module | None:
    """The Hugging Face model that a bridge wraps and has changed, without values; None where there is none."""
    original: Any = getattr(model, "original_model", None)
    config = getattr(original, "config", None)
    if config is None:
        return None
    try:
        with torch.device("meta"):
            made: torch.nn.Module = type(original)(copy.deepcopy(config))
    except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError):
        return None  # a class that is not made of a configuration alone, or not without values
    return made
