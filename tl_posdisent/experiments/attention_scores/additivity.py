"""Three-axis additivity of every head's attention scores on a text (the main measurement of arXiv 2503.13305)."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.additive.cells import Cells, MaskKind, make_cells
from tl_posdisent.experiments.attention_scores.score_controls import ScoreControl, for_each_control
from tl_posdisent.experiments.attention_scores.text_marginals import (
    TextMarginals,
    pooled_columns,
    text_columns,
    text_marginals,
)
from tl_posdisent.hooks.hook_list import Chosen, Heads, any_heads
from tl_posdisent.models.capture import of_heads
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.texts import TextGroup, Texts, Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tables import index_columns, number_heads, with_ends
from tl_posdisent.utils.validation import check_flag, check_integer, check_subset, listed
from tl_posdisent.utils.words import plural


def additivity(
    model: Any,
    tokens: Tokens,
    *,
    attention_mask: Tensor | None = None,
    layers: Layers = None,
    heads: Heads = None,
    mask: MaskKind | Bool[Tensor, "query key"] | None = None,
    sinks: int = 0,
    pool: bool = False,
    controls: Collection[ScoreControl] = (),
    progress: bool = True,
) -> pd.DataFrame:
    """Fit the three-axis model to every head's scores, in one forward pass with one layer's scores in memory.

    The model is ``scores[i, j] ≈ intercept + distance[i - j] + query[i] + key[j]``, for the scores of this text. Hooks
    on the model, such as interventions of this package, act on the scores that are fitted.

    Args:
        model: HookedTransformer, TransformerBridge or a similar model, or its ``read_model``; with any position
            encoding.
        tokens: ids ``[batch, pos]`` or, if the model has a tokenizer, a text or a list of texts of any lengths.
        attention_mask: 1 at tokens, 0 at padding, for padded ids. Each text is run and fitted without its padding.
        layers: default all.
        heads: query heads, as in ``head_ablation``; default all. Only these are fitted.
        mask: which cells count; default each layer's own mask (causal or full, with its sliding window). A boolean mask
            ``[query, key]`` restricts it further.
        sinks: leave this many first keys of each text out of the fit (``fit_additive``).
        pool: fit one distance profile per head to all texts, each text with its own query and key component.
        controls: scores that no head computes, fitted in the same way. Each answers what *r* of the heads is due to:

            * ``"foreign keys"``: the head's queries with the keys of the layer's next key head, or of the model's next
              layer where all heads share one. Is *r* due to queries and keys that belong together, or does it
              suffice that each are concentrated around a mean? In the same pass (one more with a single key head).
        progress: show a progress bar.

    Returns:
        One row per text (unless pooled), layer and head: ``batch``, ``layer``, ``head``, ``r2``, ``r2_adjusted``,
        ``share_query``, ``r``, ``share_distance`` and ``share_key`` (see ``AdditiveFit``): a share is that of the
        scores' variance which a component explains alone. Unless pooled, also ``r_no_distance``, r of the query and key
        component alone, and with two or more texts ``r_held_out``: r with the distance profile that was fitted to the
        *other* texts, and the text's own query and key component; 0 where that profile is worse than a constant.
        Both are NaN where r is. For a text that is longer than all others, it is r over the pairs at a distance that
        another text has, too. Of
        these numbers ``r_held_out`` separates trained from random weights most clearly (docs/results.md): a deep random
        network is nearly additive on one text, too, but not with one profile for all texts.

        With ``controls``, a column ``scores`` after ``head`` (``"own"`` or the control), and as many rows for each.

    Warns:
        UserWarning: texts that are too short for ``r``, which is NaN; repeated texts.

    Raises:
        ValueError: invalid arguments; scores that have no hook and cannot be recomputed from queries and keys; controls
            for a layer whose scores cannot be recomputed, or foreign keys where no other layer has any.

    Example:
        >>> from tl_posdisent import additivity, demo_tokens, load_demo_model
        >>> table = additivity(load_demo_model(), demo_tokens(length=128), progress=False)
        >>> by_layer = table.groupby("layer")["r"].mean()  # 5 layers of 8 heads
        >>> len(table), bool(by_layer[0] < 0.4), bool(by_layer[4] > 0.8)
        (40, True, True)
        >>> beside = additivity(load_demo_model(), demo_tokens(length=128), controls=["foreign keys"], progress=False)
        >>> beside.groupby("scores")["r"].mean().round(2).to_dict()
        {'foreign keys': 0.73, 'own': 0.72}
    """
    check_flag("pool", pool)
    controls = check_subset("controls", controls, get_args(ScoreControl))
    layers = listed("layers", layers)
    reading = read_model(model)
    model, chosen = reading.model, any_heads(reading, layers, heads)
    texts = read_texts(model, tokens, attention_mask)
    check_integer("sinks", sinks, 0, min(texts.lengths) - 2)
    _check_mask(mask, texts.tokens.shape[1])
    if not pool:
        _warn_of_repeated_texts(texts)
    total = (1 + len(controls)) * len(chosen) * len(texts.groups)
    with tqdm(total=total, desc="layers", disable=not progress) as bar:
        sums = [_group_sums(model, texts, group, chosen, mask, sinks, controls, bar) for group in texts.groups]
        tables = {name: _table([parts[name] for parts in sums], chosen, pool) for name in ("own", *controls)}
    _warn_of_exact_fits(tables["own"], texts)
    table = join_controls(tables) if controls else tables["own"]
    last = ["r2", "r2_adjusted", "r_no_distance", "r_held_out", "share_query", "r", "share_distance", "share_key"]
    return reading.note(with_ends(table, (), last))


def _check_mask(mask: Any, length: int) -> None:
    if isinstance(mask, Tensor) and (mask.dtype != torch.bool or mask.shape != (length, length)):
        raise ArgumentError(
            "mask",
            f"must be a boolean tensor of shape (query, key) = {(length, length)}, got {mask.dtype} of shape "
            f"{tuple(mask.shape)}",
        )


def _warn_of_repeated_texts(texts: Texts) -> None:
    if len(torch.cat([texts.tokens, texts.real.long()], 1).unique(dim=0)) < len(texts.tokens):
        warnings.warn(
            "tokens: some texts are the same, so r_held_out of these has the distance profile of the text itself: "
            "leave repeated texts out",
            stacklevel=3,
        )


def _warn_of_exact_fits(table: pd.DataFrame, texts: Texts) -> None:
    """Warn of texts that are too short for r: the model has a coefficient for each pair of query and key."""
    n = int((table["r"].isna() & table["share_key"].notna()).sum())  # scores that do not vary have no shares either
    if n:
        warnings.warn(
            f"tokens: r is NaN in {n} of {len(table)} rows, because the model fits any scores of so few pairs of query "
            f"and key; the shortest text has {plural(min(texts.lengths), 'token')}. Give longer texts: 4 tokens after "
            "the sinks are enough for a causal mask without a window",
            stacklevel=3,
        )


def _group_sums(
    model: Any,
    texts: Texts,
    group: TextGroup,
    chosen: Chosen,
    mask: MaskKind | Tensor | None,
    sinks: int,
    controls: Sequence[ScoreControl],
    bar: Any,
) -> dict[str, dict[int, TextMarginals]]:
    """Compute the marginal sums of each layer's chosen heads and of each control, by name and layer."""
    sums, heads = defaultdict[str, dict[int, TextMarginals]](dict), {spec.layer: numbers for spec, numbers in chosen}

    def add(name: str, spec: AttentionSpec, scores: Tensor) -> None:
        scores = of_heads(scores, heads[spec.layer])
        sums[name][spec.layer] = text_marginals(texts, group.rows, scores, partial(_cells, spec, scores, mask, sinks))
        bar.update()

    for_each_control(controls, model, group.tokens, [spec for spec, _ in chosen], add)
    return sums


def _cells(spec: AttentionSpec, scores: Tensor, mask: MaskKind | Tensor | None, sinks: int, length: int) -> Cells:
    """Return the cells that count in texts of a length: those that the layer sees, and that a mask selects."""
    window = None
    if mask is None:
        mask, window = "causal" if spec.causal else "full", spec.window
    elif isinstance(mask, Tensor):
        mask = mask[:length, :length] & spec.mask(length, mask.device)
    shape = (*scores.shape[:-2], length, length)
    return make_cells(shape, mask, window=window, sinks=sinks, device=scores.device)


def _table(sums: list[dict[int, TextMarginals]], chosen: Chosen, pool: bool) -> pd.DataFrame:
    """Fit the marginal sums of each layer, of texts of each length."""
    tables = []
    for spec, heads in sorted(chosen, key=lambda pair: pair[0].layer):
        parts = [by_layer.pop(spec.layer) for by_layer in sums]
        columns = pooled_columns(parts) if pool else text_columns(parts)
        shape, values = columns["r"].shape, {name: x.flatten().tolist() for name, x in columns.items()}
        table = pd.DataFrame(index_columns((*shape[:-1], 1, shape[-1]), pooled=pool, layers=[spec.layer]) | values)
        tables.append(number_heads(table, heads))
    return pd.concat(tables, ignore_index=True)


def join_controls(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Join the heads' own scores and the controls' in one table, with ``scores`` after ``head``."""
    for name, table in tables.items():
        table.insert(list(table.columns).index("head") + 1, "scores", name)
    return pd.concat(tables.values(), ignore_index=True)
