"""The number of parameters of a model."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tl_posdisent.utils.errors import ArgumentError


def count_parameters(model: Any) -> int:
    """Count the parameters of a model; tied embeddings count once, even if they are copied.

    For a ``TransformerBridge``, count those of the Hugging Face model that it wraps, as its class creates them from the
    configuration: a bridge may have more, such as copies of joint query-key-value projections and a bias after the
    unembedding. For a ``HookedTransformer``, count its own, including zero biases that it adds, but not folded norms.

    Raises:
        ValueError: a bridge around a model whose class cannot create it from its configuration alone.

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
    """Build again, without values, the Hugging Face model that a bridge wraps and has changed; None if there is none.

    transformers itself builds models in this way, from a configuration and without values, to load them.
    """
    original: Any = getattr(model, "original_model", None)
    config = getattr(original, "config", None)
    if config is None:
        return None
    try:
        with torch.device("meta"):
            made: torch.nn.Module = type(original)(copy.deepcopy(config))
    except Exception as error:
        raise ArgumentError(
            "model",
            f"must be of a class that builds it from its configuration alone, as transformers does, to count its "
            f"parameters without those that the bridge adds; {type(original).__name__} failed: {error}",
        ) from error
    return made
