"""Read a model's attention: run it on a few tokens and describe each layer by an ``AttentionSpec``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from tl_posdisent.models.reading.attributes import architecture, attention_implementations
from tl_posdisent.models.reading.explain import probe
from tl_posdisent.models.reading.forward import device_of, modules, points_among
from tl_posdisent.models.reading.spec import AttentionSpec, n_layers
from tl_posdisent.utils.validation import check_heads, check_indices, listed


@dataclass(frozen=True)
class ModelReading:
    """What the attention layers of one model do, read once; every function that takes a model takes it instead.

    Attributes:
        model: the model that was read.
        attention: one ``AttentionSpec`` per layer that was read, in the order asked for.
        n_layers: layers of the model, also those that were not read.
        without_attention: layers that do not attend (of models that mix attention with other layers). Tables over
            layers name them in ``table.attrs["layers_without_attention"]``.

    Example:
        >>> from tl_posdisent import load_demo_model, read_model
        >>> reading = read_model(load_demo_model())
        >>> reading
        ModelReading(5 of 5 layers of LlamaForCausalLM)
        >>> [spec.scale for spec in reading.specs([0, -1])]
        [0.25, 0.25]
        >>> reading.heads(layers=[3, 4], heads=2)
        {3: [2], 4: [2]}
    """

    model: Any
    attention: tuple[AttentionSpec, ...]
    n_layers: int
    without_attention: tuple[int, ...]
    state: dict[str, Any] = field(repr=False)

    def __repr__(self) -> str:
        name = self.attention[0].architecture
        return f"ModelReading({len(self.attention)} of {self.n_layers} layers of {name})"

    def specs(self, layers: int | Iterable[int] | None = None) -> list[AttentionSpec]:
        """The layers asked for, in that order; by default all that were read.

        Raises:
            ValueError: layers out of range, repeated, without attention, or not read.
        """
        if layers is None:
            return list(self.attention)
        read = {spec.layer: spec for spec in self.attention}
        picked = check_indices("layers", layers, self.n_layers)
        for layer in picked:
            self._require_read(layer, read)
        return [read[layer] for layer in picked]

    def rotary(self, layers: int | Iterable[int] | None, tool: str) -> list[AttentionSpec]:
        """The layers asked for, in each of which ``tool`` must find a rotation that it can change.

        By default all that rotate: some models leave positions out of some layers.

        Raises:
            ValueError: as ``specs``; a layer without such a rotation.
        """
        specs = self.specs(layers)
        if layers is None:
            specs = [s for s in specs if s.rotary is not None or s.no_rotation or s.problem] or specs[:1]
        for spec in specs:
            spec.require_rotary(tool)
        return specs

    def heads(self, layers: Any = None, heads: Any = None) -> dict[int, list[int]]:
        """Chosen heads of each chosen layer, layers ascending.

        Args:
            layers: None for all layers that were read, an integer, or integers.
            heads: None for all heads of these layers; an integer or integers, the same in each of them; or pairs
                ``(layer, head)``. Negative indices count from the end.

        Raises:
            ValueError: indices out of range or repeated, layers without attention or not read.
        """
        read = {spec.layer: spec for spec in self.attention}
        n_heads = max(spec.n_heads for spec in self.attention)
        chosen = check_heads(layers, heads, self.n_layers, n_heads, default=read)
        for layer, some in chosen.items():
            self._require_read(layer, read)
            check_indices("heads", some, read[layer].n_heads)
        return chosen

    def note(self, table: pd.DataFrame) -> pd.DataFrame:
        """Name the layers without attention, if there are any, in the ``attrs`` of a table over layers."""
        if self.without_attention:
            table.attrs["layers_without_attention"] = list(self.without_attention)
        return table

    def _require_read(self, layer: int, read: dict[int, AttentionSpec]) -> None:
        if layer in read:
            return
        if layer in self.without_attention:
            raise ValueError(
                f"layers must have attention, got layer {layer} of {self.attention[0].architecture}, which has none: "
                f"leave out {list(self.without_attention)}"
            )
        raise ValueError(f"layers must be among those read, {sorted(read)}, got {layer}: call read_model for it")


def read_model(model: Any, layers: int | Iterable[int] | None = None) -> ModelReading:
    """Read the attention of a model once, to be passed to other functions in the model's place.

    Nothing is taken from a list of architectures. The model runs three or four times on some ten tokens; rotation,
    scale, mask, grouping and working hooks are what explains its own scores. Dropout and hooks of yours are off
    meanwhile (permanent hooks are not), and the model is left as it was.

    Args:
        model: a HookedTransformer, a TransformerBridge, any model with TransformerLens's hook names, or a
            ``ModelReading``, which is returned after a check that it still describes its model.
        layers: None for all that have attention, an integer, or integers; negative ones count from the end.

    Returns:
        A ``ModelReading``. What could not be explained is no error here: ``problem`` and ``no_rotation`` of a layer's
        ``AttentionSpec`` say it.

    Raises:
        ValueError: layers out of range, repeated or without attention; a model without TransformerLens's attention
            hooks, or a compiled one; a reading whose model has changed since in dtype, device, attention
            implementation, grouping of keys or permanent hooks, or that lacks the layers asked for.

    Example:
        >>> from tl_posdisent import additivity, demo_tokens, load_demo_model, read_model
        >>> reading = read_model(load_demo_model())
        >>> spec = reading.specs(0)[0]
        >>> spec.n_heads, spec.n_kv_heads, spec.causal, spec.rotary.pairing, spec.rotary.dim
        (8, 4, True, 'half', 16)
    """
    if isinstance(model, ModelReading):
        _check_unchanged(model)
        model.specs(layers)
        return model
    n = n_layers(model)
    picked = check_indices("layers", layers, n)
    without = tuple(sorted(set(range(n)) - set(attending_layers(model))))
    if layers is None:
        picked = [layer for layer in picked if layer not in without]
    elif bad := sorted(set(picked) & set(without)):
        raise ValueError(f"layers must have attention, got {bad} of {architecture(model)}, which have none")
    return ModelReading(model, tuple(probe(model, picked)), n, without, _state(model))


def model_of(model: Any) -> Any:
    """The model itself, given it or its reading; a reading that no longer describes its model is refused."""
    return read_model(model).model if isinstance(model, ModelReading) else model


def attending_layers(model: Any) -> list[int]:
    """Layers that have TransformerLens's attention, or a refusal of a model that has none."""
    n = n_layers(model)
    found = [layer for layer in range(n) if getattr(model.blocks[layer], "attn", None) is not None]
    if not found:
        raise ValueError(
            f"model must have attention layers with TransformerLens's hooks, got {architecture(model)}, none of whose "
            f"{n} blocks has them"
        )
    return found


def _state(model: Any) -> dict[str, Any]:
    """What a reading depends on and a user may change."""
    parts = modules(model)
    return {
        "dtypes": {p.dtype for part in parts for p in part._parameters.values() if p is not None},
        "device": device_of(model),
        "attention implementation": attention_implementations(model),
        "grouping of keys": bool(getattr(model.cfg, "ungroup_grouped_query_attention", False)),
        "permanent hooks": {
            (point.name, h.hook.id) for point in points_among(parts) for h in point.fwd_hooks if h.is_permanent
        },
    }


def _check_unchanged(reading: ModelReading) -> None:
    now = _state(reading.model)
    changed = [name for name, before in reading.state.items() if now[name] != before]
    if changed:
        raise ValueError(
            f"model must be as it was when read_model read it, but has changed in {', '.join(changed)}: read it again"
        )


def read_attention(model: Any, layer: int) -> AttentionSpec:
    """Read one layer's attention: rotary, scale, mask, grouping and working hooks (see ``read_model``).

    Args:
        model: a HookedTransformer, a TransformerBridge, any model with TransformerLens's hook names, or its
            ``read_model``.
        layer: 0 … n_layers - 1.

    Returns:
        An ``AttentionSpec``.

    Raises:
        ValueError: what ``read_model`` refuses.

    Example:
        >>> from tl_posdisent import load_demo_model, read_attention
        >>> spec = read_attention(load_demo_model(), 0)
        >>> spec.n_heads, spec.n_kv_heads, spec.causal, spec.rotary.pairing, spec.rotary.dim
        (8, 4, True, 'half', 16)
    """
    return read_layers(model, [layer])[0]


def read_layers(model: Any, layers: int | Iterable[int] | None = None) -> list[AttentionSpec]:
    """Read the attention of several layers in one pass.

    Args:
        model: as in ``read_attention``.
        layers: default all that have attention.

    Returns:
        An ``AttentionSpec`` for each layer, in the order given.

    Raises:
        ValueError: what ``read_model`` refuses.

    Example:
        >>> from tl_posdisent import load_demo_model
        >>> from tl_posdisent.models import read_layers
        >>> [(spec.layer, spec.scale, spec.problem) for spec in read_layers(load_demo_model(), [4, 0])]
        [(4, 0.25, None), (0, 0.25, None)]
    """
    layers = listed(layers)
    return read_model(model, layers).specs(layers)
