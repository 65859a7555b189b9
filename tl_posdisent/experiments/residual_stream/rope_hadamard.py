"""Rotary scores as a Hadamard product: in each subspace, a Gram matrix of queries and keys times a Toeplitz kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Complex128, Float64
from torch import Tensor

from tl_posdisent.additive.fit import fit_additive
from tl_posdisent.models.capture import Captured, for_each_layer
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.running.texts import Tokens, read_texts
from tl_posdisent.rope.rotary import Rotary, from_complex, rotate, to_complex
from tl_posdisent.utils.tables import HasTable, index_columns
from tl_posdisent.utils.validation import check_integer
from tl_posdisent.utils.words import plural


@dataclass(frozen=True, eq=False, repr=False)
class RopeHadamard(HasTable):
    """The scores of a rotary layer as ``Σ_c Re(gram_c ∘ kernel_c) + rest``, with ∘ the elementwise product.

    ``gram_c[i, j] = scale · q_ic · conj(k_jc)`` does not depend on positions, ``kernel_c[i, j] = exp(i θ_c (i - j))``
    depends only on them; with ``gram = a + ib``, the real part is ``a ∘ cos(θ_c (i - j)) - b ∘ sin(θ_c (i - j))``. All
    tensors are float64 or complex128.

    Attributes:
        layer: number of the layer.
        rotary: frequencies θ_c and pairing.
        query, key: ``[batch, pos, head, d_head]``, before rotation; the query includes scale and YaRN's factor; one key
            head per query head.
        mask: ``[query, key]``, where a query sees a key. Grams and kernels include cells outside it.
    """

    layer: int
    rotary: Rotary
    query: Float64[Tensor, "batch pos head d_head"]
    key: Float64[Tensor, "batch pos head d_head"]
    mask: Bool[Tensor, "query key"]

    def gram(self, subspace: int) -> Complex128[Tensor, "batch head query key"]:
        """Compute ``scale · q_ic · conj(k_jc)`` for all pairs."""
        c = self._checked(subspace)
        q, k = (to_complex(x, self.rotary)[0][..., c].transpose(1, 2) for x in (self.query, self.key))
        return q[..., :, None] * k[..., None, :].conj()

    def kernel(self, subspace: int) -> Complex128[Tensor, "query key"]:
        """Compute ``exp(i θ_c (i - j))``, with angles rounded as the model rounds them."""
        angle = self.rotary.angles(self._places())[:, self._checked(subspace)]
        return torch.exp(1j * (angle[:, None] - angle))

    def rest(self) -> Float64[Tensor, "batch head query key"]:
        """Compute the part of the scores from coordinates that are not rotated."""
        q, k = (to_complex(x, self.rotary)[1] for x in (self.query, self.key))
        return torch.einsum("bqhd,bkhd->bhqk", q, k)

    def content(self) -> Float64[Tensor, "batch head query key"]:
        """Compute the scores without rotation, as if all pairs were at distance 0: ``Σ_c Re gram_c + rest``."""
        return torch.einsum("bqhd,bkhd->bhqk", self.query, self.key)

    def scores(self) -> Float64[Tensor, "batch head query key"]:
        """Compute the layer's scores before any soft cap, at all cells, also outside the mask."""
        places, plain = self._places(), replace(self.rotary, attention_factor=1.0)
        rotated = (rotate(x, places, plain) for x in (self.query, self.key))
        return torch.einsum("bqhd,bkhd->bhqk", *rotated)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per text and head: ``toeplitz_before`` and ``toeplitz_after`` rotation.

        They are the shares of the variance of ``content()`` and of ``scores()`` inside the mask that are a function of
        the distance (``AdditiveFit.share_distance``).
        """
        both = {"toeplitz_before": self.content(), "toeplitz_after": self.scores()}
        shares = {name: fit_additive(x, mask=self.mask, check=False).share_distance for name, x in both.items()}
        index = index_columns(self.query.shape[:1] + self.query.shape[2:3])
        return pd.DataFrame({**index, **{name: x.flatten().tolist() for name, x in shares.items()}})

    def _places(self) -> Tensor:
        return torch.arange(self.query.shape[1], device=self.query.device)

    def _checked(self, subspace: int) -> int:
        return check_integer("subspace", subspace, 0, len(self.rotary.frequencies) - 1)

    def __repr__(self) -> str:
        texts, length, _, size = self.query.shape
        return (
            f"RopeHadamard of layer {self.layer}: {plural(len(self.rotary.frequencies), 'subspace')} and "
            f"{plural(size - self.rotary.dim, 'coordinate')} without rotation, "
            f"{plural(texts, 'text')} of {plural(length, 'token')}"
        )


def rope_hadamard(model: Any, tokens: Tokens, layer: int, *, attention_mask: Tensor | None = None) -> RopeHadamard:
    """Write a rotary layer's scores as content Gram matrices times Toeplitz kernels (arXiv 2505.13027).

    The scores are compared with the model's own (see ``capture``).

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``; with rotary embeddings.
        tokens: ids ``[batch, pos]``, or text if the model has a tokenizer; texts of equal length.
        layer: 0 … n_layers - 1; negative ones count from the end.
        attention_mask: 1 at tokens, 0 at padding, for padded ids. Texts are run without padding.

    Raises:
        ValueError: invalid arguments; a layer without rotary embeddings; texts of unequal length.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.experiments import rope_hadamard
        >>> form = rope_hadamard(load_demo_model(), demo_tokens(length=64), 3)
        >>> form
        RopeHadamard of layer 3: 8 subspaces and 0 coordinates without rotation, 1 text of 64 tokens
        >>> total = sum((form.gram(c) * form.kernel(c)).real for c in range(8)) + form.rest()
        >>> bool((total - form.scores()).abs().max() < 1e-10)
        True
    """
    reading = read_model(model)
    (spec,) = reading.rotary([layer], "rope_hadamard")
    scale = spec.require_scale()
    tokens = read_texts(reading.model, tokens, attention_mask).one_group("rope_hadamard")
    captured: list[Captured] = []
    for_each_layer(reading.model, tokens, [spec], captured.append, scores=False)
    (seen,) = captured
    rotary = seen.spec.require_rotary("rope_hadamard")  # for this text: some models use other frequencies for long ones
    q, k = scale * seen.q.double(), spec.per_query_head(seen.k).double()
    z, rest = to_complex(q, rotary)
    q = from_complex(rotary.attention_factor**2 * z, rest, rotary)  # YaRN's factor applies only to rotated coordinates
    return RopeHadamard(seen.layer, rotary, q, k, spec.mask(tokens.shape[1], q.device))
