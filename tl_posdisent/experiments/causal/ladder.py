"""Attention ladder: replace attention by models of increasing freedom, and measure the loss."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Any, Literal, get_args

import pandas as pd
from tqdm.auto import tqdm

from tl_posdisent.additive.attention.rungs import PER_HEAD, RUNGS, WITHOUT_FIT, Rung
from tl_posdisent.experiments.causal.ladder_runs import MEAN, AnyRung, LadderRuns, Unit
from tl_posdisent.experiments.measuring.metrics import Metric, check_metric
from tl_posdisent.experiments.measuring.runs import note_failures
from tl_posdisent.hooks.hook_list import Chosen, Heads, any_heads
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.running.texts import Texts, Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.validation import check_choice, check_subset, listed
from tl_posdisent.utils.words import plural

LadderControl = Literal["shuffled"]
_END_RUNGS: tuple[Rung, ...] = ("uniform", "untouched")  # where ``recovered`` is 0 and 1
_COLUMNS = ["layer", "head", "control", "rung", "value", "loss", "recovered", "se", "recovered_mean", "se_mean"]
_COLUMNS += ["kl", "recovered_kl", "se_kl", "error_kl", "error", "blocks", "df", "parameters", "causal"]
_OF_PREDICTIONS = ["recovered_kl", "se_kl", "error_kl"]  # not in the table of a metric, whose blocks are texts
_OVER_TEXTS = ["se", "se_mean", "error"]  # not in the table of a metric of a single text


def attention_ladder(
    model: Any,
    tokens: Tokens,
    *,
    heldout: Tokens | None = None,
    metric: Metric | None = None,
    layers: Layers = None,
    heads: Heads = None,
    unit: Unit = "head",
    rungs: Collection[Rung] = RUNGS,
    controls: Collection[LadderControl] = get_args(LadderControl),
    progress: bool = True,
) -> pd.DataFrame:
    """Replace attention by additive attention of increasing freedom, and measure how much loss each rung recovers.

    The attention of one head, one layer, or all heads is replaced by each rung of ``substitute_attention``, from
    uniform attention to the head's own. Rungs ``"distance"``, ``"distance+sink"`` and ``"static"`` are fitted to all
    texts of ``tokens`` together and are causal on other texts: pass ``heldout``. ``"additive"`` has coefficients for
    each key of the predicted text itself, so it may leak information from later queries. With ``unit="all"``, layers
    are fitted one by one in the model whose earlier layers are already replaced.

    Shares of the loss have two baselines. Loss under uniform attention includes the harm of *wrong* attention, for
    instance if a head that idles at the first token is made to attend elsewhere. The head's mean output over ``tokens``
    shows how much its attention contributes: if that costs nothing, the head is not used, whatever uniform attention
    costs.

    Args:
        model, layers, heads, progress: as in ``head_ablation``; the model must return logits.
        tokens: texts to fit, as in ``head_ablation``; padded ids with their mask as a tokenizer returns them,
            ``{"input_ids": ids, "attention_mask": mask}``.
        heldout: texts whose loss is measured, no longer than those of ``tokens``; default ``tokens`` themselves.
        metric: as in ``head_ablation``, of the predicted texts.
        unit: what is replaced at a time: each ``"head"``, the chosen heads of each ``"layer"``, or ``"all"`` of them.
        rungs: which rungs to run; ``"uniform"``, ``"untouched"`` and the baseline ``"mean_output"`` are always added.
        controls: ``"shuffled"``: rungs that are fitted to the same tokens in another order, except the first. For
            random weights, run the ladder of each model of ``random_control``.

    Returns:
        One row per run: ``layer`` and ``head`` (missing where several are replaced); ``control``: ``"none"``
        or ``"shuffled"``; ``rung``; ``loss``, nats per predicted token; ``recovered``, the share of the
        loss between uniform attention (0) and the untouched model (1), NaN where these two differ by no more than a
        standard error or rounding; ``se``, its standard error; ``recovered_mean``, ``se_mean``, the same share from the
        head's mean output (0); ``kl``, KL(untouched ‖ this) of the predictions, nats per predicted token;
        ``recovered_kl``, the share of the divergence under uniform attention that this rung removes,
        1 - KL(untouched ‖ this) / KL(untouched ‖ uniform), NaN where the latter is within rounding; ``se_kl`` and
        ``error_kl``, the standard errors of ``recovered_kl`` and ``kl``; ``error``, the standard error of this loss
        minus the untouched one; ``blocks``, the number of blocks behind the standard errors: the texts or, if there are
        fewer than ten, equal blocks of each text, treated as independent; ``df``, their degrees of freedom;
        ``parameters``, the number fitted; ``causal``, whether predictions depend only on earlier tokens. With
        ``metric``, ``value`` is its mean over texts, ``recovered`` is its share, ``se``, ``se_mean`` and ``error`` are
        over texts (left out for a single text, for which any difference between the two ends counts), and
        ``recovered_kl``, ``se_kl`` and ``error_kl`` are left out.

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
    chosen_rungs = [*check_subset("rungs", rungs, RUNGS), *_END_RUNGS]
    rung_list: list[AnyRung] = [MEAN, *(rung for rung in RUNGS if rung in chosen_rungs)]
    chosen_controls = check_subset("controls", controls, get_args(LadderControl))
    if metric is not None:
        check_metric(metric)
    layers = listed("layers", layers)
    reading = read_model(model)
    fitted = read_texts(reading.model, tokens)
    with naming(tokens="heldout"):
        texts = fitted if heldout is None else read_texts(reading.model, heldout)
    heads_by_layer = any_heads(reading, layers, heads)
    _check_lengths(rung_list, texts, fitted, heads_by_layer)
    rungs_by_control = {"none": rung_list}
    if "shuffled" in chosen_controls:
        rungs_by_control["shuffled"] = [rung for rung in rung_list if rung != MEAN and rung not in WITHOUT_FIT]
    n_runs = _n_runs(heads_by_layer, unit, rungs_by_control)
    with tqdm(total=n_runs, desc="runs", disable=not progress) as bar:
        ladder = LadderRuns(reading, fitted, texts, unit, metric, bar)
        rows, failures = ladder.rows(heads_by_layer, rungs_by_control)
    table = pd.DataFrame(rows, columns=_COLUMNS).astype({"layer": "Int64", "head": "Int64"})
    single = _OVER_TEXTS if len(texts.tokens) < 2 else []
    table = table.drop(columns=["value"] if metric is None else _OF_PREDICTIONS + single)
    table = table.sort_values(["layer", "head"], kind="stable", ignore_index=True)
    _warn_of_no_effect(table, texts)
    return reading.note(note_failures(table, failures, n_runs))


def _n_runs(heads_by_layer: Chosen, unit: Unit, rungs_by_control: dict[str, list[AnyRung]]) -> int:
    """Count the runs: of each rung of each control except ``"untouched"``, for each head, layer or all."""
    n_heads = sum(len(heads) for _, heads in heads_by_layer)
    n_items = {"all": 1, "layer": len(heads_by_layer), "head": n_heads}[unit]
    return n_items * sum(rung != "untouched" for rungs in rungs_by_control.values() for rung in rungs)


def _check_lengths(rungs: Sequence[AnyRung], texts: Texts, fitted: Texts, heads_by_layer: Chosen) -> None:
    """Raise if predicted texts have distances for which a rung was not fitted."""
    reach = min(texts.longest, max(spec.window or texts.longest for spec, _ in heads_by_layer))
    if set(rungs) & set(PER_HEAD) and reach > fitted.longest:
        raise ArgumentError(
            "heldout",
            f"must be no longer than the texts of tokens, {fitted.longest}, got {texts.longest}: "
            "static rungs have no coefficients for larger distances; fit longer texts, cut the held-out ones, or leave "
            f"out rungs {', '.join(PER_HEAD)}",
        )


def _warn_of_no_effect(table: pd.DataFrame, texts: Texts) -> None:
    """Warn if no share is defined."""
    if len(table) and bool(table["recovered"].isna().all()):
        warnings.warn(
            "tokens: recovered is NaN in every row, because the attention of no chosen head changes the predictions by "
            f"more than rounding; the shortest text has {plural(min(texts.lengths), 'token')}: give longer texts, or "
            "other heads",
            stacklevel=3,
        )
