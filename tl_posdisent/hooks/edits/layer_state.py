"""What the steps of a layer leave for later ones in a running pass: vectors, positions, and the text so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from tl_posdisent.hooks.edits.cached_text import Positions, TextSoFar, before_and_now, last_of
from tl_posdisent.hooks.edits.layer_plan import Grouped, LayerPlan, can_rescore
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.kv_cache import WITHOUT_CACHE
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.words import plural


@dataclass(frozen=True)
class Vectors:
    """Vectors ``[batch, pos, head, d_head]`` of a pass: queries and keys before rotation and after any QK-norm, values,
    gates, and results before any edit; ``shared`` holds the keys' rotary slice of latent attention. None until seen."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    gate: Tensor | None = None
    z: Tensor | None = None
    shared: Tensor | None = None


@dataclass
class LayerState:
    """State of one layer in one forward pass.

    Attributes:
        plan: how the edits are done.
        start, continues: as in ``ActivePass``.
        text: what was kept of the text that this pass may continue; once scores or pattern are seen, what is kept for
            the next pass.
        spec: the layer, with the rotation of the running text.
        vectors, positions: of this pass.
        fell_back: whether the scores of all heads with rotation edits are recomputed, since vectors were turned, or
            tables replaced, for other positions than those of the running text, or for another rotation.
        cos: a table of cosines that is not that of the model's rotation as it was read, until that of sines.
        pattern: the pattern of a model that shows no scores.
        fired: the hooks that have fired, in order.
    """

    plan: LayerPlan
    start: int
    continues: bool
    text: TextSoFar
    spec: AttentionSpec
    vectors: Vectors = field(default_factory=Vectors)
    positions: Positions = field(default_factory=Positions)
    fell_back: bool = False
    cos: Tensor | None = None
    pattern: Tensor | None = None
    fired: dict[str, None] = field(default_factory=dict)

    # --- vectors and positions of queries

    @property
    def queries(self) -> Tensor:
        assert self.vectors.q is not None
        return self.vectors.q

    @property
    def texts(self) -> int:
        return 1 if self.vectors.q is None else len(self.vectors.q)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.vectors.q is None else self.vectors.q.dtype

    @property
    def own(self) -> Tensor:
        """The model's own positions of the queries, once they are known."""
        assert self.positions.own is not None
        return self.positions.own

    @property
    def expected(self) -> Tensor:
        """Default positions of the queries: 0, 1, 2 …, or those that continue a cached text."""
        return torch.arange(self.start, self.start + self.queries.shape[1], device=self.queries.device)

    @property
    def cached(self) -> int:
        """Number of keys in the cache that these queries may see: those before a sliding window may be dropped."""
        return self.start if self.spec.window is None else min(self.start, self.spec.window - 1)

    # --- vectors and positions of the last ``n_key`` keys, those in a KV cache included

    def keys(self, n_key: int) -> Tensor:
        """Return unrotated keys, as many as are known."""
        assert self.vectors.k is not None
        return last_of(self.text.keys, self.vectors.k, n_key)

    def values(self, n_key: int) -> Tensor:
        assert self.vectors.v is not None
        return self._whole(last_of(self.text.values, self.vectors.v, n_key), n_key)

    def queries_and_keys(self, heads: Sequence[int], n_key: int) -> tuple[Tensor, Tensor]:
        """Return unrotated queries and keys of some heads, one key head for each query head."""
        k = self._whole(self.keys(n_key), n_key)
        return self.queries[:, :, list(heads)], k[:, :, [self.spec.key_head(h) for h in heads]]

    def _whole(self, x: Tensor, n_key: int) -> Tensor:
        if x.shape[1] != n_key:
            refuse_part(self.spec, (self.own.shape[-1], n_key))
        return x

    def places(self, n_key: int) -> tuple[Tensor, Tensor]:
        """Return the model's own positions of queries and keys."""
        return self.own, before_and_now(self.own, n_key, self.text.positions.own)

    def counts(self, n_key: int) -> tuple[Tensor, Tensor]:
        """Return the indices of queries and keys in their text."""
        counted = self.positions.counted
        assert counted is not None
        return counted, before_and_now(counted, n_key, self.text.positions.counted)

    # --- what is done

    @property
    def rescored(self) -> Grouped:
        """Heads whose scores are recomputed."""
        return self.plan.rotated if self.fell_back else self.plan.rescored

    @property
    def edits_scores(self) -> bool:
        return bool(self.rescored or self.plan.score_edits)

    @property
    def misplaced(self) -> bool:
        """Whether vectors were turned for other positions than the model's, so that their scores are recomputed."""
        return self.fell_back and self.plan.turned_before

    def fall_back(self) -> None:
        """Switch to recomputing the scores of all heads with rotation edits."""
        if not can_rescore(self.spec):
            raise ValueError(
                f"the rotation table of layer {self.spec.layer} is not that of positions 0, 1, 2 …, and its scores "
                "cannot be recomputed: run the model without padding, position_ids or a KV cache"
            )
        self.fell_back = True


def refuse_part(spec: AttentionSpec, size: tuple[int, ...], tool: str = "") -> NoReturn:
    """Refuse a part of a text: ``size`` is its number of queries and of keys."""
    raise ValueError(
        f"{tool}{': ' * bool(tool)}layer {spec.layer} sees {size[0]} queries against {size[1]} keys: {WITHOUT_CACHE}"
    )


def refuse_cache(spec: AttentionSpec, size: tuple[int, ...]) -> NoReturn:
    """Refuse a KV cache that was not filled under the same interventions."""
    raise ValueError(
        f"layer {spec.layer} sees {size[0]} queries against {size[1]} keys, of which the KV cache was not filled under "
        f"these hooks: fill it with use_cache=True and use it in one model.hooks block, or {WITHOUT_CACHE}"
    )


def refuse_start(spec: AttentionSpec, tool: str, row: int, start: int) -> NoReturn:
    """Refuse an edit whose result depends on whether the first keys of a row are padding or hidden otherwise."""
    raise ArgumentError(
        "attention_mask",
        f"hides the first {plural(start, 'key')} of row {row} from all later tokens in layer {spec.layer}, and {tool} "
        "depends on whether they are padding or knocked out, which hooks cannot see: for padding, pass position_ids "
        "that begin at 0 behind it, or, if this model does not show its positions, run the text without it; for "
        "keys that are knocked out, give positions or angles for each slot, or sinks=0",
    )
