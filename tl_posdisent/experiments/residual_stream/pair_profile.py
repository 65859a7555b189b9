"""Scores of one query vector and one key vector of the residual stream at every distance, without a text."""

from __future__ import annotations

from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.hooks.hook_list import Heads
from tl_posdisent.models.capture import for_each_layer
from tl_posdisent.models.reading.forward import at_rest, device_of, hooked, run
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.rope.rotary import rotate
from tl_posdisent.rope.variance_decomposition import Numbers, numbers
from tl_posdisent.utils.tables import index_columns
from tl_posdisent.utils.validation import check_flag, is_integer

from .qk_readout import keep, residual_hook

_TOKENS = 512  # of the vocabulary in one text

Vector = Tensor | int | Literal["mean"]


@torch.no_grad()
def pair_profile(
    model: Any,
    layer: int,
    query: Vector,
    key: Vector,
    *,
    distances: Numbers = range(64),
    heads: Heads = None,
    biases: bool = True,
) -> pd.DataFrame:
    """Compute a layer's scores of two vectors of the residual stream at each distance: ``W_Q R(d) W_Kᵀ``.

    Two vectors are put into the residual stream before the layer. With its norms (also a QK-norm) at the scale of each
    vector, ``score[d] = scale · ⟨R(d) q(query), k(key)⟩``: for instance of two tokens, or of the mean embedding, which
    gives the profile that does not depend on a text. The rotation is that of short texts, where a model rotates long
    ones by other frequencies (``AttentionSpec.holds_to``).

    Args:
        model: HookedTransformer, TransformerBridge or alike, or its ``read_model``; with rotary embeddings.
        layer: 0 … n_layers - 1; negative ones count from the end.
        query, key: a vector ``[d_model]`` of the residual stream, such as the direction that a head writes; a token id,
            for its vector before the first block; or ``"mean"``, the mean of these over the vocabulary.
        distances: any finite numbers.
        heads: query heads, integers or pairs ``(layer, head)`` of this layer; default all.
        biases: whether to include the biases of queries and keys and the offset of the norm.

    Returns:
        One row per head and distance: ``layer``, ``head``, ``distance``, ``score`` (before any soft cap).

    Raises:
        ValueError: a layer without rotary embeddings, or whose scores are no products of queries and keys; vectors of
            another shape, token ids out of range, distances that are not finite.

    Example:
        >>> from tl_posdisent import load_demo_model
        >>> from tl_posdisent.experiments import pair_profile
        >>> table = pair_profile(load_demo_model(), 1, "mean", "mean", distances=range(3), heads=[0])
        >>> table["distance"].tolist(), table.columns.tolist()
        ([0.0, 1.0, 2.0], ['layer', 'head', 'distance', 'score'])
    """
    check_flag("biases", biases)
    reading = read_model(model, [layer])
    (spec,) = reading.rotary([layer], "pair_profile")
    scale, rotary, model = spec.require_scale(), spec.require_rotary("pair_profile"), reading.model
    chosen = reading.heads([spec.layer], heads)[spec.layer]
    at = numbers("distances", distances, device_of(model))
    asked, looked_at = (_vector(model, name, x) for name, x in (("query", query), ("key", key)))
    q, k = _vectors(model, spec, asked, looked_at, 1.0)
    if not biases:  # which are the even part
        against = _vectors(model, spec, asked, looked_at, -1.0)
        q, k = (q - against[0]) / 2, (k - against[1]) / 2
    k = k[[spec.key_head(head) for head in chosen]]
    turned = rotate(q[chosen].expand(len(at), -1, -1), at, rotary)
    still = rotate(k[None], at.new_zeros(1), rotary)
    scores = scale * (turned * still).sum(-1)
    index = index_columns((len(chosen),), repeat=len(at))
    index["head"] = [chosen[number] for number in index["head"]]
    columns = {"distance": at.tolist() * len(chosen), "score": scores.T.flatten().tolist()}
    return reading.note(pd.DataFrame({"layer": spec.layer, **index, **columns}))


def _vectors(
    model: Any, spec: AttentionSpec, query: Tensor, key: Tensor, sign: float
) -> tuple[Float64[Tensor, "head d_head"], Float64[Tensor, "kv d_head"]]:
    """A layer's query of one vector and its key of the other, after any QK-norm."""
    found: list[Tensor] = []
    tokens = torch.zeros(2, 2, dtype=torch.int64, device=device_of(model))
    both = sign * torch.stack([query, key])[:, None]

    def put(x: Tensor, hook: Any) -> Tensor:
        return both.to(x).expand_as(x)

    # The first hook is for layers that read their keys from the embedded input.
    names = dict.fromkeys((residual_hook(0), residual_hook(spec.layer)))
    with at_rest(model), hooked(model, [(name, put) for name in names]):
        for_each_layer(model, tokens, [spec], lambda seen: found.extend((seen.q[0, 0], seen.k[1, 0])), scores=False)
    return found[0].double(), found[1].double()


def _vector(model: Any, name: str, given: Any) -> Float64[Tensor, "d_model"]:
    """The vector that an argument stands for; of tokens, the mean of the stream before the first block."""
    size = int(model.cfg.d_model)
    if isinstance(given, Tensor):
        if given.shape != (size,) or not given.is_floating_point() or not bool(given.isfinite().all()):
            raise ValueError(
                f"{name} must be a finite vector of shape (d_model,) = ({size},), a token id or 'mean', got a tensor "
                f"of {given.dtype} and shape {tuple(given.shape)}"
            )
        return given.detach().to(device_of(model)).double()
    vocabulary = int(model.cfg.d_vocab)
    if given != "mean" and not (is_integer(given) and 0 <= given < vocabulary):
        raise ValueError(
            f"{name} must be a vector of shape (d_model,) = ({size},), a token id from 0 to {vocabulary - 1} or "
            f"'mean', got {given!r}"
        )
    ids = torch.arange(vocabulary) if given == "mean" else torch.tensor([int(given)])
    total = torch.zeros((), dtype=torch.float64)
    for part in ids.to(device_of(model)).split(_TOKENS):  # each token at the first position of its own text
        seen: dict[str, Tensor] = {}
        with at_rest(model):
            run(model, part[:, None].expand(-1, 2), [keep(residual_hook(0), seen)], stop=1)
        total = total + seen[residual_hook(0)][:, 0].double().sum(0)
    return total / len(ids)
