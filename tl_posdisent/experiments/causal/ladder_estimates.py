"""Heads whose rungs of the attention ladder are run, and estimates of the causal rungs for the others."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple, cast

import torch

from tl_posdisent.additive.attention.rungs import PER_HEAD, WITHOUT_FIT, n_parameters
from tl_posdisent.experiments.causal.estimated_effects import Estimates, estimated_effects
from tl_posdisent.experiments.causal.exact_effects import search_largest
from tl_posdisent.experiments.causal.ladder_runs import MEAN, AnyRung, Row
from tl_posdisent.experiments.measuring.metrics import next_token_loss
from tl_posdisent.experiments.measuring.named_interventions import NamedIntervention, named_interventions, rows_by_layer
from tl_posdisent.experiments.measuring.recovered_share import share_of_kl
from tl_posdisent.experiments.measuring.text_parts import RUN_TOKENS, Part, parts_of
from tl_posdisent.hooks.ablate import ablate_heads
from tl_posdisent.hooks.fitted_attention import fitted_attention
from tl_posdisent.hooks.hook_list import Chosen, Hooks
from tl_posdisent.hooks.substitute import BANDS, substitute_attention
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import Texts
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.statistics import Blocks


class Screening(NamedTuple):
    """Which heads are run, and estimates of the others.

    Attributes:
        run: layer and head of the heads that are run.
        rows: rows of the other heads.
        search: the divergence that none of the others exceeds with its mean output (see ``head_effects``).
    """

    run: list[tuple[int, int]]
    rows: list[Row]
    search: dict[str, Any]


def screen_heads(
    reading: ModelReading,
    fitted: Texts,
    texts: Texts,
    parts: Sequence[Part],
    chosen: Chosen,
    rungs: Sequence[AnyRung],
    *,
    exact: int,
    draws: int,
    seed: int,
    progress: bool,
) -> Screening:
    """Estimate the causal rungs of each head, and search for at most ``exact`` heads whose mean output changes most.

    A rung that is fitted to the predicted text itself is not estimated: it would be fitted to each head.
    """
    model, heads = reading.model, [(spec.layer, head) for spec, some in chosen for head in some]
    estimated = [rung for rung in rungs if rung == MEAN or rung in PER_HEAD or rung in WITHOUT_FIT]
    named = {rung: _hooks(model, fitted, rung, heads) for rung in estimated if rung != "untouched"}
    items = named_interventions(model, named, rows_by_layer(reading, chosen), texts)
    with running(model), progress_bar(desc="passes", unit_scale=True, disable=not progress) as bar:
        estimates = estimated_effects(model, items, texts, parts, draws=draws, seed=seed, bar=bar)
        mean = next(n for n, item in enumerate(items) if item.name == MEAN)
        search = estimates.search(mean, largest=ceil(exact / 4), most=exact, draws=draws)
        parts = parts_of(texts, next_token_loss, tokens=RUN_TOKENS)
        search_largest(model, items, {mean: search}, parts, estimates.n_predictions, bar)
    run = sorted((layer, int(head)) for layer, head in search.alone if head is not None)
    return Screening(run, _rows(items, estimates, texts, fitted.longest, chosen, run), search.to_dict())


def _hooks(model: Any, fitted: Texts, rung: AnyRung, heads: Sequence[tuple[int, int]]) -> Hooks:
    if rung == MEAN:
        return ablate_heads(model, heads, mode="mean", reference=fitted)
    if rung in PER_HEAD:
        return fitted_attention(model, fitted, cast(Any, rung), heads=heads)
    return substitute_attention(model, rung, heads=heads)


def _rows(
    items: Sequence[NamedIntervention],
    estimates: Estimates,
    texts: Texts,
    longest: int,
    chosen: Chosen,
    run: Sequence[tuple[int, int]],
) -> list[Row]:
    """Tabulate the estimates of heads that were not run, averaged over predicted tokens; each text is a block."""
    predicted = torch.tensor(texts.lengths, device="cpu") - 1
    blocks = Blocks(torch.arange(len(texts.lengths), device="cpu").repeat_interleave(predicted))
    shared = {"control": "none", "blocks": blocks.count, "df": blocks.df, "exact": False}
    rows: list[Row] = []
    for spec, _ in chosen:
        inside = spec.mask(longest)
        sizes = {str(x): n_parameters(x, inside, spec.d_head, bands=BANDS, rank=1) for x in (*WITHOUT_FIT, *PER_HEAD)}
        sizes[MEAN] = spec.d_head
        for n, head in enumerate(items[0].rows[spec.layer]):
            if (spec.layer, head) in run:
                continue
            by_rung = {
                item.name: estimates.curvature[i, spec.layer][:, n].repeat_interleave(predicted)
                for i, item in enumerate(items)
            }
            place = {"layer": spec.layer, "head": head, "causal": spec.causal, **shared}
            for rung, kl in by_rung.items():
                row: Row = {**place, "rung": rung}
                row["kl"], row["error_kl"] = blocks.mean(kl)
                row["recovered_kl"], row["se_kl"] = share_of_kl(kl, by_rung["uniform"], blocks)
                rows.append(row | {"parameters": sizes[rung]})
            rows.append({**place, "rung": "untouched", "kl": 0.0, "error_kl": 0.0, "recovered_kl": 1.0, "se_kl": 0.0})
    return rows
