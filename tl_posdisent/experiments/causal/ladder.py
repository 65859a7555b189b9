"""Attention ladder: replace attention by models of increasing freedom, and measure the loss."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import pandas as pd
from torch import Tensor

from tl_posdisent.additive.attention.rungs import PER_HEAD, RUNGS, WITHOUT_FIT, Rung, check_rung_options
from tl_posdisent.experiments.causal.ladder_estimates import screen_heads
from tl_posdisent.experiments.causal.ladder_runs import MEAN, AnyRung, LadderRuns, Row, Unit
from tl_posdisent.experiments.measuring.metrics import Metric, check_metric, next_token_loss
from tl_posdisent.experiments.measuring.runs import Failures
from tl_posdisent.experiments.measuring.text_parts import differentiable_texts
from tl_posdisent.hooks.hook_list import Chosen, Heads, any_heads
from tl_posdisent.hooks.substitute import BANDS
from tl_posdisent.models.loading.random_init import described_copies, initial_scale, random_control
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.running.texts import Texts, Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.validation import check_choice, check_integer, check_seed, check_subset, listed
from tl_posdisent.utils.words import plural

Control = Literal["shuffled", "random"]
_CONTROLS: tuple[Control, ...] = ("shuffled",)
_ENDS: tuple[Rung, ...] = ("uniform", "untouched")  # where ``recovered`` is 0 and 1
_COLUMNS = ["layer", "head", "control", "rung", "value", "loss", "recovered", "se", "recovered_mean", "se_mean"]
_COLUMNS += ["kl", "recovered_kl", "se_kl", "error_kl", "error", "blocks", "df", "parameters", "causal", "exact"]
_OF_PREDICTIONS = ["recovered_kl", "se_kl", "error_kl"]  # not in the table of a metric, whose blocks are texts


def attention_ladder(
    model: Any,
    tokens: Tokens,
    *,
    heldout: Tokens | None = None,
    attention_mask: Tensor | None = None,
    heldout_mask: Tensor | None = None,
    metric: Metric | None = None,
    layers: Layers = None,
    heads: Heads = None,
    unit: Unit = "head",
    rungs: Collection[Rung] = RUNGS,
    controls: Collection[Control] = _CONTROLS,
    bands: Sequence[int] = BANDS,
    rank: int = 1,
    exact: int | Literal["all"] = "all",
    draws: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Replace attention by additive attention of increasing freedom, and measure how much loss each rung recovers.

    The attention of one head, one layer, or all heads is replaced by each rung of ``substitute_attention``, from
    uniform attention to the head's own. Rungs ``"distance"``, ``"distance+sink"`` and ``"static"`` are fitted to all
    texts of ``tokens`` together and are causal on other texts: pass ``heldout``. The others have coefficients for each
    key of the predicted text itself, so they may leak information from later queries. With ``unit="all"``, layers are
    fitted one by one in the model whose earlier layers are already replaced.

    Shares of the loss have two baselines. Loss under uniform attention includes the harm of *wrong* attention, for
    instance if a head that idles at the first token is made to attend elsewhere. The head's mean output over ``tokens``
    shows how much its attention contributes: if that costs nothing, the head is not used, whatever uniform attention
    costs.

    Args:
        model, tokens, attention_mask, layers, heads, progress: as in ``head_ablation``; the model must return logits.
        heldout: texts whose loss is measured, no longer than those of ``tokens``; default ``tokens`` themselves.
        heldout_mask: the mask of ``heldout``.
        metric: as in ``head_ablation``, of the predicted texts.
        unit: what is replaced at a time: each ``"head"``, the chosen heads of each ``"layer"``, or ``"all"`` of them.
        rungs: which rungs to run; ``"uniform"``, ``"untouched"`` and the baseline ``"mean_output"`` are always added.
        controls: ``"shuffled"`` (default): rungs fitted to the same tokens in another order, except the first;
            ``"random"``: the whole ladder in a copy with random weights, without your hooks (``random_control``).
        bands: distances at which a new band of ``"banded"`` and ``"low-rank"`` begins.
        rank: rank of ``"low-rank"``.
        exact: with a number, at most so many heads are run: by the search of ``head_effects``, those whose predictions
            diverge most with the head's mean output. For the others, divergences of rungs that are not fitted to the
            predicted text are estimated by curvature, and there are no losses. Needs ``unit="head"`` and no ``metric``.
        draws: draws of labels for each text, for these estimates, as in ``head_effects``.
        seed: seed of the shuffled order, the random weights and the labels.

    Returns:
        One row per run: ``layer`` and ``head`` (missing where several are replaced); ``control``: ``"none"``,
        ``"shuffled"`` or ``"random"``; ``rung``; ``loss``, nats per predicted token; ``recovered``, the share of the
        loss between uniform attention (0) and the untouched model (1), NaN where these two differ by no more than a
        standard error or rounding; ``se``, its standard error; ``recovered_mean``, ``se_mean``, the same share from the
        head's mean output (0); ``kl``, KL(untouched ‖ this) of the predictions, nats per predicted token;
        ``recovered_kl``, the share of the divergence under uniform attention that this rung removes,
        1 - KL(untouched ‖ this) / KL(untouched ‖ uniform), NaN where the latter is within rounding; ``se_kl`` and
        ``error_kl``, the standard errors of ``recovered_kl`` and ``kl``; ``error``, the standard error of this loss
        minus the untouched one; ``blocks``, the number of blocks behind the standard errors: the texts or, if there are
        fewer than ten, equal blocks of each text, treated as independent; ``df``, their degrees of freedom;
        ``parameters``, the number fitted; ``causal``, whether predictions depend only on earlier tokens; ``exact``,
        whether the head was run: without, ``kl`` and its shares are estimates, with each text as one block, and
        ``attrs["search"]`` says what was run and what no other head exceeds, as in ``head_effects``. With
        ``metric``, ``value`` is its mean over texts, ``recovered`` is its share, ``se`` and ``error`` are over texts
        (NaN for a single text, for which any difference between the two ends counts), and ``recovered_kl``, ``se_kl``
        and ``error_kl`` are left out.

    Raises:
        ValueError: an unknown option; held-out texts longer than those of ``tokens``; otherwise as ``head_ablation``
            and ``substitute_attention``.

    Example:
        >>> from tl_posdisent import attention_ladder, demo_tokens, load_demo_model
        >>> model, tokens = load_demo_model(), demo_tokens(length=128)
        >>> rungs = ["uniform", "distance+sink", "static", "untouched"]
        >>> table = attention_ladder(
        ...     model, tokens[:, :64], heldout=tokens[:, 64:], layers=4, unit="layer", rungs=rungs, progress=False
        ... )
        >>> table = table[table["control"] == "none"].set_index("rung")
        >>> table["recovered"][["uniform", "untouched"]].tolist(), bool(table["causal"].all())
        ([0.0, 1.0], True)
    """
    check_choice("unit", unit, get_args(Unit))
    wanted = [*check_subset("rungs", rungs, RUNGS), *_ENDS]
    extra = check_subset("controls", controls, get_args(Control))
    check_rung_options(bands, rank)
    check_integer("draws", draws, 1)
    if exact != "all":
        _check_exact(exact, unit, metric)
    check_seed(seed)
    layers = listed("layers", layers)
    reading = read_model(model, layers)
    fitted = read_texts(reading.model, tokens, attention_mask)
    with naming(tokens="heldout", attention_mask="heldout_mask"):
        texts = fitted if heldout is None else read_texts(reading.model, heldout, heldout_mask)
    if heldout is None and heldout_mask is not None:
        raise ArgumentError("heldout_mask", "must be None without heldout")
    if metric is not None:
        check_metric(metric)
    chosen = any_heads(reading, layers, heads)
    rung_list: list[AnyRung] = [MEAN, *(rung for rung in RUNGS if rung in wanted)]
    _check_lengths(rung_list, texts, fitted, chosen)
    rows: list[Row] = []
    to_run, search = chosen, dict[str, Any]()
    if exact != "all":
        of_texts = (tokens, attention_mask) if heldout is None else (heldout, heldout_mask)
        _, parts = differentiable_texts(reading.model, *of_texts, next_token_loss)
        run, rows, search = screen_heads(
            reading, fitted, texts, parts, chosen, rung_list, exact=exact, draws=draws, seed=seed, progress=progress
        )
        to_run = [(spec, [head for head in some if (spec.layer, head) in run]) for spec, some in chosen]
        to_run = [(spec, some) for spec, some in to_run if some]
    fitted_rungs = [rung for rung in rung_list if rung != MEAN and rung not in WITHOUT_FIT]
    n_items = {"all": 1, "layer": len(to_run), "head": sum(len(heads) for _, heads in to_run)}[unit]
    n_runs = len(rung_list) - 1  # none for "untouched"
    total = n_items * (n_runs * (1 + ("random" in extra)) + len(fitted_rungs) * ("shuffled" in extra))
    scales = [initial_scale(reading.model, "config")] if "random" in extra else []
    failures = Failures()
    with progress_bar(total=total, desc="runs", disable=not progress) as bar:
        ladder = LadderRuns(
            reading,
            fitted,
            texts,
            unit=unit,
            bands=bands,
            rank=rank,
            seed=seed,
            metric=metric,
            failures=failures,
            bar=bar,
        )
        if to_run:
            rungs_of: dict[str, list[AnyRung]] = {"none": rung_list}
            rungs_of |= {"shuffled": [*fitted_rungs]} if "shuffled" in extra else {}
            rows += ladder.rows(to_run, rungs_of)
        if to_run and scales:
            copy = read_model(
                next(random_control(reading.model, [seed], std=scales)), [spec.layer for spec, _ in to_run]
            )
            specs = {spec.layer: spec for spec in copy.specs()}
            copied = [(specs[spec.layer], some) for spec, some in to_run]
            rows += replace(ladder, reading=copy).rows(copied, {"random": rung_list})
    table = pd.DataFrame(rows, columns=_COLUMNS).astype({"layer": "Int64", "head": "Int64"})
    table = table.drop(columns=["value"] if metric is None else _OF_PREDICTIONS)
    table = table.sort_values(["layer", "head"], kind="stable", ignore_index=True)
    if len(table) and bool(table["recovered"].isna().all()):
        warnings.warn(
            "tokens: recovered is NaN in every row, because the attention of no chosen head changes the predictions by "
            f"more than rounding; the shortest text has {plural(min(texts.lengths), 'token')}: give longer texts, or "
            "other heads",
            stacklevel=2,
        )
    table.attrs |= {"random weights": described_copies("random", scales, [seed])} if scales else {}
    table.attrs |= {"search": search} if search else {}
    return reading.note(failures.note(table))


def _check_lengths(rungs: Sequence[AnyRung], texts: Texts, fitted: Texts, chosen: Chosen) -> None:
    """Raise if predicted texts have distances for which a rung was not fitted."""
    reach = min(texts.longest, max(spec.window or texts.longest for spec, _ in chosen))
    if set(rungs) & set(PER_HEAD) and reach > fitted.longest:
        raise ArgumentError(
            "heldout",
            f"must be no longer than the texts of tokens, {fitted.longest}, got {texts.longest}: "
            "static rungs have no coefficients for larger distances; fit longer texts, cut the held-out ones, or leave "
            f"out rungs {', '.join(PER_HEAD)}",
        )


def _check_exact(exact: Any, unit: Unit, metric: Metric | None) -> None:
    """Validate a number of heads to be run, and that the others can be estimated."""
    check_integer("exact", exact, 0, why="a number of heads, or 'all'")
    if unit != "head" or metric is not None:
        given = f"unit={unit!r}" if unit != "head" else "a metric"
        raise ArgumentError("exact", f"must be 'all' with {given}: estimates are divergences of single heads")
