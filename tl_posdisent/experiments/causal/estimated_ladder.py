"""The attention ladder of all heads at once: divergences estimated by curvature, exact where a verdict needs it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isnan, nan
from typing import Any, Literal, get_args

import pandas as pd
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.additive.attention.rungs import PER_HEAD
from tl_posdisent.experiments.causal.attention_ladder import MEAN
from tl_posdisent.experiments.causal.estimated_effects import Estimates
from tl_posdisent.experiments.causal.exact_effects import ExactEffects, Place
from tl_posdisent.experiments.causal.head_verdicts import NEGLIGIBLE, head_verdicts
from tl_posdisent.experiments.causal.metrics import next_token_loss
from tl_posdisent.experiments.causal.named_interventions import NamedIntervention, named_interventions, rows_by_layer
from tl_posdisent.experiments.causal.text_parts import differentiable_texts
from tl_posdisent.hooks.ablate import ablate_heads
from tl_posdisent.hooks.fitted_attention import fitted_attention
from tl_posdisent.hooks.hook_list import Heads, Hooks, Layers, any_heads
from tl_posdisent.hooks.substitute import substitute_attention
from tl_posdisent.models.reading.forward_pass import running
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.texts import Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.precision import apart
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.statistics import Blocks
from tl_posdisent.utils.validation import check_integer, check_number, check_seed, check_subset

CausalRung = Literal["uniform", "first_token", "distance", "distance+sink", "static"]
_RUNGS: tuple[CausalRung, ...] = get_args(CausalRung)


def estimated_ladder(
    model: Any,
    tokens: Tokens,
    *,
    heldout: Tokens,
    attention_mask: Tensor | None = None,
    heldout_mask: Tensor | None = None,
    layers: Layers = None,
    heads: Heads = None,
    rungs: Collection[CausalRung] = _RUNGS,
    draws: int = 4,
    exact: int = 16,
    share: float = 0.95,
    negligible: float = NEGLIGIBLE,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Estimate the causal rungs of the attention ladder for all heads at once, and run the heads that matter exactly.

    ``attention_ladder`` runs the model once per head and rung. Here KL(unmodified ‖ replaced) is estimated by its
    curvature (``head_effects``) for every head and rung, from a few passes per text. Of the heads whose estimated
    verdict is not *not used*, the ``exact`` with the largest divergence without their attention (mean output) are run
    with all rungs, and their estimates replaced.

    Args:
        model, attention_mask, layers, heads, progress: as in ``head_ablation``.
        tokens: texts to which rungs are fitted, and over which mean outputs are averaged.
        heldout: texts on which divergences are estimated and measured, no longer than those of ``tokens``.
        heldout_mask: the mask of ``heldout``.
        rungs: rungs that are causal on other texts; ``"uniform"`` and ``"mean_output"`` are always added.
        draws, seed: as in ``head_effects``.
        exact: number of heads that are run exactly.
        share, negligible: as in ``head_verdicts``, for the choice of these heads.

    Returns:
        A table for ``head_verdicts``, one row per head and rung: ``layer``, ``head`` (missing where a layer's results
        are not laid out by heads), ``control`` (``"none"``), ``rung``, ``exact`` (whether it was run), ``kl`` and
        ``error_kl``, ``recovered_kl`` and ``se_kl`` as in ``attention_ladder``, with the texts as ``blocks`` and their
        ``df``, and ``causal``.

    Raises:
        ValueError: fewer than two held-out texts; an unknown rung; what ``head_effects`` and ``fitted_attention``
            refuse.

    Example:
        >>> from tl_posdisent import demo_tokens, head_verdicts, load_demo_model
        >>> from tl_posdisent.experiments import estimated_ladder
        >>> model, tokens = load_demo_model(), demo_tokens(length=768).view(12, 64)
        >>> table = estimated_ladder(model, tokens[:6], heldout=tokens[6:], exact=4, progress=False)
        >>> len(table), int(table.groupby(["layer", "head"])["exact"].all().sum())  # 40 heads, seven rows each
        (280, 4)
        >>> len(head_verdicts(table))
        40
    """
    chosen_rungs = check_subset("rungs", rungs, _RUNGS)
    check_integer("draws", draws, 1)
    check_integer("exact", exact, 0)
    check_number("share", share, above=0, most=1)
    check_number("negligible", negligible, least=0)
    check_seed(seed)
    reading = read_model(model, layers)
    model, among = reading.model, any_heads(reading, layers, heads)
    fitted = read_texts(model, tokens, attention_mask)
    with naming(tokens="heldout", attention_mask="heldout_mask"):
        texts, parts = differentiable_texts(model, heldout, heldout_mask, next_token_loss)
    if len(texts.tokens) < 2:
        raise ArgumentError("heldout", "must be at least two texts, whose spread gives the standard errors, got 1")
    named = _rung_hooks(model, fitted, ["uniform", *(x for x in chosen_rungs if x != "uniform")], layers, heads)
    items = named_interventions(model, named, rows_by_layer(reading, among, heads), texts)
    n_texts = len(texts.tokens)
    total = n_texts * (2 + draws + len(items) / 2 + min(exact, items[0].n_rows) * len(items) / 2)
    with running(model), progress_bar(total=total, desc="passes", unit_scale=True, disable=not progress) as bar:
        estimates = Estimates(model, items, n_texts, draws, seed, bar)
        for part in parts:
            estimates.add(part)
        found = {
            (n, layer, head): estimates.curvature[n][layer][:, row]
            for n, item in enumerate(items)
            for layer, some in item.rows.items()
            for row, head in enumerate(some)
        }
        causal = {spec.layer: spec.causal for spec, _ in among}
        table = _table(items, found, set(), causal)
        places = _to_run(table, items, exact, share, negligible)
        effects = ExactEffects(model, items, n_texts, places, bar)
        bar.total = bar.n + n_texts * effects.n_passes
        for part in parts:
            effects.add(part)
    return reading.note(_table(items, found | effects.divergences, set(places), causal))


def _rung_hooks(model: Any, fitted: Any, rungs: Sequence[Any], layers: Layers, heads: Heads) -> dict[str, Hooks]:
    """Make the hooks of the mean output and of each rung."""
    some: dict[str, Any] = {"layers": layers, "heads": heads}
    made = {MEAN: ablate_heads(model, heads, layers=layers, mode="mean", reference=fitted)}
    for rung in rungs:
        if rung in PER_HEAD:
            made[rung] = fitted_attention(model, fitted, rung, **some)
        else:
            made[rung] = substitute_attention(model, rung, **some)
    return made


def _table(
    items: Sequence[NamedIntervention],
    found: Mapping[Place, Float64[Tensor, "text"]],
    exact: set[Place],
    causal: Mapping[int, bool],
) -> pd.DataFrame:
    """Tabulate divergences by head and rung, averaged over texts."""
    numbers = {item.name: n for n, item in enumerate(items)}
    rows: list[tuple[Any, ...]] = []
    for layer, some in items[0].rows.items():
        for head in some:
            by_rung = {name: (n, layer, head) for name, n in numbers.items() if (n, layer, head) in found}
            uniform = found[by_rung["uniform"]]
            blocks = Blocks.single(len(uniform))
            for name, place in by_rung.items():
                values = (*blocks.mean(found[place]), *_share(blocks, found[place], uniform))
                rows.append((layer, head, name, place in exact, *values, blocks.count, blocks.df, causal[layer]))
            rows.append((layer, head, "untouched", True, 0.0, 0.0, 1.0, 0.0, blocks.count, blocks.df, causal[layer]))
    columns = ["layer", "head", "rung", "exact", "kl", "error_kl", "recovered_kl", "se_kl", "blocks", "df", "causal"]
    table = pd.DataFrame(rows, columns=columns).astype({"layer": "Int64", "head": "Int64"})
    table.insert(2, "control", "none")
    return table


def _share(blocks: Blocks, kl: Tensor, uniform: Tensor) -> tuple[float, float]:
    """Compute the share of the divergence under uniform attention that a rung removes, and its standard error."""
    if isnan(float(uniform.mean())) or not apart(1 + uniform.mean().item(), 1.0):
        return nan, nan
    return blocks.ratio(uniform - kl, uniform)


def _to_run(
    table: pd.DataFrame, items: Sequence[NamedIntervention], exact: int, share: float, negligible: float
) -> list[Place]:
    """Choose the heads that are run exactly: used or undecided, those with the largest divergence first."""
    verdicts = head_verdicts(table, share, measure="kl", negligible=negligible)
    used = verdicts[verdicts["verdict"] != "not used"].sort_values("gap_mean", ascending=False)
    places = []
    for layer, head in zip(used["layer"][:exact], used["head"][:exact], strict=True):
        where = int(layer), None if pd.isna(head) else int(head)
        places += [(n, *where) for n, item in enumerate(items) if where[1] in item.rows.get(where[0], [])]
    return places
