"""The number of parameters of a model."""

from __future__ import annotations

import copy
from typing import Any

import torch


def count_parameters(model: Any) -> int:
    """Count the parameters of a model; tied embeddings count once, even if they are copied.

    For a ``TransformerBridge``, count those of the Hugging Face model that it wraps, as its class creates them from the
    configuration: a bridge may have more, such as copies of joint query-key-value projections and a bias after the
    unembedding. For a ``HookedTransformer``, count its own, including zero biases that it adds, but not folded norms.

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
    """Rebuild, without values, the Hugging Face model that a bridge wraps and has changed; None if there is none."""
    original: Any = getattr(model, "original_model", None)
    config = getattr(original, "config", None)
    if config is None:
        return None
    try:
        with torch.device("meta"):
            made: torch.nn.Module = type(original)(copy.deepcopy(config))
    except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError):
        return None  # the class needs more than a configuration, or cannot be made without values
    return made
