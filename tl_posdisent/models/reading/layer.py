"""One attention layer of a model as the adapters see it: its modules, its configuration and the names of its hooks.

An adapter describes the layers of one kind from configuration and modules. It runs nothing and verifies nothing: every
pass of this package compares the layer's own scores and pattern with the description.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tl_posdisent.models.reading.length_limits import length_limit
from tl_posdisent.models.reading.query_key_hooks import Tap
from tl_posdisent.models.reading.rotations import Tables
from tl_posdisent.models.reading.spec import AttentionSpec, Limits, Taps, masked_below
from tl_posdisent.models.running.model_parts import architecture, dtype_of, hook_name

ORDER: tuple[str, ...] = ("q", "k", "v", "gate", "q_rot", "k_rot")
"""The hooks of vectors, in the order in which they fire in most models."""

BIASED = "its scores are not scale * <q, k>: they hold an additive bias such as ALiBi"
BY_HEAD = "its scores are not scale * <q, k> of one rotation: its heads rotate by frequencies of their own"


@dataclass(frozen=True)
class Layer:
    """A layer with attention.

    Attributes:
        model: the model.
        number: index of the layer.
        points: the model's hook points by name.
        tables: of rotations that were read in other layers of the model.
    """

    model: Any
    number: int
    points: Mapping[str, Any]
    tables: Tables

    @property
    def attn(self) -> Any:
        """The attention of TransformerLens."""
        return self.model.blocks[self.number].attn

    @property
    def original(self) -> Any:
        """The attention of Hugging Face that a bridge wraps; None in other models."""
        wrapped = getattr(self.attn, "original_component", None)
        return getattr(wrapped, "self", wrapped)  # BERT's is inside another module

    @property
    def n_kv_heads(self) -> int:
        """Number of key heads, from TransformerLens's configuration."""
        return getattr(self.model.cfg, "n_key_value_heads", None) or int(self.model.cfg.n_heads)

    @property
    def d_head(self) -> int:
        """Head size, from Hugging Face's module, or else from TransformerLens's configuration."""
        return int(getattr(self.original, "head_dim", None) or self.model.cfg.d_head)

    def name(self, short: str) -> str | None:
        """Return the full name of a hook, given its short one, or None if the layer does not have it."""
        full = hook_name(self.number, short)
        return full if full in self.points else None

    def tap(self, short: str, n_heads: int, layout: Any = "pos head", **more: Any) -> Tap:
        """Return the hook of vectors in this layer."""
        return Tap(hook_name(self.number, short), layout, n_heads, **more)

    def taps(self, **vectors: Any) -> Taps:
        """Return the hooks of a layer that shows its scores."""
        scores, pattern, z = (self.name(f"hook_{which}") for which in ("attn_scores", "pattern", "z"))
        return replace(Taps(scores=scores, pattern=pattern, z=z), **vectors)

    def spec(
        self, taps: Taps, *, problem: str | None = None, order: Sequence[str] = ORDER, **facts: Any
    ) -> AttentionSpec:
        """Return the description of the layer, given its hooks, the order in which they fire and what it computes."""
        limits = Limits(
            problem=problem,
            masked_below=masked_below(dtype_of(self.model)),
            holds_to=length_limit(self.model, self.number),
        )
        sizes = {"n_heads": self.model.cfg.n_heads, "n_kv_heads": self.n_kv_heads, "d_head": self.d_head}
        sinks = getattr(self.original or self.attn, "sinks", None)
        return AttentionSpec(
            **(sizes | facts),
            sinks=None if sinks is None else sinks.detach(),
            layer=self.number,
            architecture=architecture(self.model),
            taps=taps,
            limits=limits,
            points={name: self.points[name] for name in self._in_order(taps, order)},
        )

    def _in_order(self, taps: Taps, order: Sequence[str]) -> list[str]:
        """Return the names of hooks in the order in which they fire."""
        if taps.keys_of is not None:  # an earlier layer lends its keys and values
            order = ("k", "v", "q")
        vectors = [tap for which in order if (tap := getattr(taps, which)) is not None]
        names = [name for tap in vectors for name in reversed(tap.names)]  # the shared slice of keys comes first
        inside = taps.scores is not None or getattr(self.original, "accepts_pattern_fn", False)
        ends = [taps.scores, taps.pattern, taps.z] if inside else [taps.z, taps.pattern]  # returned behind the result
        return names + [name for name in ends if name]
