"""Attention ladder: replace attention by models of increasing freedom, and measure the loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import nan
from typing import Any, Final, Literal, NamedTuple, get_args

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.additive.attention.rungs import PER_HEAD, RUNGS, WITHOUT_FIT, Rung, n_parameters
from tl_posdisent.experiments.causal.recovered_share import share_between, share_of_kl
from tl_posdisent.experiments.measuring.failures import note_failures
from tl_posdisent.experiments.measuring.metrics import (
    Metric,
    as_numbers,
    check_metric,
    is_separable,
    metric_values,
    values_of,
)
from tl_posdisent.experiments.measuring.part_runs import Head, HooksOf
from tl_posdisent.experiments.measuring.run_changes import Compare, run_changes
from tl_posdisent.experiments.measuring.token_losses import by_token, predicted
from tl_posdisent.hooks.ablate import ablate_heads
from tl_posdisent.hooks.hook_list import Chosen, Heads, Hooks, any_heads, pairs_of
from tl_posdisent.hooks.substitute_attention import fit_layers, rung_hooks, stored_hooks
from tl_posdisent.models.reading.model_reading import Layers, ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.model_parts import dtype_of
from tl_posdisent.models.running.texts import Texts, TokenIds, Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.statistics import Blocks, degrees_of_freedom, difference, mean
from tl_posdisent.utils.validation import check_choice, check_subset, listed
from tl_posdisent.utils.words import plural

Unit = Literal["head", "layer", "all"]
LadderControl = Literal["shuffled"]
MEAN: Final = "mean_output"
AnyRung = Rung | Literal["mean_output"]
"""A rung, or the head's mean output."""
_Run = tuple[str, AnyRung]
"""A control, or ``"none"``, and a rung."""
_SHUFFLE_SEED = 0  # of the one order of the control "shuffled"
Row = dict[str, Any]
"""A row of the table, or some of its columns."""
_END_RUNGS: tuple[Rung, ...] = ("uniform", "untouched")  # where ``recovered`` is 0 and 1
_COLUMNS = ["layer", "head", "rung", "parameters", "causal", "blocks", "df", "recovered_mean", "se_mean"]
_COLUMNS += ["kl", "error_kl", "recovered_kl", "se_kl", "value", "loss", "error", "recovered", "se", "control"]
_OF_PREDICTIONS = ["recovered_kl", "se_kl", "error_kl"]  # not in the table of a metric, whose blocks are texts
_OVER_TEXTS = ["se", "se_mean", "error"]  # not in the table of a metric of a single text


def attention_ladder(
    model: Any,
    tokens: Tokens,
    *,
    heldout: Tokens | None = None,
    ignore: TokenIds | None = None,
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
        ignore: as in ``head_ablation``, in losses and in the mean output; fits of attention have all queries.
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
        >>> from tl_posdisent import attention_ladder, cut_text, demo_text, load_demo_model
        >>> model = load_demo_model()
        >>> tokens = cut_text(model, demo_text(), length=64, texts=2)
        >>> rungs = ["uniform", "distance+sink", "static", "untouched"]
        >>> table = attention_ladder(
        ...     model, tokens[:1], heldout=tokens[1:], layers=4, unit="layer", rungs=rungs, progress=False
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
        check_metric(metric, ignore)
    layers = listed("layers", layers)
    reading = read_model(model)
    fitted = read_texts(reading.model, tokens, ignore=ignore)
    with naming(tokens="heldout"):
        texts = fitted if heldout is None else read_texts(reading.model, heldout, ignore=ignore)
    chosen = any_heads(reading, layers, heads)
    _check_lengths(rung_list, texts, fitted, chosen)
    runs: list[_Run] = [("none", rung) for rung in rung_list]
    if "shuffled" in chosen_controls:
        runs += [("shuffled", rung) for rung in rung_list if rung != MEAN and rung not in WITHOUT_FIT]
    changes, heads_of = dict[str, Hooks | HooksOf](), dict[str, list[list[Head]]]()
    with tqdm(desc="runs", disable=not progress) as bar:
        for control, rung in (run for run in runs if run[1] != "untouched"):
            # What is fitted to each text takes memory, so layer by layer.
            single_layers = control == "shuffled" and rung not in PER_HEAD and unit != "all"
            for part in [[layer] for layer in chosen] if single_layers else [chosen]:
                name = f"{control} {rung} from layer {part[0][0].layer}"
                changes[name] = _rung_hooks(reading, fitted, texts, part, rung, control, in_turn=unit == "all")
                heads_of[name] = [pairs_of(item.chosen) for item in _items(part, unit)]
        bar.reset(len(texts.tokens) * sum(map(len, heads_of.values())))
        together = metric is not None and not is_separable(metric)
        found = run_changes(reading, texts, changes, heads_of, _losses_and_metric(metric), together=together, bar=bar)
    items = _items(chosen, unit)
    by_run = {
        run: torch.cat([found[name] for name in changes if name.startswith(f"{run[0]} {run[1]} from")])
        if run[1] != "untouched"
        else found.unmodified.expand(len(items), *found.unmodified.shape)
        for run in runs
    }
    columns = _columns(by_run, texts, dtype_of(reading.model))
    rows = [
        {"layer": item.layer, "head": item.head, "control": control, "rung": rung}
        | _fitted(rung, item.chosen, fitted, texts)
        | {name: values[place, n].item() for name, values in columns.items()}
        for n, item in enumerate(items)
        for place, (control, rung) in enumerate(runs)
    ]
    table = pd.DataFrame(rows, columns=_COLUMNS).astype({"layer": "Int64", "head": "Int64", "blocks": "int64"})
    _warn_without_shares(table, texts, metric)
    single = _OVER_TEXTS if len(texts.tokens) < 2 else []
    table = table.drop(columns=["value"] if metric is None else _OF_PREDICTIONS + single)
    return reading.note(note_failures(table, found.failures, found.n_runs))


class _Item(NamedTuple):
    """Heads that are replaced at a time, and the layer and head of their rows; None for several."""

    layer: int | None
    head: int | None
    chosen: Chosen


def _items(chosen: Chosen, unit: Unit) -> list[_Item]:
    if unit == "all":
        return [_Item(None, None, chosen)]
    if unit == "layer":
        return [_Item(spec.layer, None, [(spec, heads)]) for spec, heads in chosen]
    return [_Item(spec.layer, head, [(spec, [head])]) for spec, heads in chosen for head in heads]


# --- hooks of a rung


def _rung_hooks(
    reading: ModelReading, fitted: Texts, texts: Texts, chosen: Chosen, rung: AnyRung, control: str, *, in_turn: bool
) -> Hooks | HooksOf:
    """Return hooks that put a rung in: fitted to other texts, in the run itself, or to the text in another order."""
    if rung == MEAN:
        try:
            return ablate_heads(reading, pairs_of(chosen), mode="mean", reference=fitted)
        except ValueError as error:  # of each of its runs
            return partial(_raise, error)
    if rung in PER_HEAD:
        read = fitted.shuffled(_SHUFFLE_SEED) if control == "shuffled" else [group.tokens for group in fitted.groups]
        return stored_hooks(chosen, fit_layers(reading.model, read, chosen, rung, in_turn=in_turn))
    if control == "shuffled":
        return partial(_shuffled_hooks, reading, texts, rung, in_turn)
    return rung_hooks(chosen, rung)


def _raise(error: ValueError, rows: Sequence[int], heads: Sequence[Head]) -> Hooks:
    raise error


def _shuffled_hooks(
    reading: ModelReading, texts: Texts, rung: Rung, in_turn: bool, rows: list[int], heads: list[Head]
) -> Hooks:
    """Fit a rung to each of some texts in another order, and return hooks that put it in."""
    chosen, (tokens,) = any_heads(reading, None, heads), texts.take(rows).shuffled(_SHUFFLE_SEED)
    return stored_hooks(chosen, fit_layers(reading.model, [tokens], chosen, rung, in_turn=in_turn))


def _fitted(rung: AnyRung, chosen: Chosen, fitted: Texts, texts: Texts) -> Row:
    """Return how many parameters a rung has for these heads, and whether its predictions are causal."""
    of_head = rung == MEAN or rung in PER_HEAD
    lengths = [fitted.longest] if of_head else texts.lengths
    static = rung in WITHOUT_FIT or (of_head and texts is not fitted)
    n = sum(len(heads) * _n_parameters(rung, spec, length) for spec, heads in chosen for length in lengths)
    return {"parameters": n, "causal": static and all(spec.causal for spec, _ in chosen)}


def _n_parameters(rung: AnyRung, spec: AttentionSpec, length: int) -> int:
    """Count the parameters that a rung fits for one head."""
    return spec.d_head if rung == MEAN else n_parameters(rung, spec.mask(length), spec.d_head)


# --- comparison of runs


def _losses_and_metric(metric: Metric | None) -> Compare:
    """Compare texts by losses and divergences by token and, with a metric, by its value, beside all tokens of a text.

    A number for all texts stands beside the first text.
    """
    if metric is None:
        return by_token

    def read(
        unmodified: list[Any], texts: Texts, rows: list[int]
    ) -> Callable[[list[Any]], Float64[Tensor, "text predicted 3"]]:
        tokens, values = by_token(unmodified, texts, rows), metric_values(metric)(unmodified, texts, rows)
        by_text = is_separable(metric) or as_numbers(values_of(metric, unmodified, texts), len(rows)).ndim

        def compare(outputs: list[Any]) -> Float64[Tensor, "text predicted 3"]:
            found, numbers = tokens(outputs), values(outputs).clone()
            if not by_text:
                numbers[1:] = nan
            return torch.cat([found, numbers[:, None, None].expand(-1, found.shape[1], 1)], -1)

        return compare

    return read


def _columns(
    by_run: Mapping[_Run, Float64[Tensor, "item text predicted _"]], texts: Texts, dtype: torch.dtype
) -> dict[str, Float64[Tensor, "run item"]]:
    """Compute the columns of all runs, with their shares between the baselines and the untouched model.

    Args:
        by_run: values of each run, as ``_losses_and_metric`` returns them, including the untouched one.
    """
    inside, places = predicted(texts), {run: n for n, run in enumerate(by_run)}
    blocks = Blocks.of_texts(inside.sum(1).tolist())
    of_blocks = torch.stack([blocks.means(x[:, inside].movedim(1, 0)) for x in by_run.values()], 1)
    losses, divergences = of_blocks[..., 0], of_blocks[..., 1]
    values, sizes = losses, blocks.sizes  # behind the shares: losses, or the metric of each text
    whole = by_run["none", "untouched"]
    if whole.shape[-1] > 2:
        known = ~whole[0, :, 0, 2].isnan()
        values = torch.stack([x[:, known, 0, 2].T for x in by_run.values()], 1)
        sizes = torch.ones(len(values))
    untouched, uniform = (values[:, [places["none", rung]]] for rung in ("untouched", "uniform"))
    columns = {"value": mean(values, sizes).value, "loss": mean(losses, blocks.sizes).value}
    baselines = {("recovered", "se"): uniform, ("recovered_mean", "se_mean"): values[:, [places["none", MEAN]]]}
    for names, baseline in baselines.items():
        columns |= zip(names, share_between(values, baseline, untouched, sizes, dtype), strict=True)
    loss, diverged = columns["loss"][places["none", "untouched"]], divergences[:, [places["none", "uniform"]]]
    columns["kl"], columns["error_kl"] = mean(divergences, blocks.sizes)
    columns["recovered_kl"], columns["se_kl"] = share_of_kl(divergences, diverged, blocks.sizes, loss, dtype)
    columns["error"] = difference(values, untouched, sizes).error
    columns["blocks"] = torch.full_like(columns["loss"], len(sizes))
    columns["df"] = torch.full_like(columns["loss"], degrees_of_freedom(sizes))
    return columns


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


def _warn_without_shares(table: pd.DataFrame, texts: Texts, metric: Metric | None) -> None:
    """Warn if no share is defined, and say why: the predictions do not change, or the loss does not surely."""
    if not len(table) or not bool(table["recovered"].isna().all()):
        return
    if bool(table["recovered_kl"].isna().all()):
        why = (
            "the attention of no chosen head changes the predictions by more than rounding; the shortest text has "
            f"{plural(min(texts.lengths), 'token')}: give longer texts, or other heads"
        )
    else:
        noise = "a standard error" if bool(table["error"].notna().any()) else "rounding"
        instead = ", or read recovered_kl, the share of the divergence" if metric is None else ""
        why = (
            f"uniform attention changes the {'loss' if metric is None else 'metric'} by no more than {noise}, although "
            f"the predictions change: give more texts{instead}"
        )
    warnings.warn(f"tokens: recovered is NaN in every row, because {why}", stacklevel=3)
