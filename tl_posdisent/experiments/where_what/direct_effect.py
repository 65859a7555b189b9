"""What a head writes at one position: its direct effect on the logits, with the final norm's scale frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tl_posdisent.experiments.residual_stream.qk_readout import fit_norm
from tl_posdisent.experiments.residual_stream.stream_sources import stream_sources
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.model_parts import architecture
from tl_posdisent.models.running.partial_forward import hidden


@dataclass(frozen=True, eq=False)
class DirectEffect:
    """What a head adds directly to the logits at one position.

    Attributes:
        logits: change of each token's logit by what the head adds to the residual stream, with the final norm's scale
            of the unmodified run, minus the mean over the vocabulary.
        next_token: id of the next token of the text; None at its last position.
        likely_token: id of the most likely next token by the model.
    """

    logits: Float64[Tensor, " vocab"]
    next_token: int | None
    likely_token: int

    @property
    def raised_token(self) -> int:
        """Id of the token whose logit is raised most."""
        return int(self.logits.argmax())


@torch.no_grad()
def direct_effect(model: Any, ids: Int[Tensor, "1 pos"], layer: int, head: int, position: int) -> DirectEffect:
    """Compute the direct effect of a head's output at one position on the logits there.

    With ``δ = z W_O`` what the head adds to the residual stream x, the final norm ``t · gain ∘ x + b`` with its scale t
    of the unmodified run, and the unembedding, it is ``logits(norm(x)) − logits(norm(x) − t · gain ∘ δ)``: without a
    soft cap of the logits, ``(t · gain ∘ δ) W_U``.

    Raises:
        ValueError: a model whose residual stream is not the sum of its parts, or without a final norm that is linear
            once its scale is frozen.
    """
    rows = torch.tensor([position], device=ids.device)
    sources = stream_sources(model, ids, lambda x: x[0, rows], layer + 1, "the direct effect")
    added = next(x for name, x in sources if name == f"L{layer}H{head}")
    final = getattr(model, "ln_final", None)
    if final is None:
        raise ValueError(f"the direct effect needs the final norm ln_final, which {architecture(model)} lacks")
    last = model.blocks[-1]
    with running(model) as p:
        with p.keeping([last, final]) as kept:
            logits = p.run(ids)
        stream, normed = kept[last], kept[final]
        negative = _normed(p, ids, final, _with_stream(stream, -hidden(stream)))
        scaled = _frozen_norm(model, hidden(stream), normed, negative, added, position)
        without = normed.clone()
        without[0, position] -= scaled.to(without)
        with p.skipping(model.blocks, lambda: stream), p.skipping([final], lambda: without):
            rest = p.run(ids)
    change = (logits[0, position].double() - rest[0, position].double()).cpu()
    following = int(ids[0, position + 1]) if position + 1 < ids.shape[1] else None
    return DirectEffect(change - change.mean(), following, int(logits[0, position].argmax()))


def _with_stream(output: Any, stream: Tensor) -> Any:
    """Return what a block returns, with another residual stream."""
    return type(output)((stream, *output[1:])) if isinstance(output, (tuple, list)) else stream


def _normed(p: Any, ids: Tensor, final: Any, stream: Any) -> Float[Tensor, "1 pos d_model"]:
    """Return the final norm of another residual stream."""
    with p.skipping(p.model.blocks, lambda: stream), p.keeping([final]) as kept:
        p.run(ids)
    normed: Tensor = kept[final]
    return normed


def _frozen_norm(
    model: Any, x: Tensor, normed: Tensor, negative: Tensor, added: Float64[Tensor, "1 d_model"], position: int
) -> Float64[Tensor, " d_model"]:
    """Apply the final norm to a part of the residual stream, with the scale of one position.

    The norm of the stream and that of its negative differ by twice what is linear in the stream.
    """
    u, v = x.double()[..., None, :], ((normed.double() - negative.double()) / 2)[..., None, :]
    norm = fit_norm(u, v, normed.dtype)
    if norm is None:
        raise ValueError(
            f"the direct effect needs a final norm that is linear once its scale is frozen, but that of "
            f"{architecture(model)} is not"
        )
    return norm.scales(u, v)[0, position] * norm.linear(added.to(u.device)[:, None])[0, 0]
