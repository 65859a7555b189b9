"""Forward passes and memory of a measurement, before it runs."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import pandas as pd

from tl_posdisent.experiments.attention_scores.head_labels import repeated_tokens
from tl_posdisent.experiments.causal.runs import texts_at_once
from tl_posdisent.experiments.passes import NOT_ESTIMATED, TOOLS, Work
from tl_posdisent.hooks.hook_list import Heads
from tl_posdisent.models.reading.memory import free_memory, gigabytes, model_bytes, model_devices
from tl_posdisent.models.reading.model_reading import Layers, model_of, read_model
from tl_posdisent.models.reading.spec import n_layers
from tl_posdisent.rope.moments import NUMBERS_AT_ONCE
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tables import HasTable
from tl_posdisent.utils.validation import check_heads, check_indices, check_integer, shown

Measured = Literal[
    "additivity",
    "controlled_distance",
    "disentanglement",
    "dummy_distance_check",
    "positional_symbolic",
    "preference_flips",
    "subspace_patterns",
    "trained_vs_random",
    "fit_attention",
    "head_labels",
    "intervention_losses",
    "head_ablation",
    "streaming_ablation",
    "position_effects",
    "head_patching",
    "position_patching",
    "component_patching",
    "additive_substitution",
    "attention_ladder",
    "positional_subspace",
    "rope_hadamard",
    "length_generalization",
    "output_projection",
    "perturbation_curve",
]

_WITH_GRADIENTS = ("head_labels", "position_effects")
_ONE_BY_ONE = (  # tools that change heads one by one, several of them in one batch
    *("head_ablation", "streaming_ablation", "head_patching", "position_patching", "component_patching"),
    *("additive_substitution", "attention_ladder", "intervention_losses", *_WITH_GRADIENTS),
)
_SEVERAL_CHANGES = ("additive_substitution", "attention_ladder")  # of each head, in common batches


@dataclass(frozen=True)
class Estimate(HasTable):
    """Forward passes and memory of a measurement.

    Attributes:
        tool, length, batch: as given.
        passes: number of forward passes of all texts through all layers; partial passes count as fractions.
        model_bytes: bytes of parameters and buffers.
        score_bytes: upper bound for the score matrices, patterns and masks of one layer.
        other_bytes: upper bound for activations, logits, and the tool's own sums.
        available_bytes: free memory in addition to the model; None if unknown, in which case everything fits.
        advice: arguments that would fit, if these do not; else empty.
    """

    tool: str
    length: int
    batch: int
    passes: float
    model_bytes: int
    score_bytes: int
    other_bytes: int
    available_bytes: int | None
    advice: str

    @property
    def needed_bytes(self) -> int:
        """Upper bound for the memory in addition to the model."""
        return self.score_bytes + self.other_bytes

    @property
    def fits(self) -> bool:
        """Whether the memory needed in addition to the model is available."""
        return self.available_bytes is None or self.needed_bytes <= self.available_bytes

    def check(self) -> Estimate:
        """Return the estimate, or raise if the measurement does not fit.

        Raises:
            MemoryError: it does not fit; the message gives the needed and the free memory, and arguments that fit.
        """
        if not self.fits:
            raise MemoryError(
                f"{self.tool} of {self.batch}×{self.length} tokens needs up to {gigabytes(self.needed_bytes)} in "
                f"addition to the model, of which {gigabytes(self.score_bytes)} for scores, and "
                f"{gigabytes(self.available_bytes or 0)} are available: use {self.advice}"
            )
        return self

    def to_frame(self) -> pd.DataFrame:
        """Return one row with all attributes, ``needed_bytes`` and ``fits``."""
        return pd.DataFrame([asdict(self) | {"needed_bytes": self.needed_bytes, "fits": self.fits}])

    def __repr__(self) -> str:
        passes = f"{self.passes:g} {'pass' if self.passes == 1 else 'passes'}"
        there = "" if self.available_bytes is None else f" of {gigabytes(self.available_bytes)} available"
        return (
            f"Estimate: {self.tool} of {self.batch}×{self.length} tokens: {passes}\n"
            f"  model {gigabytes(self.model_bytes)}, in addition at most {gigabytes(self.needed_bytes)}{there} (scores "
            f"{gigabytes(self.score_bytes)}): {'fits' if self.fits else f'does not fit: use {self.advice}'}"
        )


def estimate(
    model: Any,
    length: int,
    *,
    batch: int = 1,
    tool: Measured = "additivity",
    layers: Layers = None,
    heads: Heads = None,
    positions: int | Iterable[int] | None = None,
    available: int | None = None,
) -> Estimate:
    """Estimate forward passes and memory of a measurement with its default arguments.

    The memory is an upper bound, computed from shapes (docs/memory_and_time.md). The model may be on ``meta``.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``.
        length: tokens per text, at least 2.
        batch: number of texts that run at once.
        tool: the tool that will run; ``"intervention_losses"`` and ``"position_effects"`` are for one intervention
            (each further one adds a pass, or half a pass); ``"fit_attention"`` is for one layer that ``capture``
            returns; ``"length_generalization"`` and ``"output_projection"`` are for texts of which half is in range.
            Computation outside the passes takes time too: docs/memory_and_time.md lists measured times.
        layers, heads, positions: the choice that the tool will be given, where it takes one; default all layers and
            heads, and all positions together. Of ``layers=`` for a tool that measures one ``layer``, the last counts.
        available: bytes that may be used in addition to the model; default the free memory of the model's device (RAM
            or the limit of the process's control group; memory of the fullest GPU).

    Raises:
        ValueError: invalid arguments. ``estimate(...).check()`` raises ``MemoryError`` if the measurement does not fit.

    Example:
        >>> from tl_posdisent import estimate, load_demo_model
        >>> model = load_demo_model()
        >>> plan = estimate(model, 4096, available=10**9)
        >>> plan.fits, plan.advice  # the length depends on the class of the model
        (False, 'length=..., batch=1')
        >>> estimate(model, 100, tool="position_patching").passes  # 5 layers of 8 heads
        31.2
        >>> estimate(model, 100, tool="head_ablation", layers=[4]).passes  # a fifth of the model for each head
        2.8
    """
    model = model_of(model)
    check_integer("length", length, 2)
    check_integer("batch", batch, 1)
    if isinstance(tool, str) and tool in NOT_ESTIMATED:
        raise ArgumentError("tool", f"must be one whose passes are known, got {tool!r}, which {NOT_ESTIMATED[tool]}")
    if tool not in get_args(Measured):
        raise ArgumentError(
            "tool", f"must be one that the type tl_posdisent.experiments.cost.Measured lists, got {shown(tool)}"
        )
    if available is not None:
        check_integer("available", available, 0)
    for name, given in {"layers": layers, "heads": heads, "positions": positions}.items():
        if given is not None and name not in TOOLS[tool].takes:
            raise ArgumentError(name, f"must be None for {tool}, which takes no {name}, got {shown(given)}")
    if isinstance(layers, str):  # which layers these are, only a reading of the model says
        layers = list(read_model(model).heads(layers))
    chosen = check_heads(layers, heads, n_layers(model), model.cfg.n_heads)
    places = 1 if positions is None else len(check_indices("positions", positions, length))
    devices, weights = model_devices(model), model_bytes(model)
    on_meta = all(device.type == "meta" for device in devices)
    free = free_memory(devices) if available is None else available
    if available is None and on_meta and free is not None:
        free = max(0, free - weights)  # the model is not loaded yet
    scores, other = _memory(model, tool, length, batch, places)
    fits = free is None or scores + other <= free
    copied = repeated_tokens(model, None, 4, 0).numel() if tool == "head_labels" else 0
    work = Work(n_layers(model), chosen, length, batch, places, texts_at_once(model.cfg, length), copied)
    passes = round(float(TOOLS[tool].passes(work)), 2)
    advice = "" if fits or free is None else _advice(model, tool, length, batch, free, places)
    return Estimate(tool, length, batch, passes, weights, scores, other, free, advice)


def _memory(model: Any, tool: str, length: int, batch: int, places: int = 1) -> tuple[int, int]:
    """Compute upper bounds for the bytes of scores, and of everything else except the model."""
    cfg, layers = model.cfg, n_layers(model)
    heads, kv, width = cfg.n_heads, getattr(cfg, "n_key_value_heads", None) or cfg.n_heads, cfg.d_head
    size = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)
    tokens = batch * length
    copies = 3 if size > 2 and hasattr(model, "original_model") else 5
    scores = copies * heads * tokens * length * size
    d_model, d_mlp = getattr(cfg, "d_model", heads * width), getattr(cfg, "d_mlp", None) or 0
    other = tokens * (8 * d_model + 4 * d_mlp + 8 * heads * width) * size
    if tool in ("additivity", "trained_vs_random"):
        at_once = 2**24 if any(device.type == "cuda" for device in model_devices(model)) else 2**18
        other += 3 * 8 * ((layers + 12) * tokens * heads + min(tokens * heads * length, at_once))
    if tool == "fit_attention":
        cells = heads * batch * length**2
        step = min(cells, max(2**20, min(64 * length, 2**22)))
        other += 8 * (3 * step + 30 * heads * tokens + min(cells // 4, 2**26))
    elif tool in _ONE_BY_ONE:
        at_once = 1 if tool == "intervention_losses" else texts_at_once(cfg, length) // batch
        at_once = at_once if tool in _SEVERAL_CHANGES else min(heads * places, at_once)
        runs = 1 + max(1, at_once)  # in one batch, and the unmodified text
        scores, other = runs * scores, runs * other + 24 * tokens * getattr(cfg, "d_vocab", 0)
        other += model_bytes(model) * (tool == "head_labels")  # a random copy
        if tool in _WITH_GRADIENTS:  # what a backward pass needs of every layer, and gradients of five passes
            scores += layers * copies * heads * tokens * length * size
            other += layers * tokens * (16 * d_model + 8 * d_mlp + (8 + 2 * 7) * heads * width) * size
            other += 16 * tokens * getattr(cfg, "d_vocab", 0)
    elif tool != "additivity":
        vectors = min(tokens * heads * width, NUMBERS_AT_ONCE)
        other += 2**26 * (tool == "preference_flips")  # pairs of keys at a time
        other += 8 * (4 * vectors + 2 * (heads + kv) * width * (2 * width + length)) + 6 * tokens * heads * width * size
        if tool in ("positional_symbolic", "trained_vs_random"):  # running moments of 64 keys at a time
            other += 64 * 16 * 8 * kv * width**2
        if tool == "trained_vs_random":
            other += model_bytes(model)
    return scores, other + 2**23 + layers * 2**19  # overhead in addition to tensors, as measured


def _advice(model: Any, tool: str, length: int, batch: int, free: int, places: int) -> str:
    """Find arguments that would fit: fewer texts, then a shorter text."""

    def fits(length: int, batch: int) -> bool:
        return sum(_memory(model, tool, length, batch, places)) <= free

    for texts in range(batch - 1, 0, -1):
        if fits(length, texts):
            return f"batch={texts}"
    longest = 1 + bisect.bisect(range(2, length), False, key=lambda n: not fits(n, 1))
    if longest < 2:
        return "a smaller model, a narrower dtype or another machine: not even two tokens fit"
    return f"length={longest}, batch=1"
