"""Runs of the attention ladder: rungs in place of the attention of a head, a layer or all heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import nan
from typing import Any, Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posdisent.additive.attention.rungs import PER_HEAD, WITHOUT_FIT, Rung, n_parameters
from tl_posdisent.experiments.causal.recovered_share import share_between, share_of_kl
from tl_posdisent.experiments.measuring.metrics import Metric, as_numbers, values_of
from tl_posdisent.experiments.measuring.runs import Change, Failure, Run, Runs, Shortcuts, attempt, run_texts
from tl_posdisent.experiments.measuring.token_losses import Unmodified
from tl_posdisent.hooks.ablate import StandIn, check_reach, replace_heads, stand_in
from tl_posdisent.hooks.fitted_attention import fit_layers, stored_hooks
from tl_posdisent.hooks.hook_list import Chosen, Hooks, joined
from tl_posdisent.hooks.substitute import rung_hooks
from tl_posdisent.models.reading.model_reading import ModelReading
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.model_parts import dtype_of
from tl_posdisent.models.running.texts import Texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.statistics import Blocks

Unit = Literal["head", "layer", "all"]
MEAN: Final = "mean_output"
_SHUFFLE_SEED = 0  # of the one order of the control "shuffled"
AnyRung = Rung | Literal["mean_output"]
"""A rung, or the head's mean output."""
Row = dict[str, Any]
"""A row of the table of ``attention_ladder``, by column."""
RungHooks = Callable[[int, Chosen], Hooks]
"""From the number of a group of texts and the heads to replace to hooks that put a rung in."""


@dataclass(frozen=True, eq=False)
class _Item:
    """Heads that are replaced together, and the layer and head of their rows; None for several."""

    layer: int | None
    head: int | None
    heads_by_layer: Chosen


@dataclass(frozen=True, eq=False)
class _Measured:
    """One run: losses and divergences by token, and the values behind the shares (losses, or a metric by text)."""

    losses: Float[Tensor, " predicted"]
    divergences: Float[Tensor, " predicted"]
    values: Float[Tensor, " sample"]


@dataclass(frozen=True, eq=False)
class LadderRuns:
    """The ladder of one model, with the texts to which static rungs are fitted, and the texts to predict.

    The bar counts runs.
    """

    reading: ModelReading
    fitted: Texts
    texts: Texts
    unit: Unit
    metric: Metric | None
    bar: Any

    def rows(
        self, heads_by_layer: Chosen, rungs_by_control: Mapping[str, Sequence[AnyRung]]
    ) -> tuple[list[Row], list[Failure]]:
        """Measure the rows of each control, and return them with the failures of runs.

        Shares of all controls have the baselines of the first one.
        """
        model, whole = self.reading.model, self.unit == "all"
        rows, failures = list[Row](), list[Failure]()
        baselines: dict[tuple[int | None, int | None], dict[AnyRung, _Measured]] = {}
        with running(model):
            runs = Runs(model, self.texts, [] if whole else [spec.layer for spec, _ in heads_by_layer])
            shortcuts, clean = runs.shortcuts, Unmodified.of(runs.clean, self.texts)
            untouched = _Measured(clean.losses, torch.zeros_like(clean.losses), self._values(runs.clean, clean.losses))
            for control, rungs in rungs_by_control.items():
                shuffled = control == "shuffled"
                # In one pass for all layers; what is fitted to each text takes memory, so layer by layer.
                per_head = [rung for rung in rungs if rung == MEAN or rung in PER_HEAD]
                fitted = {rung: self._rung_hooks(heads_by_layer, rung, shuffled=shuffled) for rung in per_head}
                for part in [heads_by_layer] if whole else [[layer] for layer in heads_by_layer]:
                    hooks: dict[AnyRung, RungHooks] = {
                        rung: fitted.get(rung) or self._rung_hooks(part, rung, shuffled=shuffled)
                        for rung in rungs
                        if rung != "untouched"
                    }
                    items = self._items(part)
                    part_runs = self._runs(runs, part, items, hooks, shortcuts)
                    measured_by_item: list[dict[AnyRung, _Measured]] = [{} for _ in items]
                    for (rung, n), (run, known) in zip(product(hooks, range(len(items))), part_runs, strict=True):
                        compare = partial(self._compare, run, clean, untouched)
                        outcome = attempt(compare, items[n].layer, items[n].head)
                        failures += [outcome] if isinstance(outcome, Failure) else []
                        measured_by_item[n][rung] = _nan_like(untouched) if isinstance(outcome, Failure) else outcome
                        shortcuts = known  # for the next layer
                        self.bar.update()
                    for item, measured in zip(items, measured_by_item, strict=True):
                        if "uniform" in measured:
                            baselines[item.layer, item.head] = {rung: measured[rung] for rung in ("uniform", MEAN)}
                        if "untouched" in rungs:
                            measured["untouched"] = untouched
                        item_baselines = baselines[item.layer, item.head]
                        rows += self._rows_of(item, measured, item_baselines, untouched, clean.blocks, control)
        return rows, failures

    def _items(self, part: Chosen) -> list[_Item]:
        """Return what is replaced at a time: all heads of the part together, or its heads one by one."""
        if self.unit == "all":
            return [_Item(None, None, part)]
        [(spec, heads)] = part
        if self.unit == "layer":
            return [_Item(spec.layer, None, part)]
        return [_Item(spec.layer, head, [(spec, [head])]) for head in heads]

    def _runs(
        self,
        runs: Runs,
        part: Chosen,
        items: Sequence[_Item],
        hooks: Mapping[AnyRung, RungHooks],
        shortcuts: Shortcuts,
    ) -> Iterator[tuple[Run, Shortcuts]]:
        """Yield the run in which a rung replaces an item's attention, for each rung and each item."""
        if self.unit == "all":
            return ((partial(self._run, put_in, part), shortcuts) for put_in in hooks.values())
        [(spec, _)] = part
        changes = []
        for rung, put_in in hooks.items():
            # Rungs of one name are put in at the same hook points.
            name = rung if rung in (MEAN, "static", "first_token") else "scores"
            layer_hooks = partial(_layer_hooks, put_in, spec)
            changes += [Change(name, tuple(heads), layer_hooks) for item in items for _, heads in item.heads_by_layer]
        return runs.changed(spec.layer, changes, shortcuts)

    def _run(self, put_in: RungHooks, heads_by_layer: Chosen) -> list[Any]:
        hooks = [put_in(group, heads_by_layer) for group in range(len(self.texts.groups))]
        return run_texts(self.reading.model, self.texts, hooks)

    def _rung_hooks(self, chosen: Chosen, rung: AnyRung, *, shuffled: bool) -> RungHooks:
        """Return what puts a rung in: fitted to other texts, in the run itself, or to the shuffled text."""
        model, per_head = self.reading.model, rung in PER_HEAD
        if rung == MEAN:
            return partial(_mean_outputs, self._means(chosen))
        if rung in WITHOUT_FIT or not (per_head or shuffled):
            return partial(_unfitted_rung, rung)
        source = self.fitted if per_head else self.texts
        texts = source.shuffled(_SHUFFLE_SEED) if shuffled else [group.tokens for group in source.groups]
        in_turn = self.unit == "all"
        if per_head:
            stored = [fit_layers(model, texts, chosen, rung, in_turn=in_turn)] * len(self.texts.groups)
        else:
            stored = [fit_layers(model, [tokens], chosen, rung, in_turn=in_turn) for tokens in texts]
        return partial(_stored_rung, stored)

    def _means(self, chosen: Chosen) -> StandIn | ValueError:
        """Return the replacement of heads by their mean outputs over the fitted texts, or the error if that fails."""
        layers = [spec.layer for spec, _ in chosen]
        try:
            check_reach(self.reading, layers)
            return stand_in(self.reading.model, layers, "mean", self.fitted, seed=0)
        except ValueError as error:
            return error

    def _compare(self, run: Run, clean: Unmodified, untouched: _Measured) -> _Measured:
        """Make a run, and compare it with the unmodified one."""
        outputs = run()
        losses, divergences = clean.compare(outputs)
        values = self._values(outputs, losses)
        if len(values) != len(untouched.values):
            got = f"{len(untouched.values)} for the unmodified run and {len(values)} for another"
            raise ArgumentError("metric", f"must return the same number of values for each run, got {got}")
        return _Measured(losses, divergences, values)

    def _values(self, outputs: list[Any], losses: Tensor) -> Float[Tensor, " sample"]:
        if self.metric is None:
            return losses
        return as_numbers(values_of(self.metric, outputs, self.texts), len(self.texts.tokens)).reshape(-1)

    def _rows_of(
        self,
        item: _Item,
        measured: Mapping[AnyRung, _Measured],
        baselines: Mapping[AnyRung, _Measured],
        untouched: _Measured,
        token_blocks: Blocks,
        control: str,
    ) -> Iterator[Row]:
        """Yield the row of each rung, with its shares between the baselines and the untouched model."""
        uniform, mean = baselines["uniform"], baselines[MEAN]
        blocks = token_blocks if self.metric is None else Blocks.single(len(untouched.values))
        dtype, unmodified_loss = dtype_of(self.reading.model), untouched.losses.mean().item()
        for rung, run in measured.items():
            lengths = [self.fitted.longest] if rung == MEAN or rung in PER_HEAD else self.texts.lengths
            static = rung in WITHOUT_FIT or ((rung in PER_HEAD or rung == MEAN) and self.texts is not self.fitted)
            row: Row = {"layer": item.layer, "head": item.head, "control": control, "rung": rung}
            row |= {"value": run.values.mean().item(), "loss": run.losses.mean().item()}
            for names, baseline in ((("recovered", "se"), uniform), (("recovered_mean", "se_mean"), mean)):
                share = share_between(run.values, baseline.values, untouched.values, blocks, dtype)
                row |= zip(names, share, strict=True)
            row["kl"], row["error_kl"] = token_blocks.mean(run.divergences)
            row["recovered_kl"], row["se_kl"] = share_of_kl(
                run.divergences, uniform.divergences, token_blocks, unmodified_loss, dtype
            )
            _, row["error"] = blocks.mean(run.values - untouched.values)
            row |= {"blocks": blocks.count, "df": blocks.df}
            row["parameters"] = sum(
                len(heads) * _n_parameters(rung, spec, n) for spec, heads in item.heads_by_layer for n in lengths
            )
            row["causal"] = static and all(spec.causal for spec, _ in item.heads_by_layer)
            yield row


def _n_parameters(rung: AnyRung, spec: AttentionSpec, length: int) -> int:
    """Count the parameters that a rung fits for one head."""
    return spec.d_head if rung == MEAN else n_parameters(rung, spec.mask(length), spec.d_head)


def _nan_like(measured: _Measured) -> _Measured:
    """Return what stands for a run that failed."""
    losses, divergences, values = (
        torch.full_like(x, nan) for x in (measured.losses, measured.divergences, measured.values)
    )
    return _Measured(losses, divergences, values)


def _layer_hooks(put_in: RungHooks, spec: AttentionSpec, group: int, heads: Sequence[int]) -> Hooks:
    """Put a rung in at heads of one layer."""
    return put_in(group, [(spec, list(heads))])


def _unfitted_rung(rung: Rung, group: int, heads_by_layer: Chosen) -> Hooks:
    """Put in a rung that needs no fit, or that is fitted in the run itself."""
    return rung_hooks(heads_by_layer, rung)


def _stored_rung(stored: Sequence[Any], group: int, heads_by_layer: Chosen) -> Hooks:
    """Put in a rung whose fit is stored for each group of texts."""
    return stored_hooks(heads_by_layer, stored[group])


def _mean_outputs(means: StandIn | ValueError, group: int, heads_by_layer: Chosen) -> Hooks:
    """Put in the mean outputs, or raise the error that computing them raised."""
    if isinstance(means, ValueError):
        raise means
    return joined([replace_heads(spec, heads, means) for spec, heads in heads_by_layer])
