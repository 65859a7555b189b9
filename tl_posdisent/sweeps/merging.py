"""Merging tables of a sweep over texts, per model, checkpoint and setting."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.additive.cells import make_cells
from tl_posdisent.additive.fit import fit_marginals
from tl_posdisent.additive.marginals import Marginals, read_marginals
from tl_posdisent.additive.result import AdditiveFit, TablePart
from tl_posdisent.experiments.attention_scores.rotary_layers import measure_layers
from tl_posdisent.models.capture import for_each_scores
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.texts import TextGroup, Tokens, read_texts
from tl_posdisent.rope.covariance import Spread, total
from tl_posdisent.rope.moments import Moments
from tl_posdisent.rope.rotary import Rotary
from tl_posdisent.rope.variance_decomposition import Numbers, decompose

_MODEL = ("model", "checkpoint", "step")
_SETTINGS = ("experiment", "seed", "arguments", "backend", "dtype", "sinks")


def by_setting(table: pd.DataFrame, one: list[str]) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """Groups of rows that may be added up: of one model, checkpoint and setting, in the order of the table.

    Args:
        table: rows of a sweep, or of direct calls, which have no columns for these.
        one: columns of which a job has each combination once.

    Returns:
        Pairs of what names the group (model and checkpoint, and settings of which the table has several) and its rows.

    Raises:
        ValueError: rows of the same job twice.
    """
    if "job" in table and (again := table.duplicated(["job", *one]) & table["job"].notna()).any():
        raise ValueError(f"table must have each job once, got job {table.loc[again, 'job'].iloc[0][:12]}… twice")
    names = [name for name in (*_MODEL, *_SETTINGS) if name in table]
    if not names:
        return [({}, table)]
    kept = [name for name in names if name in _MODEL or len(table[name].unique()) > 1]
    found = table.groupby(names, sort=False, dropna=False)
    return [({name: rows[name].iloc[0] for name in kept}, rows) for _, rows in found]


# Marginal sums of scores


def marginals_by_layer(
    model: Any,
    tokens: Tokens,
    *,
    attention_mask: Tensor | None = None,
    layers: int | Iterable[int] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure all that ``additivity(..., pool=True)`` needs of a text, in a form that texts can be pooled from.

    Args:
        model, tokens, attention_mask, layers, progress: as in ``additivity``. Cells are those of each layer's own mask.

    Returns:
        One row per layer, text and head: ``layer``, ``batch``, ``head``, ``pivot`` (about the mean score), ``squares``
        (sum of squares of ``score - pivot``), ``sums`` (of ``score - pivot`` over the cells of each distance, then each
        query, then each key; float64), ``length``, ``causal``, ``window`` (0: none).

    Raises:
        ValueError: what ``additivity`` refuses.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.sweeps import marginals_by_layer
        >>> table = marginals_by_layer(load_demo_model(), demo_tokens(length=64), layers=[4], progress=False)
        >>> len(table), len(table["sums"][0])
        (8, 192)
    """
    reading = read_model(model, layers)
    specs, texts = reading.specs(layers), read_texts(reading.model, tokens, attention_mask)
    tables: list[pd.DataFrame] = []
    with tqdm(total=len(specs) * len(texts.groups), desc="layers", disable=not progress) as bar:
        for group in texts.groups:

            def measured(spec: AttentionSpec, scores: Tensor, group: TextGroup = group) -> None:
                tables.append(_marginals(spec, scores, group))
                bar.update()

            for_each_scores(reading.model, group.tokens, specs, measured)
    order = {spec.layer: n for n, spec in enumerate(specs)}
    table = pd.concat(tables, ignore_index=True)
    by_layer = table.assign(order=table["layer"].map(order)).sort_values(["order", "batch"], kind="stable")
    return reading.note(by_layer.drop(columns="order").reset_index(drop=True))


def _marginals(spec: AttentionSpec, scores: Float[Tensor, "batch head query key"], group: TextGroup) -> pd.DataFrame:
    """One layer's rows of texts of equal length."""
    causal, window = spec.causal, spec.window
    cells = make_cells(scores.shape, "causal" if causal else "full", window, device=scores.device)
    with torch.no_grad():
        read = read_marginals(scores, cells)
    rows = [
        (spec.layer, int(group.rows[text]), head, read.pivot[text, head].item(), read.squares[text, head].item(), sums)
        for text, heads in enumerate(read.sums.cpu().numpy())
        for head, sums in enumerate(heads)
    ]
    table = pd.DataFrame(rows, columns=["layer", "batch", "head", "pivot", "squares", "sums"])
    return table.assign(length=scores.shape[-1], causal=causal, window=window or 0)


def merge_additivity(table: pd.DataFrame, part: TablePart = "summary") -> pd.DataFrame:
    """Merge marginal sums into ``additivity(..., pool=True)`` of all texts together.

    Args:
        table: what ``marginals_by_layer`` returned, for one text or (by ``sweep``, or ``pandas.concat``) for many of
            one length; of any number of models and checkpoints. Rows of other experiments are left out.
        part: ``"summary"``, or the coefficients of the ``"distance"``, ``"query"`` or ``"key"`` component.

    Returns:
        The columns of ``additivity`` (or of ``AdditiveFit.to_frame(part)`` with ``layer``), with ``model``,
        ``checkpoint`` and ``step`` in front if the table has them, and settings (such as ``arguments`` and ``dtype``)
        of which it has several: texts are pooled within each. The figures are those of one process, to rounding.

    Raises:
        ValueError: another table; a job twice; texts of several lengths, or a text that lacks heads of a layer.

    Example:
        >>> import pandas as pd
        >>> from tl_posdisent import additivity, demo_tokens, load_demo_model
        >>> from tl_posdisent.sweeps import marginals_by_layer, merge_additivity
        >>> model, tokens = load_demo_model(), demo_tokens(length=128).reshape(4, 32)
        >>> parts = pd.concat([marginals_by_layer(model, row[None], layers=[2], progress=False) for row in tokens])
        >>> whole = additivity(model, tokens, layers=[2], pool=True, progress=False)
        >>> bool((merge_additivity(parts) - whole).abs().max().max() < 1e-9)
        True
    """
    whole = {"layer", "head", "pivot", "squares", "sums", "causal", "window"} <= set(table.columns)
    if not whole or not table["sums"].notna().any():
        raise ValueError(f"table must be what marginals_by_layer returns, got columns {list(table.columns)}")
    merged = []
    for front, of_model in by_setting(table[table["sums"].notna()], ["layer", "batch", "head"]):
        for layer, rows in of_model.groupby("layer", sort=False):
            fit = _pooled(rows, layer).to_frame(part)
            fit.insert(list(fit.columns).index("head"), "layer", layer)
            merged.append(pd.concat([pd.DataFrame([front] * len(fit)), fit], axis=1))
    return pd.concat(merged, ignore_index=True)


def _pooled(rows: pd.DataFrame, layer: Any) -> AdditiveFit:
    """One layer's fit of all its texts: as many as there are rows for each head."""
    for name in ("length", "causal", "window"):
        if len(values := rows[name].unique()) > 1:
            raise ValueError(f"texts must have one {name} to be pooled, got {values.tolist()} in layer {layer}")
    length, heads = int(rows["length"].iloc[0]), rows["head"].nunique()
    rows = rows.assign(text=rows.groupby("head").cumcount()).sort_values(["text", "head"], kind="stable")
    texts, left = divmod(len(rows), heads)
    if left:
        raise ValueError(f"every text must have all {heads} heads of layer {layer}, got {len(rows)} rows")
    window = int(rows["window"].iloc[0]) or None
    cells = make_cells((length, length), "causal" if bool(rows["causal"].iloc[0]) else "full", window)

    def stacked(name: str, *shape: int) -> Tensor:
        return torch.from_numpy(np.stack(rows[name].to_list()).astype(np.float64)).view(texts, heads, *shape)

    read = Marginals(stacked("pivot"), stacked("sums", -1), stacked("squares"))
    return fit_marginals(read, cells, pool=True)


# Moments of queries and keys

_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


def moments_by_layer(
    model: Any,
    tokens: Tokens,
    *,
    attention_mask: Tensor | None = None,
    layers: int | Iterable[int] | None = None,
    sinks: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure all that ``controlled_distance`` needs of a text, in a form that adds up over texts.

    Args:
        model, tokens, attention_mask, layers, sinks, progress: as in ``controlled_distance``.

    Returns:
        One row per layer, side and head: ``layer``, ``side`` (``"query"`` or ``"key"``), ``head`` (of keys: the key
        head), ``count``, ``mean`` (``d_head`` numbers) and ``cov`` (their covariance, ``d_head²`` numbers, row by row),
        float64, in the coordinates of ``Moments``; ``scale`` and ``length``; ``frequencies`` (radians per position),
        ``pairing``, ``attention_factor`` and ``angle_dtype`` of the rotation; ``sinks``.

    Raises:
        ValueError: what ``controlled_distance`` refuses.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.sweeps import merge_controlled_distance, moments_by_layer
        >>> parts = moments_by_layer(load_demo_model(), demo_tokens(length=64), layers=[4], progress=False)
        >>> parts.groupby("side")["head"].count().to_dict()  # 8 query heads on 4 key heads
        {'key': 4, 'query': 8}
        >>> len(merge_controlled_distance(parts))
        8
    """
    reading = read_model(model, layers)
    texts = read_texts(reading.model, tokens, attention_mask)

    def rows(spec: AttentionSpec, parts: list[Moments]) -> pd.DataFrame:
        return _rows(functools.reduce(operator.add, parts), spec, texts.longest)

    table = measure_layers(
        reading.model,
        texts,
        reading.rotary(layers, "moments_by_layer"),
        lambda layer: Moments.from_qk(layer.q, layer.k, layer.rotary),
        rows,
        sinks=sinks,
        progress=progress,
    )
    return reading.note(table.assign(sinks=sinks))


def merge_moments(table: pd.DataFrame) -> dict[int, Moments]:
    """Merge moments: layer → ``Moments`` of all texts in the table.

    Args:
        table: what ``moments_by_layer`` returned, for one text or (by ``sweep``, or ``pandas.concat``) for many. Rows
            of other experiments are left out.

    Raises:
        ValueError: another table; several models, checkpoints or settings (such as ``sinks``); a job twice; layers
            that rotate differently.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model
        >>> from tl_posdisent.sweeps import merge_moments, moments_by_layer
        >>> table = moments_by_layer(load_demo_model(), demo_tokens(length=64), layers=[4], progress=False)
        >>> merge_moments(table)[4].query.count
        64.0
    """
    table = _checked(table)
    groups = by_setting(table, ["layer", "side", "head"])
    if len(groups) != 1:
        differ = [name for name in groups[0][0] if len({str(front[name]) for front, _ in groups}) > 1]
        raise ValueError(
            f"table must be of one model, checkpoint and setting, got {len(groups)} that differ in "
            f"{', '.join(differ)}: choose the rows of one of them"
        )
    return {int(rows["layer"].iloc[0]): _merged(rows) for _, rows in table.groupby("layer", sort=False)}


def merge_controlled_distance(table: pd.DataFrame, distances: Numbers | None = None) -> pd.DataFrame:
    """Merge moments into ``controlled_distance`` of all texts together.

    Args:
        table: as in ``merge_moments``, of any number of models and checkpoints.
        distances: as in ``controlled_distance``; by default ``0 … length - 1``, if all texts are of one length.

    Returns:
        The columns of ``controlled_distance``, with ``model``, ``checkpoint`` and ``step`` in front if the table has
        them, and settings (such as ``arguments`` and ``sinks``) of which it has several: texts are added up within
        each. The figures are those of one process that reads everything, to rounding.

    Raises:
        ValueError: another table; a job twice; texts of several lengths and no distances; layers that rotate
            differently.

    Example:
        >>> import pandas as pd
        >>> from tl_posdisent import controlled_distance, demo_tokens, load_demo_model
        >>> from tl_posdisent.sweeps import merge_controlled_distance, moments_by_layer
        >>> model, tokens = load_demo_model(), demo_tokens(length=128).reshape(4, 32)
        >>> parts = pd.concat([moments_by_layer(model, row[None], layers=[2], progress=False) for row in tokens])
        >>> whole = controlled_distance(model, tokens, layers=[2], progress=False)
        >>> bool((merge_controlled_distance(parts) - whole).abs().max().max() < 1e-9)
        True
    """
    table = _checked(table)
    merged = []
    for front, of_model in by_setting(table, ["layer", "side", "head"]):
        for layer, rows in of_model.groupby("layer", sort=False):
            lengths = rows["length"].unique()
            if distances is None and len(lengths) > 1:
                raise ValueError(f"distances must be given for texts of several lengths, got {sorted(lengths)}")
            if len(scales := rows["scale"].unique()) > 1:
                raise ValueError(f"table must have one scale per layer, got {scales.tolist()} in layer {layer}")
            at = range(int(lengths[0])) if distances is None else distances
            shares = decompose(_merged(rows), at, scale=float(rows["scale"].iloc[0])).to_frame()
            shares.insert(0, "layer", layer)
            merged.append(pd.concat([pd.DataFrame([front] * len(shares)), shares], axis=1))
    return pd.concat(merged, ignore_index=True)


def _rows(moments: Moments, spec: AttentionSpec, length: int) -> pd.DataFrame:
    rows = []
    for side, spread in (("query", moments.query), ("key", moments.key)):
        for head, (mean, cov) in enumerate(zip(spread.mean.cpu(), spread.cov.cpu(), strict=True)):
            rows.append((side, head, spread.count, mean.numpy(), cov.flatten().numpy()))
    table = pd.DataFrame(rows, columns=["side", "head", "count", "mean", "cov"])
    r = spec.require_rotary("moments_by_layer")
    table["scale"], table["length"] = spec.require_scale(), length
    table["frequencies"] = pd.Series([r.frequencies.double().cpu().numpy()] * len(table))
    return table.assign(pairing=r.pairing, attention_factor=float(r.attention_factor), angle_dtype=str(r.angle_dtype))


def _merged(rows: pd.DataFrame) -> Moments:
    """Of one layer: as many parts as there are rows for each head."""
    sides = {}
    for side, of_side in rows.groupby("side"):
        numbered = of_side.assign(part=of_side.groupby("head").cumcount())
        sides[side] = total(_spread(part) for _, part in numbered.sort_values("head", kind="stable").groupby("part"))
    return Moments(sides["query"], sides["key"], _rotary(rows))


def _spread(rows: pd.DataFrame) -> Spread:
    mean = torch.from_numpy(np.stack(rows["mean"].to_list()))
    cov = torch.from_numpy(np.stack(rows["cov"].to_list()))
    return Spread(float(rows["count"].iloc[0]), mean, cov.view(*mean.shape, mean.shape[-1]))


def _rotary(rows: pd.DataFrame) -> Rotary:
    first = rows.iloc[0]
    for name in ("pairing", "attention_factor", "angle_dtype"):
        if len(values := rows[name].unique()) > 1:
            raise ValueError(f"texts must have the same {name} in layer {first['layer']}, got {values.tolist()}")
    if any(not np.array_equal(x, first["frequencies"]) for x in rows["frequencies"]):
        raise ValueError(f"texts must have the same frequencies in layer {first['layer']}: compare models one by one")
    frequencies = torch.tensor(np.asarray(first["frequencies"]), dtype=torch.float64)
    return Rotary(frequencies, first["pairing"], float(first["attention_factor"]), _DTYPES[first["angle_dtype"]])


def _checked(table: pd.DataFrame) -> pd.DataFrame:
    """Its rows of moments; a sweep may have asked for other things too."""
    whole = {"layer", "side", "head", "count", "mean", "cov", "frequencies"} <= set(table.columns)
    if not whole or not table["cov"].notna().any():
        raise ValueError(f"table must be what moments_by_layer returns, got columns {list(table.columns)}")
    return table[table["cov"].notna()]
