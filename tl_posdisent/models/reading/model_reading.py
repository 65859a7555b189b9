"""Read a model's attention once, keep what was read with the model, and notice when the model changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, SupportsIndex
from weakref import WeakKeyDictionary

import pandas as pd
import torch

from tl_posdisent.models.reading.attributes import architecture
from tl_posdisent.models.reading.model_parts import device_of, modules
from tl_posdisent.models.reading.probe import probe
from tl_posdisent.models.reading.spec import AttentionSpec, n_layers
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.validation import check_flag, check_float64, check_heads, check_indices


@dataclass(frozen=True, eq=False)
class ModelReading:
    """What the attention layers of one model do; every function that takes a model takes it instead.

    Layers are read when they are first asked for. "All layers" are all of the model, whichever were read before.

    Attributes:
        model: the model that was read.
        n_layers: layers of the model.
        without_attention: layers that do not attend (of models that mix attention with other layers). Tables over
            layers name them in ``table.attrs["layers_without_attention"]``.
    """

    model: Any
    n_layers: int
    without_attention: tuple[int, ...]
    read: dict[int, AttentionSpec] = field(repr=False)
    no_results: dict[int, str] = field(repr=False)  # why heads of a layer cannot be ablated; empty if they can
    state: dict[str, Any] = field(repr=False, compare=False)  # addresses and counts, for this process alone

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelReading:
        """Itself: it is of this one model."""
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a ModelReading cannot be pickled: pickle the model, and read it again (read_model)")

    def __repr__(self) -> str:
        return f"ModelReading({len(self.read)} of {self.n_layers} layers of {architecture(self.model)})"

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """One ``AttentionSpec`` for each layer that has attention."""
        return tuple(self.specs())

    def specs(self, layers: int | Iterable[int] | None = None) -> list[AttentionSpec]:
        """The layers asked for, in that order; by default all that have attention. Raises as ``read_model``."""
        attending = [layer for layer in range(self.n_layers) if layer not in self.without_attention]
        picked = attending if layers is None else check_indices("layers", layers, self.n_layers)
        self._refuse_without_attention(picked)
        missing = [layer for layer in picked if layer not in self.read or not self.read[layer].certain]
        if missing:
            _check_unchanged(self)
            for spec in probe(self.model, missing):
                if str(self.read.get(spec.layer)) != str(spec):  # hooks of one reading go together
                    self.read[spec.layer] = spec
        return [self.read[layer] for layer in picked]

    def rotary(self, layers: int | Iterable[int] | None, tool: str) -> list[AttentionSpec]:
        """The layers asked for, by default all that rotate; refuses one whose rotation ``tool`` cannot change."""
        specs = self.specs(layers)
        if layers is None:
            specs = [s for s in specs if s.rotary is not None or s.no_rotation or s.problem] or specs[:1]
        for spec in specs:
            spec.require_rotary(tool)
        return specs

    def heads(self, layers: Any = None, heads: Any = None) -> dict[int, list[int]]:
        """Chosen heads of each chosen layer, layers ascending.

        ``heads`` are None for all heads of these layers; an integer or a list of integers, the same in each of them; or
        labels such as ``"L16H0"`` or pairs ``(layer, head)``. Negative indices count from the end.
        """
        attending = [layer for layer in range(self.n_layers) if layer not in self.without_attention]
        chosen = check_heads(layers, heads, self.n_layers, self.model.cfg.n_heads, default=attending)
        self._refuse_without_attention(list(chosen))
        for spec in self.specs(list(chosen)):
            check_indices("heads", chosen[spec.layer], spec.n_heads)
        return chosen

    def note(self, table: pd.DataFrame) -> pd.DataFrame:
        """Name the layers without attention, if there are any, in the ``attrs`` of a table over layers."""
        if self.without_attention:
            table.attrs["layers_without_attention"] = list(self.without_attention)
        return table

    def _refuse_without_attention(self, layers: list[int]) -> None:
        if bad := sorted(set(layers) & set(self.without_attention)):
            raise ArgumentError(
                "layers",
                f"must have attention, got {bad} of {architecture(self.model)}, which have none: leave out "
                f"{list(self.without_attention)}",
            )


_READINGS: WeakKeyDictionary[Any, tuple[dict[str, Any], dict[int, AttentionSpec], dict[int, str]]] = WeakKeyDictionary()
"""State and findings of each model that was read; it goes with the model. Specs refer to parts of the model at most."""


def read_model(model: Any, layers: int | Iterable[int] | None = None, *, fresh: bool = False) -> ModelReading:
    """Read the attention of a model; the reading is kept with the model until the model changes.

    Nothing is taken from a list of architectures. The model runs three or four times on some ten tokens; rotation,
    scale, mask, grouping and working hooks are what explains its own scores. Dropout and hooks of yours are off
    meanwhile (permanent hooks are not), and the model is left as it was.

    Args:
        model: a HookedTransformer, a TransformerBridge, any model with TransformerLens's hook names, or a
            ``ModelReading``, which is returned after a check that it still describes its model.
        layers: what to read now: None for all that have attention, an integer, or integers; negative ones count from
            the end. Others are read when they are needed.
        fresh: read the model again, whatever was kept. A change of modules, rotary tables, dtype, device, settings,
            attention implementation, grouping of keys or permanent hooks is noticed without it. Other weights need no
            new reading, which holds what the architecture does; ``fresh`` is for changes that none of these shows,
            such as a function of a module that was replaced.

    Returns:
        A ``ModelReading``. What could not be explained is no error here: ``problem`` and ``no_rotation`` of a layer's
        ``AttentionSpec`` say it.

    Raises:
        ValueError: layers out of range, repeated, without attention, or with scores that are NaN or infinite; a model
            without TransformerLens's attention hooks, or a compiled one; a ``ModelReading`` whose model has changed
            since in one of these.

    Example:
        >>> from tl_posdisent import additivity, demo_tokens, load_demo_model, read_model
        >>> reading = read_model(load_demo_model())
        >>> reading
        ModelReading(5 of 5 layers of LlamaForCausalLM)
        >>> spec = reading.specs(0)[0]
        >>> spec.n_heads, spec.n_kv_heads, spec.causal, spec.rotary.pairing, spec.rotary.dim
        (8, 4, True, 'half', 16)
    """
    check_flag("fresh", fresh)
    if isinstance(model, ModelReading) and not fresh:
        _check_unchanged(model)
        reading = model
    else:
        model = model.model if isinstance(model, ModelReading) else model
        n = n_layers(model)
        without = tuple(layer for layer in range(n) if getattr(model.blocks[layer], "attn", None) is None)
        if len(without) == n:
            raise ArgumentError(
                "model",
                f"must have attention layers with TransformerLens's hooks, got {architecture(model)}, none of "
                f"whose {n} blocks has them",
            )
        check_float64("model", device_of(model))
        state, kept = _state(model), _READINGS.get(model)
        if fresh or kept is None or kept[0] != state:
            kept = _READINGS[model] = state, {}, {}
        reading = ModelReading(model, n, without, kept[1], kept[2], state)
    reading.specs(layers)
    return reading


def model_of(model: Any) -> Any:
    """The model itself, given it or its reading; a reading that no longer describes its model is refused."""
    if isinstance(model, ModelReading):
        _check_unchanged(model)
        return model.model
    n_layers(model)
    return model


def _state(model: Any) -> dict[str, Any]:
    """What a reading depends on and a user may change. Of buffers only HookedTransformer's rotary tables are in it:
    other models write some of them over for each text, and whoever acts on a running text compares its tables."""
    parts = modules(model)
    _check_compiled_parts(parts)
    parameters = [p for part in parts for p in part._parameters.values() if p is not None]
    return {
        "dtypes": {p.dtype for p in parameters},
        "device": {p.device for p in parameters},
        "modules": tuple(map(id, parts)),
        "rotary tables": _rotary_tables(parts),
        "attention implementation": _implementations(model),
        "grouping of keys": bool(getattr(model.cfg, "ungroup_grouped_query_attention", False)),
        "settings": _settings(model),
        "permanent hooks": {
            (part.name, handle.hook.id)
            for part in parts
            if "fwd_hooks" in vars(part)  # a hook point; a bridge makes its hook_dict anew, which takes longer
            for handle in vars(part)["fwd_hooks"]
            if handle.is_permanent
        },
    }


def _check_compiled_parts(parts: Sequence[torch.nn.Module]) -> None:
    """Refuse parts that torch has compiled: hooks that are added after their first run do not act in them."""
    for part in parts:
        inside = "_orig_mod" in part._modules or getattr(part, "_compiled_call_impl", None) is not None
        if inside or hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable"):
            of = type(part._modules.get("_orig_mod", part)).__name__
            raise ArgumentError(
                "model",
                f"must not have compiled parts, got a compiled {of}: hooks that are added after its first run "
                "would not act in it. Load the model anew, and do not call torch.compile on its parts",
            )


def _implementations(model: Any) -> set[Any]:
    """What transformers calls eager, sdpa …, of all attention layers; empty for a model of another kind."""
    originals = [getattr(getattr(block, "attn", None), "original_component", None) for block in model.blocks]
    configs = [getattr(original, "config", None) for original in originals]
    return {getattr(config, "_attn_implementation", None) for config in configs if config is not None}


def _settings(model: Any) -> list[Any]:
    """Numbers, flags and words in the model's configurations and attention layers: scales, windows, soft caps …"""
    config = getattr(getattr(model, "original_model", None), "config", None)
    holders = [model.cfg, config, getattr(config, "text_config", None)]
    for block in model.blocks:
        attn = getattr(block, "attn", None)
        holders += [attn, getattr(attn, "original_component", None)]
    return [
        {
            name: x if isinstance(x, (bool, int, float, str)) else repr(x)
            for name, x in vars(each).items()
            if (isinstance(x, (bool, int, float, str)) or name == "rope_parameters")
            and name[0] != "_"  # what modules note for themselves
            and name not in ("training", "use_cache")
        }
        for each in holders
        if each is not None
    ]


def _rotary_tables(parts: Sequence[torch.nn.Module]) -> list[bytes]:
    """Two rows of each of HookedTransformer's tables, which hold all its frequencies; longer tables begin alike."""
    names = ("rotary_sin", "rotary_cos")
    tables = [part._buffers[name] for part in parts for name in names if part._buffers.get(name) is not None]
    by_device: dict[torch.device, list[torch.Tensor]] = {}  # each is waited for once
    for table in tables:
        if table is not None and not table.is_meta:
            by_device.setdefault(table.device, []).append(table[1:3].detach().flatten().double())
    return [torch.cat(rows).cpu().numpy().tobytes() for rows in by_device.values()]


def _check_unchanged(reading: ModelReading) -> None:
    now = _state(reading.model)
    changed = [name for name, before in reading.state.items() if now[name] != before]
    if changed:
        raise ArgumentError(
            "model",
            f"must be as it was when read_model read it, but has changed in {', '.join(changed)}: read it again",
        )


def read_attention(model: Any, layer: int) -> AttentionSpec:
    """Read one layer's attention: rotary, scale, mask, grouping and working hooks (see ``read_model``).

    Args:
        model: as in ``read_model``.
        layer: 0 … n_layers - 1.

    Raises:
        ValueError: what ``read_model`` refuses.

    Example:
        >>> from tl_posdisent import load_demo_model, read_attention
        >>> read_attention(load_demo_model(), 0).rotary.dim
        16
    """
    return read_model(model, [layer]).specs([layer])[0]
