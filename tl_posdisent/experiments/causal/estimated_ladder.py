"""The attention ladder of all heads at once: divergences estimated by curvature, exact where a verdict needs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tl_posdisent.additive.attention.rungs import PER_HEAD
from tl_posdisent.experiments.causal.attention_ladder import MEAN, share_of_kl
from tl_posdisent.experiments.causal.estimated_effects import Estimates
from tl_posdisent.experiments.causal.exact_effects import Place, exact_effects, n_passes
from tl_posdisent.experiments.causal.head_verdicts import NEGLIGIBLE, head_verdicts
from tl_posdisent.experiments.causal.metrics import next_token_loss
from tl_posdisent.experiments.causal.named_interventions import NamedIntervention, named_interventions, rows_by_layer
from tl_posdisent.experiments.causal.text_parts import TOKENS, differentiable_texts, parts_of
from tl_posdisent.hooks.ablate import ablate_heads
from tl_posdisent.hooks.fitted_attention import fitted_attention
from tl_posdisent.hooks.hook_list import Heads, Hooks, any_heads
from tl_posdisent.hooks.substitute import substitute_attention
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import Texts, Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.statistics import Blocks
from tl_posdisent.utils.validation import check_integer, check_number, check_seed, check_subset

CausalRung = Literal["uniform", "first_token", "distance", "distance+sink", "static"]
_RUNGS: tuple[CausalRung, ...] = get_args(CausalRung)

Head = tuple[int, int | None]
"""Layer and head; None for a layer whose results are not laid out by heads."""
Divergences = Mapping[Place, Float64[Tensor, "text"]]
"""By place (the number of a rung's hooks, layer, head), the divergences of the texts that were read for it."""


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
    exact: int | None = 16,
    audit: int = 8,
    looks: int = 1,
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

    With several ``looks``, these runs are sequential: a head is run on some of the texts, and on twice as many until
    its verdict is decided or the texts are used up. Each look may err, so intervals are wider (``head_verdicts``).

    Args:
        model, attention_mask, layers, heads, progress: as in ``head_ablation``.
        tokens: texts to which rungs are fitted, and over which mean outputs are averaged.
        heldout: texts on which divergences are estimated and measured, no longer than those of ``tokens``.
        heldout_mask: the mask of ``heldout``.
        rungs: rungs that are causal on other texts; ``"uniform"`` and ``"mean_output"`` are always added.
        draws, seed: as in ``head_effects``.
        exact: number of heads that are run exactly; None for all that are used or undecided.
        audit: number of random heads among those estimated as *not used* that are run exactly on all texts, too.
        looks: number of times that a verdict is looked at. The first look reads one in ``2 ** (looks - 1)`` held-out
            texts, the last reads all.
        share, negligible: as in ``head_verdicts``, for the choice of these heads and for stopping.

    Returns:
        A table for ``head_verdicts``, one row per head and rung: ``layer``, ``head`` (missing where a layer's results
        are not laid out by heads), ``control`` (``"none"``), ``rung``, ``exact`` (whether it was run), ``kl`` and
        ``error_kl``, ``recovered_kl`` and ``se_kl`` as in ``attention_ladder``, with the texts that were read for the
        head as ``blocks``, their ``df`` and number of predicted ``tokens``, ``looks``, and ``causal``.

        ``attrs["audit"]`` counts the heads that were run because they were estimated as *not used* (``audited``), those
        of them whose divergence from exact runs is larger than ``negligible`` (``above``), and those where it is surely
        larger (``surely_above``).

    Raises:
        ValueError: fewer than two held-out texts for the first look; an unknown rung; what ``head_effects`` and
            ``fitted_attention`` refuse.

    Example:
        >>> from tl_posdisent import demo_tokens, head_verdicts, load_demo_model
        >>> from tl_posdisent.experiments import estimated_ladder
        >>> model, tokens = load_demo_model(), demo_tokens(length=768).view(12, 64)
        >>> table = estimated_ladder(model, tokens[:6], heldout=tokens[6:], exact=4, audit=0, progress=False)
        >>> len(table), int(table.groupby(["layer", "head"])["exact"].all().sum())  # 40 heads, seven rows each
        (280, 4)
        >>> len(head_verdicts(table))
        40
    """
    chosen_rungs = check_subset("rungs", rungs, _RUNGS)
    check_integer("draws", draws, 1)
    if exact is not None:
        check_integer("exact", exact, 0)
    check_integer("audit", audit, 0)
    check_integer("looks", looks, 1)
    check_number("share", share, above=0, most=1)
    check_number("negligible", negligible, above=0)
    check_seed(seed)
    reading = read_model(model, layers)
    model, among = reading.model, any_heads(reading, layers, heads)
    fitted = read_texts(model, tokens, attention_mask)
    with naming(tokens="heldout", attention_mask="heldout_mask"):
        texts, parts = differentiable_texts(model, heldout, heldout_mask, next_token_loss)
    stages = _stages(len(texts.tokens), looks)
    named = _rung_hooks(model, fitted, ["uniform", *(x for x in chosen_rungs if x != "uniform")], layers, heads)
    items = named_interventions(model, named, rows_by_layer(reading, among, heads), texts)
    n_texts, n_heads = len(texts.tokens), items[0].n_rows
    n_runs = min((n_heads if exact is None else exact) + audit, n_heads)
    total = n_texts * (2 + draws + len(items) / 2 + n_runs * len(items) / 2)
    tabulate = partial(_table, items, texts.lengths, looks, {spec.layer: spec.causal for spec, _ in among})
    decide = partial(head_verdicts, share=share, measure="kl", negligible=negligible)
    with running(model), progress_bar(total=total, desc="passes", unit_scale=True, disable=not progress) as bar:
        estimates = Estimates(model, items, n_texts, draws, seed, bar)
        for part in parts:
            estimates.add(part)
        found = _by_place(items, estimates)
        run, audited = _to_run(decide(tabulate(found, [])), exact, audit, seed)
        runs = _ExactRuns(model, items, texts, bar)
        bar.total = bar.n + n_texts * runs.n_passes([*run, *audited])
        found |= runs.on(audited, range(n_texts))
        found |= _until_decided(run, stages, runs, lambda some: decide(tabulate(some, run)))
    table = tabulate(found, [*run, *audited])
    table.attrs["audit"] = _audit(decide(table), audited, negligible)
    return reading.note(table)


def _stages(n_texts: int, looks: int) -> list[int]:
    """Return the numbers of texts that have been read at each look: doubled from one to the next."""
    stages = [-(-n_texts // 2**n) for n in reversed(range(looks))]
    if stages[0] < 2:
        raise ArgumentError(
            "heldout",
            f"must be at least two texts at each look, whose spread gives the standard errors: {2**looks} or more for "
            f"looks={looks}, got {n_texts}",
        )
    return stages


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


def _by_place(items: Sequence[NamedIntervention], estimates: Estimates) -> dict[Place, Float64[Tensor, "text"]]:
    return {
        (n, layer, head): estimates.curvature[n][layer][:, row]
        for n, item in enumerate(items)
        for layer, some in item.rows.items()
        for row, head in enumerate(some)
    }


def _places(items: Sequence[NamedIntervention], heads: Sequence[Head]) -> list[Place]:
    """Return the places of all rungs of some heads."""
    return [(n, *head) for head in heads for n, item in enumerate(items) if head[1] in item.rows.get(head[0], [])]


@dataclass(frozen=True, eq=False)
class _ExactRuns:
    """Runs of single heads with all rungs."""

    model: Any
    items: Sequence[NamedIntervention]
    texts: Texts
    bar: Any

    def n_passes(self, heads: Sequence[Head]) -> float:
        """Number of forward passes of each text."""
        return n_passes(self.model, _places(self.items, heads))

    def on(self, heads: Sequence[Head], texts: range) -> dict[Place, Float64[Tensor, "text"]]:
        """Run some heads on some texts."""
        parts = parts_of(self.texts, next_token_loss, texts, tokens=TOKENS)
        found = exact_effects(
            self.model, self.items, _places(self.items, heads), parts, len(self.texts.tokens), self.bar
        )
        return {place: outcome.divergences[texts.start : texts.stop] for place, outcome in found.items()}


def _until_decided(
    heads: Sequence[Head], stages: Sequence[int], runs: _ExactRuns, verdicts_of: Callable[[Divergences], pd.DataFrame]
) -> dict[Place, Float64[Tensor, "text"]]:
    """Run each head on more texts at each stage, until its verdict is decided."""
    found: dict[Place, Tensor] = {}
    for begin, end in pairwise([0, *stages]):
        if not heads:
            break
        for place, values in runs.on(heads, range(begin, end)).items():
            found[place] = torch.cat([found[place], values]) if begin else values
        verdicts = verdicts_of(found)
        undecided = _heads(verdicts[verdicts["simplest"] != verdicts["at_most"]])
        runs.bar.total -= (stages[-1] - end) * (runs.n_passes(heads) - runs.n_passes(undecided))
        heads = undecided
    return found


def _table(
    items: Sequence[NamedIntervention],
    lengths: Sequence[int],
    looks: int,
    causal: Mapping[int, bool],
    found: Divergences,
    exact: Sequence[Head],
) -> pd.DataFrame:
    """Tabulate divergences by head and rung, averaged over the texts that were read."""
    numbers = {item.name: n for n, item in enumerate(items)}
    rows: list[tuple[Any, ...]] = []
    for layer, some in items[0].rows.items():
        for head in some:
            by_rung = {name: (n, layer, head) for name, n in numbers.items() if (n, layer, head) in found}
            if not by_rung:
                continue
            n_texts = len(found[by_rung["uniform"]])
            predicted = torch.tensor(lengths[:n_texts], device="cpu") - 1  # a text counts by its predicted tokens
            blocks = Blocks(torch.arange(n_texts, device="cpu").repeat_interleave(predicted))
            by_token = {name: found[place].repeat_interleave(predicted) for name, place in by_rung.items()}
            shared = blocks.count, blocks.df, len(blocks.numbers), looks, causal[layer]
            for name, values in by_token.items():
                kl, share = blocks.mean(values), share_of_kl(values, by_token["uniform"], blocks)
                rows.append((layer, head, name, (layer, head) in exact, *kl, *share, *shared))
            rows.append((layer, head, "untouched", True, 0.0, 0.0, 1.0, 0.0, *shared))
    columns = ["layer", "head", "rung", "exact", "kl", "error_kl", "recovered_kl", "se_kl"]
    table = pd.DataFrame(rows, columns=[*columns, "blocks", "df", "tokens", "looks", "causal"])
    table = table.astype({"layer": "Int64", "head": "Int64"})
    table.insert(2, "control", "none")
    return table


def _heads(verdicts: pd.DataFrame) -> list[Head]:
    places = zip(verdicts["layer"], verdicts["head"], strict=True)
    return [(int(layer), None if pd.isna(head) else int(head)) for layer, head in places]


def _to_run(verdicts: pd.DataFrame, exact: int | None, audit: int, seed: int) -> tuple[list[Head], list[Head]]:
    """Choose the heads that are run: used or undecided, the largest divergence first; and some of the others."""
    unused = verdicts["verdict"] == "not used"
    run = _heads(verdicts[~unused].sort_values("gap_mean", ascending=False, kind="stable"))[:exact]
    others = _heads(verdicts[unused])
    drawn = np.random.default_rng(seed).permutation(len(others))[:audit]
    return run, [others[n] for n in sorted(drawn)]


def _audit(verdicts: pd.DataFrame, audited: Sequence[Head], negligible: float) -> dict[str, int]:
    """Count the audited heads whose divergence from exact runs contradicts their estimate."""
    some = verdicts[[head in audited for head in _heads(verdicts)]]
    above = some["gap_mean"] > negligible
    surely = above & ~some["verdict"].str.contains("not used")
    return {"audited": len(some), "above": int(above.sum()), "surely_above": int(surely.sum())}
