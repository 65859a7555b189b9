"""Heads whose rungs of the attention ladder are run, and estimates of the causal rungs for the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from tl_posdisent.additive.attention.rungs import PER_HEAD, WITHOUT_FIT, n_parameters
from tl_posdisent.experiments.causal.estimated_effects import Estimates, estimated_effects, in_layers
from tl_posdisent.experiments.causal.ladder_runs import MEAN, AnyRung, Row
from tl_posdisent.experiments.measuring.recovered_share import share_of_kl
from tl_posdisent.experiments.measuring.text_parts import Part
from tl_posdisent.hooks.ablate import ablate_heads
from tl_posdisent.hooks.fitted_attention import fitted_attention
from tl_posdisent.hooks.hook_list import Chosen, Hooks
from tl_posdisent.hooks.substitute import BANDS, substitute_attention
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import Texts
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.statistics import Blocks
from tl_posdisent.utils.words import plural


class Screening(NamedTuple):
    """Which heads are run, and estimates of the others.

    Attributes:
        run: layer and head of the heads that are run.
        rows: rows of the other heads.
        search: how many heads are run.
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
    """Estimate the causal rungs of each head, and choose the ``exact`` heads whose mean output changes most.

    A rung that is fitted to the predicted text itself is not estimated: it would be fitted to each head.
    """
    model, heads = reading.model, [(spec.layer, head) for spec, some in chosen for head in some]
    estimated = [rung for rung in rungs if rung == MEAN or rung in PER_HEAD or rung in WITHOUT_FIT]
    named = {rung: _hooks(model, fitted, rung, heads) for rung in estimated if rung != "untouched"}
    changes, n_texts = in_layers({str(rung): hooks for rung, hooks in named.items()}, chosen), len(texts.tokens)
    with running(model), progress_bar(desc="passes", unit_scale=True, disable=not progress) as bar:
        estimates = estimated_effects(model, changes, parts, n_texts, draws=draws, seed=seed, bar=bar)
    places = zip(estimates.rows, estimates.curvature.mean(0).tolist(), strict=True)
    sizes = {(layer, head): kl for (name, layer, head), kl in places if name == MEAN}
    run = sorted(sorted(sizes, key=lambda place: -sizes[place])[:exact])
    summary = {
        "heads": len(heads),
        "run": len(run),
        "statement": f"{len(run)} of {plural(len(heads), 'head')} were run",
    }
    return Screening(run, _rows(estimates, texts, fitted.longest, chosen, run), summary)


def _hooks(model: Any, fitted: Texts, rung: AnyRung, heads: Sequence[tuple[int, int]]) -> Hooks:
    if rung == MEAN:
        return ablate_heads(model, heads, mode="mean", reference=fitted)
    if rung in PER_HEAD:
        return fitted_attention(model, fitted, cast(Any, rung), heads=heads)
    return substitute_attention(model, rung, heads=heads)


def _rows(
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
        heads = [head for name, layer, head in estimates.rows if (name, layer) == (MEAN, spec.layer)]
        for head in heads:
            if (spec.layer, head) in run:
                continue
            by_rung = {
                name: estimates.curvature[:, row].repeat_interleave(predicted)
                for row, (name, *place_of_row) in enumerate(estimates.rows)
                if place_of_row == [spec.layer, head]
            }
            place = {"layer": spec.layer, "head": head, "causal": spec.causal, **shared}
            for rung, kl in by_rung.items():
                row: Row = {**place, "rung": rung}
                row["kl"], row["error_kl"] = blocks.mean(kl)
                row["recovered_kl"], row["se_kl"] = share_of_kl(kl, by_rung["uniform"], blocks)
                rows.append(row | {"parameters": sizes[rung]})
            rows.append({**place, "rung": "untouched", "kl": 0.0, "error_kl": 0.0, "recovered_kl": 1.0, "se_kl": 0.0})
    return rows
