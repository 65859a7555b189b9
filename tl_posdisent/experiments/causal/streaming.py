"""Streaming against retrieval: the loss when one head alone sees only the first keys and a window."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tl_posdisent.hooks.ablate import check_reach
from tl_posdisent.hooks.edits.edits import Order, ScoreEdit, View
from tl_posdisent.hooks.hook_list import Heads, Layers, any_heads, layer_hooks
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.texts import Tokens, read_texts
from tl_posdisent.utils.validation import check_integer

from .metrics import Metric, check_metric, next_token_loss
from .runs import HooksOf, effect_table, units_of


def streaming_ablation(
    model: Any,
    tokens: Tokens,
    metric: Metric = next_token_loss,
    *,
    attention_mask: Tensor | None = None,
    sinks: int = 4,
    window: int | None = None,
    layers: Layers = None,
    heads: Heads = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Restrict each head alone to the first keys and a window of the last, and measure the change of a metric.

    A *streaming* head loses nothing; a *retrieval* head looks further back (DuoAttention, arXiv 2410.10819). Query i of
    the head sees key j if ``j < sinks`` or ``i - j < window``, with the scores that it has.

    Args:
        model, tokens, metric, attention_mask, layers, heads, progress: as in ``head_ablation``.
        sinks: keys at the beginning of each text that stay visible.
        window: last keys that stay visible, the query's own included; default a quarter of the longest text.

    Returns:
        One row per layer and head, as of ``head_ablation``.

    Raises:
        ValueError: sinks and a window that hide nothing; a layer whose scores cannot be changed; as there.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.experiments import streaming_ablation
        >>> table = streaming_ablation(load_demo_model(), demo_tokens(length=64), window=8, progress=False)
        >>> len(table), bool(table["effect"].max() > 0.02)
        (40, True)
    """
    check_metric(metric)
    check_integer("sinks", sinks, 0)
    reading = read_model(model, layers)
    model, chosen = reading.model, any_heads(reading, layers, heads)
    texts = read_texts(model, tokens, attention_mask)
    window = max(1, texts.longest // 4) if window is None else check_integer("window", window, 1)
    if sinks + window >= texts.longest:
        raise ValueError(
            f"window and sinks must hide keys, together less than the {texts.longest} tokens of the longest text, got "
            f"{window} and {sinks}"
        )
    check_reach(model, [spec.layer for spec, _ in chosen])

    def hide(view: View) -> Tensor:
        scores = view.scores()
        at = torch.arange(scores.shape[-1], device=scores.device)
        visible = (at < sinks) | ((at[:, None] - at).abs() < window)
        return scores.masked_fill(~visible, -torch.inf)

    edit = ScoreEdit("streaming_ablation", hide, Order.HIDE, scores=True)
    units = [units_of(spec, some) for spec, some in chosen]

    def hooks_in(spec: AttentionSpec) -> HooksOf:
        return lambda group, some: layer_hooks(spec, some, edit)

    return effect_table(reading, texts, units, hooks_in, metric, kind=lambda spec: "streaming", progress=progress)
