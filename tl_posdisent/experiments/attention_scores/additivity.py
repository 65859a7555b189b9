"""Three-axis additivity of every head's attention scores on a text (the main measurement of arXiv 2503.13305)."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from tl_posdisent.additive.cells import Cells, MaskKind, make_cells
from tl_posdisent.additive.fit import explained_around, fit_marginals
from tl_posdisent.additive.marginals import Marginals, read_marginals
from tl_posdisent.additive.result import SUMMARY, AdditiveFit
from tl_posdisent.experiments.attention_scores.score_controls import Control, for_each_control
from tl_posdisent.hooks.hook_list import Chosen, Heads, any_heads
from tl_posdisent.models.capture import of_heads
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.memory import require_room
from tl_posdisent.models.running.texts import TextGroup, Texts, Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.tables import index_columns, number_heads
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
    controls: Collection[Control] = (),
    control_seed: int = 0,
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
            * ``"random queries and keys"``: random projections of the residual stream of this model, unlike
              ``random_control(weights="random_qk")``, whose stream changes too. Is the residual stream enough? Two
              passes, and a copy of the model.
        control_seed: seed of the random projections.
        progress: show a progress bar.

    Returns:
        One row per text (unless pooled), layer and head: ``batch``, ``layer``, ``head``, ``r``, ``r2``,
        ``r2_adjusted``, and ``share_distance``, ``share_query``, ``share_key``, the share of the scores' variance that
        each component explains alone (see ``AdditiveFit``). Unless pooled, also ``r_no_distance``, r of the query and
        key component alone, and with two or more texts ``r_held_out``: r with the distance profile that was fitted to
        the *other* texts, and the text's own query and key component; 0 where that profile is worse than a constant.
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
        MemoryError: one layer's scores exceed free memory.

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
    wanted = check_subset("controls", controls, get_args(Control))
    check_integer("control_seed", control_seed, 0)
    layers = listed("layers", layers)
    reading = read_model(model, layers)
    model, chosen = reading.model, any_heads(reading, layers, heads)
    specs, by_layer = [spec for spec, _ in chosen], {spec.layer: some for spec, some in chosen}
    texts = read_texts(model, tokens, attention_mask)
    check_integer("sinks", sinks, 0, min(group.tokens.shape[1] for group in texts.groups) - 2)
    width = texts.tokens.shape[1]
    if isinstance(mask, Tensor) and (mask.dtype != torch.bool or mask.shape != (width, width)):
        raise ArgumentError(
            "mask",
            f"must be a boolean tensor of shape (query, key) = {(width, width)}, got {mask.dtype} of shape "
            f"{tuple(mask.shape)}",
        )
    if not pool and len(torch.cat([texts.tokens, texts.real.long()], 1).unique(dim=0)) < len(texts.tokens):
        warnings.warn(
            "tokens: some texts are the same, so r_held_out of these has the distance profile of the text itself: "
            "leave repeated texts out",
            stacklevel=2,
        )
    n_heads = max(spec.n_heads for spec in specs)  # the model computes them all
    for group in texts.groups:
        require_room(model, len(group.tokens) * n_heads, group.tokens.shape[1])
    run = partial(for_each_control, wanted, control_seed, model)
    total = (1 + len(wanted)) * len(specs) * len(texts.groups)
    with progress_bar(total=total, desc="layers", disable=not progress) as bar:
        read = [_read_group(run, texts, group, chosen, mask, sinks, bar) for group in texts.groups]
        tables = {name: _table([parts[name] for parts in read], by_layer, pool) for name in ("own", *wanted)}
    _warn_of_exact_fits(tables["own"], texts)
    return reading.note(_beside(tables) if wanted else tables["own"])


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


def _table(read: list[dict[int, TextMarginals]], heads: dict[int, list[int]], pool: bool) -> pd.DataFrame:
    """Fit the marginal sums of each layer, of texts of each length."""
    tables = []
    for layer in sorted(read[0]):
        parts = [of_group.pop(layer) for of_group in read]
        columns = _of_all([fit_marginals(*_stacked(parts), pool=True)]) if pool else columns_of_texts(parts)
        shape, values = columns["r"].shape, {name: x.flatten().tolist() for name, x in columns.items()}
        table = pd.DataFrame(index_columns((*shape[:-1], 1, shape[-1]), pooled=pool, layers=[layer]) | values)
        tables.append(number_heads(table, heads[layer]))
    return pd.concat(tables, ignore_index=True)


def _beside(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Join the heads' own scores and the controls' in one table, with ``scores`` after ``head``."""
    for name, table in tables.items():
        table.insert(list(table.columns).index("head") + 1, "scores", name)
    return pd.concat(tables.values(), ignore_index=True)


class TextMarginals(NamedTuple):
    """Marginal sums of one layer's scores in texts of equal length.

    Attributes:
        rows: the places of the texts in the batch.
        read, cells: the sums, and the cells over which they were taken.
        near: for the single longest text of a batch, the same over the pairs whose distance another text has too.
    """

    rows: Int[Tensor, " text"]
    read: Marginals
    cells: Cells
    near: TextMarginals | None = None


def text_marginals(texts: Texts, rows: Tensor, scores: Tensor, cells_at: Callable[[int], Cells]) -> TextMarginals:
    """Compute the marginal sums of the scores of some of the texts; ``cells_at`` returns the cells of a length."""
    near, n = None, scores.shape[-1]
    cells, of_others = cells_at(n), sorted(texts.lengths)[-2] if len(texts.tokens) > 1 else n
    if of_others < n:  # no other text has a profile at the largest distances, so r_held_out leaves them out
        theirs, at = cells_at(of_others), torch.arange(n, device=scores.device)
        distance = at[:, None] - at
        known = (distance >= theirs.low) & (distance < theirs.low + theirs.n_distance)
        some = make_cells(scores.shape, cells.to_mask() & known, device=scores.device)
        near = TextMarginals(rows, read_marginals(scores, some), some)
    return TextMarginals(rows, read_marginals(scores, cells), cells, near)


def _read_group(
    run: Callable[..., None],
    texts: Texts,
    group: TextGroup,
    chosen: Chosen,
    mask: MaskKind | Tensor | None,
    sinks: int,
    bar: Any,
) -> dict[str, dict[int, TextMarginals]]:
    """Compute the marginal sums of each layer's chosen heads and of each control, by name and layer."""
    parts, heads = defaultdict[str, dict[int, TextMarginals]](dict), {spec.layer: some for spec, some in chosen}

    def read(name: str, spec: AttentionSpec, scores: Tensor) -> None:
        scores = of_heads(scores, heads[spec.layer])

        def cells_at(n: int) -> Cells:
            shape = (*scores.shape[:-2], n, n)
            return make_cells(shape, device=scores.device, sinks=sinks, **cells_of(spec, mask, n))

        parts[name][spec.layer] = text_marginals(texts, group.rows, scores, cells_at)
        bar.update()

    run(group.tokens, [spec for spec, _ in chosen], read)
    return parts


def _of_all(fits: Sequence[AdditiveFit]) -> dict[str, Tensor]:
    """Collect the columns of the summary, ``[*text, head]`` each, from several fits."""
    return {name: torch.cat([getattr(fit, name) for fit in fits]) for name in SUMMARY}


def columns_of_texts(parts: Sequence[TextMarginals]) -> dict[str, Tensor]:
    """Compute the columns of ``additivity`` without pooling, ``[text, head]``, texts in the order of the batch."""
    fits = [fit_marginals(part.read, part.cells) for part in parts]
    several = sum(len(part.rows) for part in parts) > 1
    profiles = _profiles_of_others(parts, fits) if several else [None] * len(parts)
    r2 = [_given_profiles(*each) for each in zip(parts, fits, profiles, strict=True)]
    names = ["r_no_distance", "r_held_out"] if several else ["r_no_distance"]
    columns = _of_all(fits) | dict(zip(names, torch.cat(r2, 1).clamp_min(0).sqrt(), strict=True))
    for name in names:  # a text too short for a fit tells nothing of its parts either
        columns[name] = columns[name].masked_fill(columns["r"].isnan(), torch.nan)
    order = torch.cat([part.rows for part in parts]).argsort()
    return {name: x[order.to(x.device)] for name, x in columns.items()}


def _given_profiles(
    part: TextMarginals, fit: AdditiveFit, of_others: Tensor | None
) -> Float64[Tensor, "measure text head"]:
    """Compute r² without a profile, and with that of the other texts, if there are any."""
    none = torch.zeros_like(fit.distance)
    if of_others is None or part.near is None:
        given = [none] if of_others is None else [none, of_others]
        return explained_around(part.read, part.cells, torch.stack(given))
    of_near = explained_around(part.near.read, part.near.cells, of_others[None])
    return torch.cat([explained_around(part.read, part.cells, none[None]), of_near])


def _profiles_of_others(parts: Sequence[TextMarginals], fits: Sequence[AdditiveFit]) -> list[Tensor]:
    """Fit the profile ``[text, head, distance]`` of all other texts for each text, at the distances that they have."""
    if len(parts) == 1:  # with equal masks, the profile of several texts is the mean of their profiles
        (fit,) = fits
        return [(fit.distance.sum(0) - fit.distance) / (len(fit.distance) - 1)]
    apart = [[_one_text(part, n) for n in range(len(part.rows))] for part in parts]
    every = [one for some in apart for one in some]
    return [
        torch.stack([_profile((one.near or one).cells, [x for x in every if x is not one]) for one in some])
        for some in apart
    ]


def _one_text(part: TextMarginals, n: int) -> TextMarginals:
    read = Marginals(**{name: sums[n : n + 1] for name, sums in vars(part.read).items()})
    return TextMarginals(part.rows[n : n + 1], read, part.cells, part.near)  # near: only where part is one text


def _profile(cells: Cells, others: Sequence[TextMarginals]) -> Tensor:
    """Fit the profile ``[head, distance]`` of these texts, at the distances of the cells."""
    fit = fit_marginals(*_stacked(others), pool=True)
    low = cells.low - int(fit.distances[0])
    return fit.distance[..., low : low + cells.n_distance]


def _stacked(parts: Sequence[TextMarginals]) -> tuple[Marginals, Cells]:
    """Stack marginal sums of texts of several lengths, along the axes of the longest."""
    if len(parts) == 1:
        return parts[0].read, parts[0].cells
    n = max(part.cells.n_key for part in parts)
    batch, n_heads = sum(len(part.rows) for part in parts), parts[0].read.pivot.shape[1]
    places = torch.arange(batch, device=parts[0].read.pivot.device).split([len(part.rows) for part in parts])
    inside = torch.zeros(batch, 1, n, n, dtype=torch.bool, device=parts[0].read.pivot.device)
    for at, part in zip(places, parts, strict=True):
        inside[at, :, : part.cells.n_query, : part.cells.n_key] = part.cells.to_mask()
    cells = make_cells((batch, n_heads, n, n), inside, device=inside.device)
    zero = cells.counts.new_zeros(batch, n_heads)
    whole = Marginals(zero, zero.new_zeros(*zero.shape, cells.counts.shape[-1]), zero.clone())
    for at, (_, read, own, _) in zip(places, parts, strict=True):
        whole.pivot[at], whole.squares[at] = read.pivot, read.squares
        low = own.low - cells.low
        ranges = (slice(low, low + own.n_distance), slice(own.n_query), slice(own.n_key))
        for axis, some, sums in zip(cells.split(whole.sums), ranges, own.split(read.sums), strict=True):
            axis[at, :, some] = sums
    return whole, cells


def cells_of(spec: AttentionSpec, mask: MaskKind | Tensor | None, length: int) -> dict[str, Any]:
    """Return mask and window of a layer as arguments for ``make_cells``."""
    if mask is None:
        return {"mask": "causal" if spec.causal else "full", "window": spec.window}
    if isinstance(mask, Tensor):
        return {"mask": mask[:length, :length] & spec.mask(length, mask.device)}
    return {"mask": mask}
