"""Read a model's attention, as a value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import nan
from typing import Any, Literal

import pandas as pd

from tl_posdisent.models.reading.bridged_attention import BRIDGED, bridged_attention
from tl_posdisent.models.reading.hidden_scores import hidden_scores
from tl_posdisent.models.reading.hooked_attention import hooked_attention
from tl_posdisent.models.reading.hugging_face import kinds_of
from tl_posdisent.models.reading.latent_attention import LATENT, latent_attention
from tl_posdisent.models.reading.layer import Layer
from tl_posdisent.models.reading.rotations import Tables
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.model_parts import architecture, check_weights, n_layers, user_hooks
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tables import HasTable
from tl_posdisent.utils.validation import check_heads, check_indices, shown

Layers = int | Iterable[int] | Literal["global", "local"] | None
"""None for all layers; an integer, or integers, of which negative ones count from the end; ``"local"`` for the layers
with a sliding window, ``"global"`` for the others with attention.
"""


@dataclass(frozen=True, eq=False)
class ModelReading(HasTable):
    """What the attention layers of one model do; every function that takes a model accepts a reading instead.

    Attributes:
        model: the model that was read.
        n_layers: number of layers of the model.
        attention: an ``AttentionSpec`` for each layer with attention.
    """

    model: Any
    n_layers: int
    attention: tuple[AttentionSpec, ...] = field(repr=False)

    def __repr__(self) -> str:
        return f"ModelReading({len(self.attention)} of {self.n_layers} layers of {architecture(self.model)})"

    def to_frame(self) -> pd.DataFrame:
        """Return one row per layer with attention: what it does, and which tools act.

        Columns: ``layer``; ``attention`` (``"local"`` with a sliding window, else ``"global"``) and ``window``, the
        number of keys that a query sees; ``causal``; ``n_heads``, ``n_kv_heads``, ``d_head``; ``rotated``, the number
        of rotated dimensions of a query (0 without RoPE), and the ``base`` of their frequencies (NaN if they are not
        powers of one); ``scale`` and ``soft_cap``. Missing values are NA.

        Then, True or False for each group of tools, whether it acts on the layer: ``fits`` of its scores
        (``additivity``); ``capture`` of its queries and keys; ``rotation``: interventions on positions, distances,
        frequencies and phases, ``controlled_distance``, ``position_patching``, ``patch_vectors``; ``score_edits``:
        ``substitute_additive``, ``drop_component``, ``component_patching``; ``result_edits``: ``ablate_heads``,
        ``head_ablation``, ``head_patching``. ``why_not`` says why the others do not; it is empty if all act. A tool of
        a group that does not act on a layer raises a ``ValueError`` there.

        Each tool also compares the scores with the reading whenever it runs, so a text can be refused for its padding.
        """
        rows = []
        for spec in self.attention:
            rotary, obstacles = spec.rotary, _obstacles(spec)
            rows.append(
                {
                    "layer": spec.layer,
                    "attention": spec.kind,
                    "window": spec.window,
                    "causal": spec.causal,
                    "n_heads": spec.n_heads,
                    "n_kv_heads": spec.n_kv_heads,
                    "d_head": spec.d_head,
                    "rotated": 0 if rotary is None else 2 * int((rotary.frequencies != 0).sum()),
                    "base": nan if rotary is None else rotary.base,
                    "scale": spec.scale,
                    "soft_cap": spec.soft_cap,
                    **{group: not reason for group, reason in obstacles.items()},
                    "why_not": _why_not(obstacles),
                }
            )
        table = pd.DataFrame(rows).astype({"window": "Int64", "scale": float, "soft_cap": float})
        return self.note(table)

    @property
    def without_attention(self) -> tuple[int, ...]:
        """Layers without attention (in models that mix attention with other layers).

        Tables over layers name them in ``table.attrs["layers_without_attention"]``.
        """
        attending = {spec.layer for spec in self.attention}
        return tuple(layer for layer in range(self.n_layers) if layer not in attending)

    def specs(self, layers: Layers = None) -> list[AttentionSpec]:
        """Return the specs of these layers in the order given.

        Args:
            layers: an integer, or integers, of which negative ones count from the end; ``"local"`` for the layers with
                a sliding window, ``"global"`` for the others; None for all with attention. All functions that take
                layers accept these forms.

        Raises:
            ValueError: layers out of range, repeated or without attention.
        """
        if layers is None:
            return list(self.attention)
        picked = check_indices("layers", self._numbers(layers), self.n_layers)
        self._refuse_without_attention(picked)
        spec_of = {spec.layer: spec for spec in self.attention}
        return [spec_of[layer] for layer in picked]

    def rotary(self, layers: Layers, tool: str) -> list[AttentionSpec]:
        """Return the specs of these layers, by default all with RoPE; raise if ``tool`` cannot change a rotation."""
        specs = self.specs(layers)
        if layers is None:
            specs = [s for s in specs if s.rotary is not None or s.limits.problem] or specs[:1]
        for spec in specs:
            spec.require_rotary(tool)
        return specs

    def heads(self, layers: Any = None, heads: Any = None) -> dict[int, list[int]]:
        """Return the chosen heads of each chosen layer, in ascending order of layers.

        ``heads`` is None for all heads of these layers; an integer or a list of integers for the same heads in each; or
        labels such as ``"L16H0"`` or pairs ``(layer, head)``. Negative indices count from the end.
        """
        attending = [spec.layer for spec in self.attention]
        chosen = check_heads(self._numbers(layers), heads, self.n_layers, self.model.cfg.n_heads, default=attending)
        self._refuse_without_attention(list(chosen))
        for spec in self.specs(list(chosen)):
            check_indices("heads", chosen[spec.layer], spec.n_heads)
        return chosen

    def _numbers(self, layers: Any) -> Any:
        """Return the layers of a kind, given ``"global"`` or ``"local"``; return anything but a string unchanged."""
        if not isinstance(layers, str):
            return layers
        if layers not in ("global", "local"):
            raise ArgumentError("layers", f'must be integers, "global" or "local", got {shown(layers)}')
        found = [spec.layer for spec in self.attention if spec.kind == layers]
        if not found:
            other = "local" if layers == "global" else "global"
            has = "a sliding window" if layers == "local" else "no sliding window"
            raise ArgumentError(
                "layers",
                f'must be "{other}" or integers for {architecture(self.model)}, of which no layer has {has}, '
                f"got {shown(layers)}",
            )
        return found

    def note(self, table: pd.DataFrame) -> pd.DataFrame:
        """Record what else a reader of a table over layers has to know in its ``attrs``.

        ``"layers_without_attention"``, if there are any, and ``"hooks"``, the names of hook points with hooks of the
        user's, under which it was measured.
        """
        if self.without_attention:
            table.attrs["layers_without_attention"] = list(self.without_attention)
        if names := user_hooks(self.model):
            table.attrs["hooks"] = names
        return table

    def _refuse_without_attention(self, layers: list[int]) -> None:
        if bad := sorted(set(layers) & set(self.without_attention)):
            raise ArgumentError(
                "layers",
                f"must have attention, got {bad} of {architecture(self.model)}, which have none: leave out "
                f"{list(self.without_attention)}",
            )


def _obstacles(spec: AttentionSpec) -> dict[str, str]:
    """Return for each group of tools why it does not act on a layer, empty if it does."""
    problem = spec.limits.problem or ""
    no_rotation = "it has no rotary position embedding" if spec.rotary is None else ""
    return {
        "fits": "" if spec.taps.scores else problem,
        "capture": problem,
        "rotation": problem or no_rotation,
        "score_edits": spec.why_no_score_edits,
        "result_edits": spec.why_no_result_edits,
    }


def _why_not(obstacles: dict[str, str]) -> str:
    """Write a sentence that names the groups of tools that do not act, with their reason."""
    reasons = [reason for reason in dict.fromkeys(obstacles.values()) if reason]
    groups = [", ".join(group for group, reason in obstacles.items() if reason == of_all) for of_all in reasons]
    return "; ".join(f"{names}: {reason}" for names, reason in zip(groups, reasons, strict=True))


def read_model(model: Any) -> ModelReading:
    """Read the attention of a model's layers.

    Sizes, rotation, scale, mask and names of hooks come from the model's configuration and modules; the model is not
    run. Every pass of this package then compares the model's own scores and pattern with the reading, and is refused
    where they differ. Every function that takes a model reads it first; to read once for many calls, pass the reading
    in its place.

    Args:
        model: a HookedTransformer, a TransformerBridge, any model with TransformerLens's hook names, or a
            ``ModelReading``, which is returned as it is. Changed weights need no new reading, since a reading describes
            what the architecture does; another dtype, device or setting does, and so do changed frequencies.

    Returns:
        A ``ModelReading``. A layer that cannot be described raises no error here: ``limits.problem`` of its
        ``AttentionSpec`` gives the reason.

    Raises:
        ValueError: a model without TransformerLens's attention hooks or without weights.

    Example:
        >>> from tl_posdisent import additivity, demo_tokens, load_demo_model, read_model
        >>> reading = read_model(load_demo_model())
        >>> reading
        ModelReading(5 of 5 layers of LlamaForCausalLM)
        >>> spec = reading.specs(0)[0]
        >>> spec.n_heads, spec.n_kv_heads, spec.causal, spec.rotary.pairing, spec.rotary.dim
        (8, 4, True, 'half', 16)
        >>> table = reading.to_frame()
        >>> table[["layer", "attention", "n_heads", "n_kv_heads", "rotated", "rotation"]].head(1).values.tolist()
        [[0, 'global', 8, 4, 16, True]]
        >>> table["why_not"].unique().tolist()  # every tool acts
        ['']
    """
    if isinstance(model, ModelReading):
        return model
    n = n_layers(model)
    check_weights(model)
    _refuse_loops(model)
    attending = [layer for layer in range(n) if getattr(model.blocks[layer], "attn", None) is not None]
    points, tables = model.hook_dict, Tables()
    layers = [Layer(model, layer, points, tables) for layer in attending]
    if not layers:
        raise ArgumentError(
            "model",
            f"must have attention layers with TransformerLens's hooks, got {architecture(model)}, none of whose {n} "
            "blocks has them",
        )
    return ModelReading(model, n, tuple(_described(layer) for layer in layers))


_LOOPS = ("total_ut_steps", "mean_recurrence")  # how often a pass runs the blocks: Ouro, Raven


def _refuse_loops(model: Any) -> None:
    """Refuse a model that runs a block several times in a pass: a hook or a row of a table has one place for it."""
    config = getattr(getattr(model, "original_model", None), "config", None)
    blocks = [getattr(block, "original_component", block) for block in model.blocks]
    if len({*blocks}) < len(blocks) or any((getattr(config, name, None) or 1) > 1 for name in _LOOPS):
        raise ArgumentError(
            "model",
            f"must run each block once in a pass, got {architecture(model)}, which runs some several times. Models "
            "with such loops are not supported",
        )


def _described(layer: Layer) -> AttentionSpec:
    """Describe a layer by the adapter of its class."""
    if layer.original is None:
        return hooked_attention(layer)
    if LATENT in kinds_of(layer):
        return latent_attention(layer)
    return bridged_attention(layer) if BRIDGED & kinds_of(layer) else hidden_scores(layer)
