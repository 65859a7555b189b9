"""Activation patching of heads: z, queries, keys, values or patterns of a run on other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import pandas as pd
from jaxtyping import Int
from torch import Tensor

from tl_posdisent.hooks.hook_list import Heads, Layers, any_heads, replace_scores
from tl_posdisent.models.reading.forward import Hook, hook_name, run
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.texts import Tokens, read_texts
from tl_posdisent.utils.validation import check_choice

from .metrics import Metric, check_metric
from .runs import HooksOf, effect_table, read_source, units_of

Activation = Literal["z", "q", "k", "v", "pattern"]


def head_patching(
    model: Any,
    tokens: Tokens,
    source: Tokens,
    metric: Metric,
    *,
    attention_mask: Tensor | None = None,
    activation: Activation = "z",
    layers: Layers = None,
    heads: Heads = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Patch the activation of each head at all positions from a run on one text into a run on another.

    The values are those of ``transformer_lens.patching.get_act_patch_attn_head_{out,q,k,v,pattern}_all_pos``, in one
    table, and faster (``head_ablation``). Grouped heads have a row each, with the effect of the key head that they
    read; a pattern is also patched in bridges that leave attention to Hugging Face (GPT-J, GPT-Neo, OPT); hooks without
    an axis of heads (DeepSeek's latent attention) are refused.

    Args:
        model, attention_mask, layers, heads, progress: as in ``head_ablation``; the mask is of both runs.
        tokens: as there: the run that is patched (the *corrupted* run, to restore a clean result).
        source: the run from which activations come, in the shape or of the lengths of ``tokens``.
        metric: as there, but a function of logits and ``source``.
        activation: ``"z"`` (a head's result), ``"q"``, ``"k"``, ``"v"`` (before rotation and norm) or ``"pattern"``.

    Returns:
        One row per layer and head: ``layer``, ``head``; ``source``, ``baseline`` and ``value``, the metric on
        ``source``, on ``tokens``, and with the patch; ``effect``, ``(value - baseline) / (source - baseline)``.

    Raises:
        ValueError: tokens of different shape, or with the same metric; an unknown activation, or one that the model
            does not show by heads; what ``head_ablation`` refuses.

    Example:
        >>> from tl_posdisent import demo_tokens, head_patching, load_demo_model
        >>> model, clean = load_demo_model(), demo_tokens(length=32)
        >>> corrupted = clean.clone()
        >>> corrupted[0, 20] = 5  # another token
        >>> def log_p(logits, tokens):
        ...     return logits[:, 20].log_softmax(-1)[:, tokens[0, 21]]
        >>> table = head_patching(model, corrupted, clean, log_p, layers=[0], progress=False)
        >>> list(table.columns)
        ['layer', 'head', 'source', 'baseline', 'value', 'effect']
    """
    check_choice("activation", activation, get_args(Activation))
    check_metric(metric)
    reading = read_model(model, layers)
    model, chosen = reading.model, any_heads(reading, layers, heads)
    texts = read_texts(model, tokens, attention_mask)
    other = read_source(model, texts, source, attention_mask)

    def hooks_in(spec: AttentionSpec) -> HooksOf:
        held = [_held(model, group.tokens, spec, activation) for group in other.groups]
        return lambda group, some: _hooks(spec, some, held[group], activation)

    # Each layer is checked: a norm of all heads' queries or keys couples heads, and layers may share keys and values.
    options: dict[str, Any] = {"source": (other, [[]] * len(other.groups), "source"), "target": other}
    units = [units_of(spec, some, by_key=activation in ("k", "v")) for spec, some in chosen]
    options["kind"] = lambda spec: (activation, spec.layer if activation in ("q", "k", "v") else None)
    return effect_table(reading, texts, units, hooks_in, metric, **options, progress=progress)


def _hooks(spec: AttentionSpec, heads: Sequence[int], held: Tensor, activation: Activation) -> list[Hook]:
    some = sorted({spec.key_head(head) if activation in ("k", "v") else head for head in heads})
    if activation == "pattern" and not spec.scores_editable:  # as scores of which it is the softmax
        return replace_scores(spec, heads, lambda view: held[:, list(view.heads)].log(), "head_patching")

    def put(x: Tensor, hook: Any) -> Tensor:
        x = x.clone()
        at = (slice(None), some) if activation == "pattern" else (slice(None), slice(None), some)
        x[at] = held[at].to(x.device)
        return x

    return [(hook_name(spec.layer, f"hook_{activation}"), put)]


def _held(model: Any, tokens: Int[Tensor, "batch pos"], spec: AttentionSpec, activation: Activation) -> Tensor:
    """One layer's activation in a run on these tokens."""
    name = hook_name(spec.layer, f"hook_{activation}")
    held: list[Tensor] = []
    n, length = spec.n_kv_heads if activation in ("k", "v") else spec.n_heads, tokens.shape[1]
    # Of a text as long as there are heads, the axes cannot be told apart: then a shorter one is checked.
    for some in [tokens[:, :-1], tokens] if length == n else [tokens]:
        if name in model.hook_dict:
            run(model, some, [(name, lambda x, hook: held.append(x.detach().clone()))], stop=spec.layer + 1)
        if some is not tokens or length != n:
            _check_layout(spec, name, held, some.shape[1], n)
    return held[-1]


def _check_layout(spec: AttentionSpec, name: str, held: Sequence[Tensor], length: int, n: int) -> None:
    """Refuse what has no axis of heads."""
    shape = tuple(held[-1].shape) if held else ()
    if shape[1:] != (n, length, length) if name.endswith("pattern") else shape[1:3] != (length, n):
        missing = f"carries a tensor of shape {shape} on {length} tokens" if shape else "does not fire"
        raise ValueError(
            f"activation must be one that the model shows by heads, but {name} of {spec.architecture} {missing}, and "
            f"there are {n} heads"
        )
