"""Merging tables of a sweep over texts, per model, checkpoint and setting."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float64
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.additive.cells import make_cells
from tl_posdisent.additive.fit import fit_marginals
from tl_posdisent.additive.marginals import Marginals, read_marginals
from tl_posdisent.additive.result import AdditiveFit, TableComponent
from tl_posdisent.experiments.attention_scores.rotary_layers import RotaryLayer, measure_layers
from tl_posdisent.models.capture import for_each_scores
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.texts import TextGroup, Tokens, read_texts
from tl_posdisent.rope.covariance import Spread, total
from tl_posdisent.rope.moments import Moments
from tl_posdisent.rope.rotary import Rotary
from tl_posdisent.rope.variance_decomposition import Numbers, decompose
from tl_posdisent.utils.tables import index_columns
from tl_posdisent.utils.validation import shown

Group: TypeAlias = tuple[dict[str, Any], pd.DataFrame]
_MODEL = ("model", "checkpoint", "step")
_SETTINGS = ("experiment", "seed", "arguments", "backend", "dtype", "sinks")

_ONCE = {"marginals_by_layer": ["layer", "batch", "head"], "moments_by_layer": ["layer", "side", "head"]}
"""Columns of which a job has each combination once."""


def _by_setting(table: pd.DataFrame, experiment: str, measured: str) -> list[Group]:
    """The rows of an experiment, recognised by a column that others lack, in groups that may be added: of one model,
    checkpoint and setting. Each with what names it: model and checkpoint, and settings of which there are several.

    Raises:
        ValueError: another table; rows of the same job twice.
    """
    if not isinstance(table, pd.DataFrame):
        raise ValueError(f"table must be what {experiment} returns, got {type(table).__name__}")
    if not {*_ONCE[experiment], measured} <= set(table.columns) or not table[measured].notna().any():
        raise ValueError(f"table must be what {experiment} returns, got columns {list(table.columns)}")
    table = table[table[measured].notna()]
    if "job" in table and (again := table.duplicated(["job", *_ONCE[experiment]]) & table["job"].notna()).any():
        raise ValueError(f"table must have each job once, got job {table.loc[again, 'job'].iloc[0][:12]}… twice")
    names = [name for name in (*_MODEL, *_SETTINGS) if name in table]
    if not names:
        return [({}, table)]
    kept = [name for name in names if name in _MODEL or len(table[name].unique()) > 1]
    found = table.groupby(names, sort=False, dropna=False)
    return [({name: rows[name].iloc[0] for name in kept}, rows) for _, rows in found]


def _merged(groups: list[Group], merge: Callable[[pd.DataFrame], pd.DataFrame]) -> pd.DataFrame:
    """One table of what ``merge`` makes of each layer's rows in each group, whose names come first."""
    tables = []
    for front, of_setting in groups:
        for layer, rows in of_setting.groupby("layer", sort=False):
            found = merge(rows)
            tables.append(pd.concat([pd.DataFrame([front | {"layer": layer}] * len(found)), found], axis=1))
    return pd.concat(tables, ignore_index=True)


def _shared(rows: pd.DataFrame, *names: str) -> list[Any]:
    """The values of columns that must be the same in all rows of a layer."""
    first = rows.iloc[0]
    for name in names:
        if not all(np.array_equal(value, first[name]) for value in rows[name]):
            values = ", ".join(dict.fromkeys(map(shown, rows[name])))
            raise ValueError(f"texts must have one {name} in layer {first['layer']} to be merged, got {values}")
    return [first[name] for name in names]


def _stacked(rows: pd.DataFrame, name: str, *shape: int) -> Float64[Tensor, "..."]:
    """A column of numbers or of arrays as one tensor."""
    return torch.from_numpy(np.stack(rows[name].to_list()).astype(np.float64)).view(*shape)


# Marginal sums of scores


def marginals_by_layer(
    model: Any,
    tokens: Tokens,
    *,
    attention_mask: Tensor | None = None,
    layers: int | Iterable[int] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure the marginal sums that ``merge_additivity`` pools over texts: all that ``additivity(pool=True)`` needs.

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
    table = pd.concat(tables, ignore_index=True)
    return reading.note(table.sort_values(["layer", "batch"], kind="stable", ignore_index=True))


@torch.no_grad()
def _marginals(spec: AttentionSpec, scores: Float[Tensor, "batch head query key"], group: TextGroup) -> pd.DataFrame:
    """One layer's rows of texts of equal length."""
    cells = make_cells(scores.shape, "causal" if spec.causal else "full", spec.window, device=scores.device)
    read = read_marginals(scores, cells)
    table = pd.DataFrame({"layer": spec.layer, **index_columns(read.pivot.shape)})
    return table.assign(
        batch=table["batch"].map(dict(enumerate(group.rows.tolist()))),
        pivot=read.pivot.flatten().cpu().numpy(),
        squares=read.squares.flatten().cpu().numpy(),
        sums=[*read.sums.flatten(0, 1).cpu().numpy()],
        length=scores.shape[-1],
        causal=spec.causal,
        window=spec.window or 0,
    )


def merge_additivity(table: pd.DataFrame, component: TableComponent = "summary") -> pd.DataFrame:
    """Merge marginal sums into ``additivity(..., pool=True)`` of all texts together.

    Args:
        table: what ``marginals_by_layer`` returned, for one text or (by ``sweep``, or ``pandas.concat``) for many of
            one length; of any number of models and checkpoints. Rows of other experiments are left out.
        component: ``"summary"``, or the coefficients of the ``"distance"``, ``"query"`` or ``"key"`` component.

    Returns:
        The columns of ``additivity`` (or of ``AdditiveFit.to_frame(component)`` with ``layer``), with ``model``,
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
    return _merged(_by_setting(table, "marginals_by_layer", "sums"), lambda rows: _pooled(rows).to_frame(component))


def _pooled(rows: pd.DataFrame) -> AdditiveFit:
    """One layer's fit of all its texts: as many as there are rows for each head."""
    length, causal, window = _shared(rows, "length", "causal", "window")
    heads = rows["head"].nunique()
    rows = rows.assign(text=rows.groupby("head").cumcount()).sort_values(["text", "head"], kind="stable")
    texts, left = divmod(len(rows), heads)
    if left:
        raise ValueError(f"texts must have all {heads} heads of layer {rows['layer'].iloc[0]}, got {len(rows)} rows")
    cells = make_cells((int(length), int(length)), "causal" if causal else "full", int(window) or None)
    pivot, squares = (_stacked(rows, name, texts, heads) for name in ("pivot", "squares"))
    return fit_marginals(Marginals(pivot, _stacked(rows, "sums", texts, heads, -1), squares), cells, pool=True)


# Moments of queries and keys


def moments_by_layer(
    model: Any,
    tokens: Tokens,
    *,
    attention_mask: Tensor | None = None,
    layers: int | Iterable[int] | None = None,
    sinks: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure the moments that ``merge_controlled_distance`` adds over texts: all that ``controlled_distance`` needs.

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
        return _moments(spec, functools.reduce(operator.add, parts)).assign(length=texts.longest)

    def measure(layer: RotaryLayer) -> Moments:
        return Moments.from_qk(layer.q, layer.k, layer.rotary)

    options: dict[str, Any] = {"layers": layers, "sinks": sinks, "progress": progress}
    return measure_layers(reading, texts, "moments_by_layer", measure, rows, **options).assign(sinks=sinks)


def _moments(spec: AttentionSpec, moments: Moments) -> pd.DataFrame:
    """One layer's rows."""
    rows = [
        (side, head, spread.count, mean.numpy(), cov.flatten().numpy())
        for side, spread in (("query", moments.query), ("key", moments.key))
        for head, (mean, cov) in enumerate(zip(spread.mean.cpu(), spread.cov.cpu(), strict=True))
    ]
    r = spec.require_rotary("moments_by_layer")
    return pd.DataFrame(rows, columns=["side", "head", "count", "mean", "cov"]).assign(
        scale=spec.require_scale(),
        frequencies=pd.Series([r.frequencies.double().cpu().numpy()] * len(rows)),
        pairing=r.pairing,
        attention_factor=float(r.attention_factor),
        angle_dtype=str(r.angle_dtype),
    )


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
    groups = _by_setting(table, "moments_by_layer", "cov")
    if len(groups) != 1:
        differ = [name for name in groups[0][0] if len({str(front[name]) for front, _ in groups}) > 1]
        raise ValueError(
            f"table must be of one model, checkpoint and setting, got {len(groups)} that differ in "
            f"{', '.join(differ)}: choose the rows of one of them"
        )
    by_layer = groups[0][1].groupby("layer", sort=False)
    return {int(rows["layer"].iloc[0]): _total(rows) for _, rows in by_layer}


def merge_controlled_distance(table: pd.DataFrame, distances: Numbers | None = None) -> pd.DataFrame:
    """Merge moments into ``controlled_distance`` of all texts together.

    Args:
        table: as in ``merge_moments``, of any number of models and checkpoints.
        distances: as in ``controlled_distance``; by default ``0 … length - 1``, if all texts are of one length.

    Returns:
        The columns of ``controlled_distance`` behind those that ``merge_additivity`` puts in front, with the same
        figures as one process that reads all texts, to rounding.

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

    def merge(rows: pd.DataFrame) -> pd.DataFrame:
        lengths = rows["length"].unique()
        if distances is None and len(lengths) > 1:
            raise ValueError(f"distances must be given for texts of several lengths, got {sorted(lengths)}")
        (scale,) = _shared(rows, "scale")
        at = range(int(lengths[0])) if distances is None else distances
        return decompose(_total(rows), at, scale=float(scale)).to_frame()

    return _merged(_by_setting(table, "moments_by_layer", "cov"), merge)


def _total(rows: pd.DataFrame) -> Moments:
    """The moments of all texts of one layer: as many as there are rows for each head."""
    names = ("frequencies", "pairing", "attention_factor", "angle_dtype")
    frequencies, pairing, factor, angle_dtype = _shared(rows, *names)
    angles = getattr(torch, angle_dtype.removeprefix("torch."))
    rotary = Rotary(torch.tensor(frequencies, dtype=torch.float64), pairing, float(factor), angles)
    rows = rows.assign(text=rows.groupby(["side", "head"]).cumcount()).sort_values("head", kind="stable")
    query, key = (rows[rows["side"] == side].groupby("text") for side in ("query", "key"))
    return Moments(total(_spread(text) for _, text in query), total(_spread(text) for _, text in key), rotary)


def _spread(rows: pd.DataFrame) -> Spread:
    mean = _stacked(rows, "mean", len(rows), -1)
    return Spread(float(rows["count"].iloc[0]), mean, _stacked(rows, "cov", *mean.shape, mean.shape[-1]))
