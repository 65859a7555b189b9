"""Running a model with hooks for a look, and leaving it as it was."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

Hook = tuple[str, Callable[..., Any]]
"""What ``model.hooks(fwd_hooks=[...])`` takes: a hook's name and a function of ``(tensor, hook)``."""


def hook_name(layer: int, short: str) -> str:
    """Full name of an attention hook: ``hook_name(3, "hook_q")`` is ``"blocks.3.attn.hook_q"``."""
    return f"blocks.{layer}.attn.{short}"


def device_of(model: Any) -> torch.device:
    """Where the model takes its tokens."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def run(model: Any, tokens: Int[Tensor, "batch pos"], hooks: list[Hook], *, stop: int | None = None) -> Any:
    """One forward pass without gradients, with hooks for its duration; the layers from ``stop`` on are left out."""
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        if stop is None:
            return model(tokens)
        return model(tokens, stop_at_layer=stop)


@contextlib.contextmanager
def at_rest(model: Any) -> Iterator[None]:
    """Evaluation mode for the duration, and silence about edits that have no effect (that is being found out)."""
    training = [m for m in model.modules() if m.training]
    try:
        for m in training:
            m.training = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*edit is discarded.*")
            warnings.filterwarnings("ignore", message=".*gated.*")
            yield
    finally:
        for m in training:
            m.training = True


def check_tokens(model: Any, tokens: Any) -> Int[Tensor, "batch pos"]:
    """Token ids on the model's device, from ids or from text.

    Raises:
        ValueError: not text, nor integers of shape ``(pos,)`` or ``(batch, pos)`` within the vocabulary; fewer than
            two positions.
    """
    if isinstance(tokens, str) or (isinstance(tokens, list) and all(isinstance(t, str) for t in tokens)):
        if getattr(model, "tokenizer", None) is None:
            raise ValueError("tokens were given as text, but the model has no tokenizer: pass token ids")
        tokens = model.to_tokens(tokens)
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.is_complex():
        kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"tokens must be text or an integer tensor of shape (batch, pos), got {kind}")
    if tokens.dtype == torch.bool or tokens.ndim not in (1, 2) or tokens.numel() == 0 or tokens.shape[-1] < 2:
        raise ValueError(
            "tokens must have shape (pos,) or (batch, pos) with at least two positions, got "
            f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        )
    vocabulary = getattr(model.cfg, "d_vocab", None)
    if isinstance(vocabulary, int) and vocabulary > 0 and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise ValueError(
            f"tokens must be ids from 0 to {vocabulary - 1}, got {int(tokens.min())} … {int(tokens.max())}"
        )
    return (tokens if tokens.ndim == 2 else tokens[None]).to(device_of(model))
