"""Substitute additive fits for attention scores and measure the loss, head by head and layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product
from math import nan
from typing import Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.additive.fit import fit_additive
from tl_posdisent.additive.result import AdditiveFit
from tl_posdisent.experiments.measuring.runs import Change, Failure, Run, Runs, attempt, note_failures, run_texts
from tl_posdisent.experiments.measuring.token_losses import ByToken, Unmodified
from tl_posdisent.hooks.ablate import check_reach, replace_heads
from tl_posdisent.hooks.edits.score_edits import View
from tl_posdisent.hooks.hook_list import Heads, Hooks, joined, replace_scores
from tl_posdisent.hooks.score_components import ScorePart, keep_two_axis
from tl_posdisent.hooks.substitute import ADDITIVE, PARTS, Axes, additive_heads, keep_parts_hooks
from tl_posdisent.models.capture import Captured, for_each_layer, for_each_scores
from tl_posdisent.models.reading.model_reading import Layers, read_model
from tl_posdisent.models.reading.spec import AttentionSpec
from tl_posdisent.models.running.forward_pass import running
from tl_posdisent.models.running.texts import Tokens, read_texts
from tl_posdisent.utils.validation import check_seed, check_subset, listed

SubstitutionControl = Literal["shuffled fit", "zero"]
_CONTROLS: tuple[SubstitutionControl, ...] = get_args(SubstitutionControl)


def additive_substitution(
    model: Any,
    tokens: Tokens,
    *,
    attention_mask: Tensor | None = None,
    axes: Axes = "three",
    layers: Layers = None,
    heads: Heads = None,
    controls: Collection[SubstitutionControl] = _CONTROLS,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure the added loss if scores are replaced by their additive fit: by head, by layer, and in all layers.

    There are two controls for the same heads: zero output, and the fit of a *shuffled* text, which has the same tokens
    in another order, except the first. Each takes as long as the fit.

    Args:
        model, tokens, attention_mask, progress: as in ``head_ablation``.
        axes: ``"three"`` or ``"two"`` (see ``substitute_additive``).
        layers: default all (all that rotate, for two axes).
        heads: query heads, as in ``head_ablation``; default all.
        controls: which controls to run; ``head_ablation`` measures ``"zero"``, too.
        seed: seed of the shuffled order, which is the same for all texts of one length.

    Returns:
        One row per run: ``scope``, what was replaced: a ``"head"``, the chosen heads of a ``"layer"``, or ``"all"`` of
        them (with a row for each subset of the four components); ``layer`` and ``head``; ``put_in``: ``"fit"``,
        ``"shuffled fit"`` or ``"zero"``; ``keep``, the components that were kept, joined by ``+``, ``"mean"`` if none
        and empty for ``"zero"``; ``loss``, nats per predicted token; ``change``, loss minus that of the unmodified
        model; ``kl``, KL(unmodified ‖ this) of the predictions, nats per predicted token.

    Raises:
        ValueError: invalid tokens, layers, axes, controls or seed; otherwise as ``substitute_additive`` and
            ``ablate_heads``.

    Example:
        >>> from tl_posdisent import additive_substitution, demo_tokens, load_demo_model
        >>> table = additive_substitution(load_demo_model(), demo_tokens(length=64), layers=[3, 4], progress=False)
        >>> full = table[(table["scope"] == "all") & (table["keep"] != "mean")]
        >>> full = full.set_index(["put_in", "keep"])["change"]
        >>> bool(full["fit", "distance+query+key"] < full["zero", ""])
        True
    """
    chosen_controls = check_subset("controls", controls, _CONTROLS)
    layers = listed("layers", layers)
    reading = read_model(model)
    model = reading.model
    chosen = additive_heads(reading, axes, layers, heads, "additive_substitution")
    specs = [spec for spec, _ in chosen]
    texts = read_texts(model, tokens, attention_mask)
    shuffled = texts.shuffled(check_seed(seed))
    check_reach(model, [spec.layer for spec in specs])
    stored = [_fits_of(model, tokens, specs, axes) if "shuffled fit" in chosen_controls else {} for tokens in shuffled]
    one_layer = [_Replacement("fit", ADDITIVE)]
    one_layer += [_Replacement("shuffled fit", ADDITIVE)] if "shuffled fit" in chosen_controls else []
    one_layer += [_Replacement("zero")] if "zero" in chosen_controls else []
    subsets = [keep for n in range(len(PARTS) + 1) for keep in combinations(PARTS, n) if keep != ADDITIVE]
    everywhere = [*one_layer, *(_Replacement("fit", keep) for keep in subsets)]
    rows: list[tuple[Any, ...]] = []
    n_runs = len(one_layer) * sum(len(of_layer) + 1 for _, of_layer in chosen) + len(everywhere)
    with running(model), tqdm(total=n_runs, desc="runs", disable=not progress) as bar:
        runs, failures = Runs(model, texts, [spec.layer for spec in specs]), list[Failure]()
        unmodified = Unmodified.of(runs.clean, texts)
        clean_loss, shortcuts = unmodified.losses.mean().item(), runs.shortcuts
        for spec, of_layer in chosen:
            units = [*((head,) for head in of_layer), tuple(of_layer)]
            changes = [
                Change(replacement.put_in, unit, partial(replacement.hooks, spec, axes, stored))
                for replacement in one_layer
                for unit in units
            ]
            layer_runs = runs.changed(spec.layer, changes, shortcuts)
            rows_of_layer = product(one_layer, [*of_layer, None])
            for (replacement, head), (run, known) in zip(rows_of_layer, layer_runs, strict=True):
                measured = attempt(partial(_compare, unmodified, run), spec.layer, head)
                rows.append(_row(replacement, spec.layer, head, measured, clean_loss))
                failures += [measured] if isinstance(measured, Failure) else []
                shortcuts = known  # for the next layer
                bar.update()
        for replacement in everywhere:
            hooks = [
                joined(replacement.hooks(spec, axes, stored, group, of_layer) for spec, of_layer in chosen)
                for group in range(len(texts.groups))
            ]
            measured = attempt(partial(_compare, unmodified, partial(run_texts, model, texts, hooks)), None, None)
            rows.append(_row(replacement, None, None, measured, clean_loss))
            failures += [measured] if isinstance(measured, Failure) else []
            bar.update()
    table = pd.DataFrame(rows, columns=["scope", "layer", "head", "put_in", "keep", "loss", "change", "kl"])
    order = {name: n for n, name in enumerate(("head", "layer", "all"))}
    table = table.astype({"layer": "Int64", "head": "Int64"}).sort_values(
        ["scope", "layer", "head"], key=lambda x: x.map(order) if x.name == "scope" else x, kind="stable"
    )
    return reading.note(note_failures(table.reset_index(drop=True), failures, n_runs))


def _compare(unmodified: Unmodified, run: Run) -> ByToken:
    """Make a run, and compare it with the unmodified one."""
    return unmodified.compare(run())


def _row(
    replacement: _Replacement, layer: int | None, head: int | None, measured: ByToken | Failure, clean_loss: float
) -> tuple[Any, ...]:
    """Return a row of the table; its numbers are NaN after a failure."""
    loss, kl = (nan, nan) if isinstance(measured, Failure) else (by_token.mean().item() for by_token in measured)
    scope = "all" if layer is None else "layer" if head is None else "head"
    return scope, layer, head, replacement.put_in, replacement.keep, loss, loss - clean_loss, kl


Fits = dict[int, Captured | AdditiveFit]
"""By layer, the data of the fits to its scores in the shuffled texts of one length."""


@dataclass(frozen=True)
class _Replacement:
    """What replaces heads: the fit of their scores, or of those of shuffled texts, with some components; or zeros."""

    put_in: str
    kept: tuple[ScorePart, ...] = ()

    @property
    def keep(self) -> str:
        """The kept components in words."""
        return "" if self.put_in == "zero" else "+".join(self.kept) or "mean"

    def hooks(
        self, spec: AttentionSpec, axes: Axes, shuffled: Sequence[Fits], group: int, heads: Sequence[int]
    ) -> Hooks:
        """Return hooks that replace heads of a layer in a group of texts; ``shuffled`` are fits for each group."""
        if self.put_in == "zero":
            return replace_heads(spec, heads, _zeros)
        if self.put_in == "shuffled fit":
            return _stored_fit(spec, heads, shuffled[group][spec.layer])
        return keep_parts_hooks(spec, heads, self.kept, axes)


def _zeros(layer: Any, heads: Sequence[int], z: Tensor) -> Tensor:
    return torch.zeros_like(z)


def _stored_fit(spec: AttentionSpec, heads: Sequence[int], stored: Captured | AdditiveFit) -> Hooks:
    """Return hooks that replace scores by the fit of another run's scores."""
    if isinstance(stored, AdditiveFit):
        fields = {name: x for name, x in vars(stored).items() if isinstance(x, Tensor) and name != "distances"}
        of_heads: Any = {name: x[:, list(heads)] for name, x in fields.items()}
        fitted: Callable[[View], Tensor] = partial(_three_axis_scores, replace(stored, **of_heads))
    else:
        fitted = partial(_two_axis_scores, stored, stored.q, spec.per_query_head(stored.k))
    return replace_scores(spec, heads, fitted, "additive_substitution")


def _three_axis_scores(fit: AdditiveFit, view: View) -> Tensor:
    """Return the fitted scores of the heads of this fit."""
    return fit.fitted()


def _two_axis_scores(stored: Captured, q: Tensor, k: Tensor, view: View) -> Tensor:
    """Return the fitted scores of a view's heads, with the rotation of the text that was captured."""
    heads = list(view.heads)
    return keep_two_axis(stored.spec, q[:, :, heads], k[:, :, heads], view.inside, ADDITIVE)


def _fits_of(model: Any, tokens: Int[Tensor, "batch pos"], specs: list[AttentionSpec], axes: Axes) -> Fits:
    """Fit each layer's scores in one forward pass, and keep O(length) numbers per head."""
    if axes == "two":
        captured: list[Captured] = []
        for_each_layer(model, tokens, specs, captured.append, scores=False)
        return {layer.layer: layer for layer in captured}
    fits: Fits = {}
    for_each_scores(model, tokens, specs, partial(_fit_layer, fits))
    return fits


def _fit_layer(fits: Fits, spec: AttentionSpec, scores: Tensor) -> None:
    """Add the fit of a layer's scores to ``fits``."""
    fits[spec.layer] = fit_additive(scores, mask=spec.mask(scores.shape[-1], scores.device))
