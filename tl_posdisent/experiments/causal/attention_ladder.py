"""Attention ladder: replace attention by models of increasing freedom, and measure the loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import isnan, nan
from typing import Any, Final, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.additive.attention.rungs import (
    PER_HEAD,
    RUNGS,
    WITHOUT_FIT,
    Rung,
    check_rung_options,
    n_parameters,
)
from tl_posdisent.hooks.ablate import StandIn, check_reach, replace_heads, stand_in
from tl_posdisent.hooks.fitted_attention import Attended, Stored, attended, fit_in_turn, stored_hooks
from tl_posdisent.hooks.hook_list import Chosen, Heads, Hooks, any_heads, joined
from tl_posdisent.hooks.substitute import BANDS, rung_hooks
from tl_posdisent.models.loading.random_init import described_copies, initial_scale, random_control
from tl_posdisent.models.reading.model_reading import Layers, ModelReading, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.model_parts import dtype_of
from tl_posdisent.models.running.texts import Texts, Tokens, read_texts
from tl_posdisent.utils.errors import ArgumentError, naming
from tl_posdisent.utils.precision import apart
from tl_posdisent.utils.progress import progress_bar
from tl_posdisent.utils.statistics import Blocks
from tl_posdisent.utils.validation import check_choice, check_seed, check_subset

from .metrics import Metric, as_numbers, check_metric, shuffled_order, values_of
from .runs import Change, Failures, Run, Runs, run_texts
from .token_losses import Unmodified

Unit = Literal["head", "layer", "all"]
Control = Literal["shuffled", "random"]
_CONTROLS: tuple[Control, ...] = ("shuffled",)
_ENDS: tuple[Rung, ...] = ("uniform", "untouched")  # where ``recovered`` is 0 and 1
MEAN: Final = "mean_output"
_Step = Rung | Literal["mean_output"]
"""A rung, or the head's mean output."""
_COLUMNS = ["layer", "head", "control", "rung", "value", "loss", "recovered", "se", "recovered_mean", "se_mean"]
_COLUMNS += ["kl", "recovered_kl", "se_kl", "error_kl", "error", "blocks", "df", "parameters", "causal"]
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
        seed: seed of the shuffled order and the random weights.

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
        ``parameters``, the number fitted; ``causal``, whether predictions depend only on earlier tokens. With
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
    check_seed(seed)
    reading = read_model(model, layers)
    fitted = read_texts(reading.model, tokens, attention_mask)
    with naming(tokens="heldout", attention_mask="heldout_mask"):
        texts = fitted if heldout is None else read_texts(reading.model, heldout, heldout_mask)
    if heldout is None and heldout_mask is not None:
        raise ArgumentError("heldout_mask", "must be None without heldout")
    if metric is not None:
        check_metric(metric)
    chosen = any_heads(reading, layers, heads)
    reach = min(texts.longest, max(spec.window or texts.longest for spec, _ in chosen))
    if set(wanted) & set(PER_HEAD) and reach > fitted.longest:
        raise ArgumentError(
            "heldout",
            f"must be no longer than the texts of tokens, {fitted.longest}, got {texts.longest}: "
            "static rungs have no coefficients for larger distances; fit longer texts, cut the held-out ones, or leave "
            f"out rungs {', '.join(PER_HEAD)}",
        )
    rung_list: list[_Step] = [MEAN, *(rung for rung in RUNGS if rung in wanted)]
    fitted_rungs = [rung for rung in rung_list if rung != MEAN and rung not in WITHOUT_FIT]
    n_items = {"all": 1, "layer": len(chosen), "head": sum(len(heads) for _, heads in chosen)}[unit]
    total = n_items * (len(rung_list) * (1 + ("random" in extra)) + len(fitted_rungs) * ("shuffled" in extra))
    with progress_bar(total=total, desc="runs", disable=not progress) as bar:
        ladder = _Ladder(reading, fitted, texts, unit, bands, rank, seed, metric, "static" in wanted, Failures(), bar)
        rows = ladder.rows(chosen, {"none": rung_list} | ({"shuffled": fitted_rungs} if "shuffled" in extra else {}))
        if "random" in extra:
            scales = [initial_scale(reading.model, "config")]
            copy = read_model(
                next(random_control(reading.model, [seed], std=scales)), [spec.layer for spec, _ in chosen]
            )
            rows += replace(ladder, reading=copy).rows(any_heads(copy, layers, heads), {"random": rung_list})
    table = pd.DataFrame(rows, columns=_COLUMNS).astype({"layer": "Int64", "head": "Int64"})
    table = table.drop(columns=["value"] if metric is None else _OF_PREDICTIONS)
    table = table.sort_values(["layer", "head"], kind="stable", ignore_index=True)
    if "random" in extra:
        table.attrs["random weights"] = described_copies("random", scales, [seed])
    return reading.note(ladder.failures.note(table))


_Row = tuple[Any, ...]
_Item = tuple[int | None, int | None, Chosen]
"""Layer and head of a row, and the heads that are replaced for it."""
_PutIn = Callable[[int, Chosen], Hooks]
"""From the number of a group of texts and some heads to hooks that put a rung in."""


@dataclass(frozen=True, eq=False)
class _Measured:
    """One run: losses and divergences by token, and the values behind the shares (losses, or a metric by text)."""

    losses: Float[Tensor, "predicted"]
    divergences: Float[Tensor, "predicted"]
    values: Float[Tensor, "sample"]


@dataclass(frozen=True, eq=False)
class _Ladder:
    """The ladder of one model, with the texts to which static rungs are fitted, and the texts to predict."""

    reading: ModelReading
    fitted: Texts
    texts: Texts
    unit: Unit
    bands: Sequence[int]
    rank: int
    seed: int
    metric: Metric | None
    with_keys: bool  # whether one of the rungs depends on them
    failures: Failures
    bar: Any
    baselines: dict[_Row, _Measured] = field(default_factory=dict)  # the last measured, by layer, head and rung

    def rows(self, chosen: Chosen, rungs: Mapping[str, Sequence[_Step]]) -> list[_Row]:
        """Measure the rows of each control. A control without baselines uses those of the previous one."""
        model, whole = self.reading.model, self.unit == "all"
        rows: list[_Row] = []
        with running(model):
            runs = Runs(model, self.texts, [] if whole else [spec.layer for spec, _ in chosen])
            clean = Unmodified.of(runs.clean, self.texts)
            untouched = _Measured(clean.losses, torch.zeros_like(clean.losses), self._values(runs.clean, clean.losses))
            means = self._means(chosen)
            for control, together in product(rungs, [chosen] if whole else [[each] for each in chosen]):
                ((spec, heads), *_) = together
                items: list[_Item] = [(None if whole else spec.layer, None, together)]
                if self.unit == "head":
                    items = [(spec.layer, head, [(spec, [head])]) for head in heads]
                found: list[dict[_Step, _Measured]] = [{} for _ in items]
                outputs = self._runs(runs, together, items, rungs[control], means, shuffled=control == "shuffled")
                for (rung, n), run in zip(product(rungs[control], range(len(items))), outputs, strict=True):
                    layer, head, _ = items[n]
                    found[n][rung] = self._measure(run, clean, untouched, layer, head) if run else untouched
                    self.bar.update()
                for item, measured in zip(items, found, strict=True):
                    rows += self._rows_of(item, measured, untouched, control)
        return rows

    def _means(self, chosen: Chosen) -> StandIn | ValueError:
        """Return the replacement of heads by their mean outputs over the fitted texts, or the error if that fails."""
        layers = [spec.layer for spec, _ in chosen]
        try:
            check_reach(self.reading, layers)
            return stand_in(self.reading.model, layers, "mean", self.fitted, self.seed)
        except ValueError as error:
            return error

    def _runs(
        self,
        runs: Runs,
        together: Chosen,
        items: Sequence[_Item],
        rungs: Sequence[_Step],
        means: StandIn | ValueError,
        *,
        shuffled: bool,
    ) -> Iterator[Run | None]:
        """Yield the run in which a rung replaces an item's attention, for each rung and item; None for the untouched.

        Rungs are fitted to the heads that are replaced together, as many rungs at a time as share a batch.
        """
        seen: dict[int, Attended] = {}
        at_a_time = max(1, runs.at_once // len(items))
        for first in range(0, len(rungs), at_a_time):
            some = rungs[first : first + at_a_time]
            put_in: dict[_Step, _PutIn] = {
                rung: self._put_in(together, rung, means, seen, shuffled=shuffled)
                for rung in some
                if rung != "untouched"
            }
            changed = self._all_at_once(together, put_in) if self.unit == "all" else self._each(runs, items, put_in)
            for rung, _ in product(some, items):
                yield None if rung == "untouched" else next(changed)

    def _put_in(
        self, together: Chosen, rung: _Step, means: StandIn | ValueError, seen: dict[int, Attended], *, shuffled: bool
    ) -> _PutIn:
        """Return a function of the number of a group of texts and some heads: hooks that put the rung in.

        ``seen`` holds the unmodified model's attention in each group of texts, for rungs that are fitted there.
        """
        if rung == MEAN:
            return partial(_mean_outputs, means)
        in_the_run = rung in WITHOUT_FIT or (self.unit == "all" and rung not in PER_HEAD and not shuffled)
        if in_the_run:
            return lambda group, where: rung_hooks(where, rung, self.bands, self.rank)
        stored = self._fits(together, rung, seen, shuffled=shuffled)
        return lambda group, where: stored_hooks(where, stored[group])

    def _all_at_once(self, together: Chosen, put_in: Mapping[_Step, _PutIn]) -> Iterator[Run]:
        def run(hooks_of: _PutIn) -> list[Any]:
            under = [hooks_of(group, together) for group in range(len(self.texts.groups))]
            return run_texts(self.reading.model, self.texts, under)

        return (partial(run, hooks_of) for hooks_of in put_in.values())

    def _each(self, runs: Runs, items: Sequence[_Item], put_in: Mapping[_Step, _PutIn]) -> Iterator[Run]:
        [spec] = {id(spec): spec for _, _, where in items for spec, _ in where}.values()

        def changes(rung: _Step, hooks_of: _PutIn) -> list[Change]:
            # Of one name: rungs that are put in at the same hook points.
            name = rung if rung in (MEAN, "static", "first_token") else "scores"

            def hooks(group: int, heads: Sequence[int]) -> Hooks:
                return hooks_of(group, [(spec, list(heads))])

            return [Change(name, tuple(heads), hooks) for _, _, [(_, heads)] in items]

        return runs.each(spec.layer, [change for item in put_in.items() for change in changes(*item)])

    def _fits(self, together: Chosen, rung: Rung, seen: dict[int, Attended], *, shuffled: bool) -> list[Stored]:
        """Fit a rung for each group of the predicted texts."""
        model, per_head, found = self.reading.model, rung in PER_HEAD, list[tuple[Tensor, Attended]]()
        for group in (self.fitted if per_head else self.texts).groups:
            tokens = group.tokens[:, shuffled_order(group.tokens.shape[1], self.seed)] if shuffled else group.tokens
            if id(group) not in seen and self.unit != "all":
                seen[id(group)] = attended(model, tokens, together, joined([]), with_keys=self.with_keys)
            found.append((tokens, seen.get(id(group), {})))
        stored = []
        for texts, fits in (zip(*some, strict=True) for some in ([found] if per_head else [[x] for x in found])):
            stored.append(fit_in_turn(model, texts, together, rung, seen=fits, bands=self.bands, rank=self.rank))
        return stored * len(self.texts.groups) if per_head else stored

    def _measure(
        self, run: Run, clean: Unmodified, untouched: _Measured, layer: int | None, head: int | None
    ) -> _Measured:
        def measure() -> _Measured:
            outputs = run()
            losses, divergences = clean.compare(outputs)
            values = self._values(outputs, losses)
            if len(values) != len(untouched.values):
                got = f"{len(untouched.values)} for the unmodified run and {len(values)} for another"
                raise ArgumentError("metric", f"must return the same number of values for each run, got {got}")
            return _Measured(losses, divergences, values)

        return self.failures.attempt(measure, layer, head) or _Measured(
            torch.full_like(untouched.losses, nan),
            torch.full_like(untouched.divergences, nan),
            torch.full_like(untouched.values, nan),
        )

    def _values(self, outputs: list[Any], losses: Tensor) -> Float[Tensor, "sample"]:
        if self.metric is None:
            return losses
        return as_numbers(values_of(self.metric, outputs, self.texts), len(self.texts.tokens)).reshape(-1)

    def _rows_of(
        self, item: _Item, measured: dict[_Step, _Measured], untouched: _Measured, control: str
    ) -> Iterator[_Row]:
        layer, head, where = item
        blocks, of_tokens, shares = self._blocks(untouched), self._blocks_of_tokens(), []
        for name in ("uniform", MEAN):
            baseline = measured.get(name) or self.baselines[layer, head, name]
            self.baselines[layer, head, name] = baseline
            shares.append(self._shares_of(baseline, untouched, blocks))
        uniform, dtype = self.baselines[layer, head, "uniform"], dtype_of(self.reading.model)
        unmodified_loss = untouched.losses.mean().item()
        for rung, run in measured.items():
            value = run.values.mean().item()
            _, error = blocks.mean(run.values - untouched.values)
            both = [x for share in shares for x in share(run)]
            lengths = [self.fitted.longest] if rung == MEAN or rung in PER_HEAD else self.texts.lengths
            size = sum(len(heads) * self._size(rung, spec, n) for spec, heads in where for n in lengths)
            static = rung in WITHOUT_FIT or ((rung in PER_HEAD or rung == MEAN) and self.texts is not self.fitted)
            causal = static and all(spec.causal for spec, _ in where)
            loss = run.losses.mean().item()
            kl, error_kl = of_tokens.mean(run.divergences - untouched.divergences)
            share = share_of_kl(run.divergences, uniform.divergences, of_tokens, unmodified_loss, dtype)
            divergence = (kl, *share, error_kl)
            counts = (blocks.count, blocks.df, size)
            yield layer, head, control, rung, value, loss, *both, *divergence, error, *counts, causal

    def _blocks(self, untouched: _Measured) -> Blocks:
        """Return blocks of predicted tokens, or of a metric's values."""
        if self.metric is not None:
            return Blocks.single(len(untouched.values))
        return self._blocks_of_tokens()

    def _blocks_of_tokens(self) -> Blocks:
        """Return blocks of predicted tokens: the texts, or parts of them."""
        return Blocks.of_texts([group.tokens.shape[1] - 1 for group in self.texts.groups for _ in group.rows])

    def _size(self, rung: _Step, spec: AttentionSpec, length: int) -> int:
        """Count the parameters that a rung fits for one head."""
        if rung == MEAN:
            return spec.d_head
        return n_parameters(rung, spec.mask(length), spec.d_head, bands=self.bands, rank=self.rank)

    def _shares_of(
        self, baseline: _Measured, untouched: _Measured, blocks: Blocks
    ) -> Callable[[_Measured], tuple[float, float]]:
        """Return a function of a run: its share between a baseline (0) and the untouched model (1), and the error."""
        effect = baseline.values - untouched.values
        gap, noise = blocks.mean(effect)
        end = baseline.values.mean().item()
        if abs(gap) <= noise or isnan(gap) or not apart(end, end - gap, dtype_of(self.reading.model)):
            return lambda run: (nan, nan)
        return lambda run: blocks.ratio(baseline.values - run.values, effect)


def share_of_kl(
    kl: Float[Tensor, "observation"],
    uniform: Float[Tensor, "observation"],
    blocks: Blocks,
    loss: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[float, float]:
    """Compute the share of the divergence under uniform attention that a rung removes, and its standard error.

    NaN where that divergence is within rounding of the model's loss.
    """
    whole = uniform.mean().item()
    if isnan(whole) or not apart(loss + whole, loss, dtype):
        return nan, nan
    return blocks.ratio(uniform - kl, uniform)


def _mean_outputs(means: StandIn | ValueError, group: int, where: Chosen) -> Hooks:
    """Put in the mean outputs, or raise the error by which these failed."""
    if isinstance(means, ValueError):
        raise means
    return joined([replace_heads(spec, heads, means) for spec, heads in where])
