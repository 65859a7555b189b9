"""Added loss under perturbed word order, positions and rotary phases."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor
from tqdm.auto import tqdm

from tl_posdisent.experiments.measuring.full_runs import run_under
from tl_posdisent.experiments.measuring.token_losses import correct, divergences, in_blocks
from tl_posdisent.experiments.robustness.perturb import Kind, Perturb, Perturbed, Unit, perturb
from tl_posdisent.models.reading.model_reading import read_model
from tl_posdisent.models.running.texts import TextGroup, TokenIds, Tokens, are_strings, read_texts
from tl_posdisent.utils.errors import ArgumentError
from tl_posdisent.utils.tables import with_ends
from tl_posdisent.utils.validation import check_distinct, check_number, check_seeds, check_subset, shown

Downstream = Callable[[Any, Perturb], float | int]
"""A measure of a model: a number, given the model and the function that perturbs its tokens."""

_MEASURES = ["perplexity", "accuracy", "added_loss", "kl"]


def perturbation_curve(
    model: Any,
    tokens: Tokens,
    kinds: Sequence[Kind] = ("order", "index", "feature"),
    fractions: Sequence[float | int] = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1),
    seeds: int | Iterable[int] = 5,
    *,
    attention_mask: Tensor | None = None,
    ignore: TokenIds | None = None,
    window: int = 1,
    unit: Unit | None = None,
    downstream: Downstream | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure the added loss if a fraction of a text is perturbed in order, positions or rotary phases.

    A text perturbed by ``perturb`` is harder to predict for two reasons: its context is perturbed, and the next token
    may have moved. ``perplexity`` and ``accuracy`` include both; they are over all positions, with the next token of
    the perturbed text as target for ``order``. ``added_loss`` and ``kl`` measure only the first effect, over positions
    where neither token nor next token moved (``Perturbed.intact``). Use only these to compare kinds.

    Args:
        model, tokens, attention_mask: as in ``perturb``; the model must be causal.
        ignore: as in ``head_ablation``, at the positions where ``tokens`` have them.
        kinds: what to perturb.
        fractions: fractions of the units that can move. At 0, model and text are unmodified.
        seeds: number of perturbations (seeds 0, 1, 2 …), or a list of seeds.
        window, unit: as in ``perturb``.
        downstream: an additional measure, a function ``downstream(model, perturb) -> number``, which must itself apply
            the tokens and hooks that ``perturb(its_tokens)`` returns.
        progress: show a progress bar over the runs.

    Returns:
        One row per kind and fraction: ``kind``, ``fraction``; the number of ``draws`` (seeds); ``moved`` and
        ``intact``, the share of all positions that moved, and the share of positions with a next token that are intact;
        ``perplexity`` and ``accuracy`` of the next token; ``added_loss`` (nats per token relative to the unmodified
        model) and ``kl`` (nats, KL(unmodified ‖ perturbed) of the predictions), NaN where no position is intact; and
        ``downstream``, if given.
        Each is a mean over seeds, followed by its standard error, such as ``perplexity_se`` (no such columns for
        a single seed).

    Raises:
        ValueError: invalid arguments; a model that is not causal; numbers that are not finite.

    Example:
        >>> from tl_posdisent import demo_tokens, load_demo_model, perturbation_curve
        >>> table = perturbation_curve(
        ...     load_demo_model(), demo_tokens(length=128), ["order", "index"], [0, 0.1, 0.5], seeds=2, progress=False
        ... )
        >>> loss = table.pivot(index="fraction", columns="kind", values="added_loss")
        >>> bool((loss.loc[0] == 0).all()), bool((loss.loc[0.5] > loss.loc[0.1]).all())
        (True, True)
    """
    kinds = check_distinct("kinds", check_subset("kinds", kinds, get_args(Kind)), str)
    seeds = check_seeds(seeds)
    fractions = check_distinct("fractions", fractions, lambda x: check_number("fractions", x, least=0, most=1))
    reading = read_model(model)
    model, default_unit = reading.model, "word" if are_strings(tokens) else "token"
    groups = read_texts(model, tokens, attention_mask, ignore).groups
    if not reading.specs()[0].causal:
        raise ArgumentError("model", "must be causal: if it sees the next token, next-token losses are meaningless")
    if downstream is not None and not callable(downstream):
        raise ArgumentError("downstream", f"must be a function of the model and perturb, got {shown(downstream)}")
    clean = [run_under(model, group.tokens, []) for group in groups]
    unmodified: float | None = None  # shared by all kinds and seeds
    options: dict[str, Any] = {"window": window} | ({"unit": unit} if unit else {})
    runs = [(kind, fraction, seed) for kind in kinds for fraction in fractions for seed in seeds]
    rows = []
    with tqdm(runs, desc="perturbations", disable=not progress) as bar:
        for kind, fraction, seed in bar:
            chosen = options | {"kind": kind, "fraction": fraction, "seed": seed}
            perturbation = partial(_perturbed, reading, chosen)
            parts = []
            for group, clean_logits in zip(groups, clean, strict=True):
                perturbed = perturbation(group.tokens, torch.ones_like(group.tokens), unit=default_unit)
                logits = clean_logits if fraction == 0 else run_under(model, perturbed.tokens, perturbed.hooks)
                parts.append(_measured(perturbed, clean_logits, logits, group))
            row = {name: float(torch.cat([part[name] for part in parts]).mean()) for name in parts[0]}
            row["perplexity"] = math.exp(row["perplexity"])
            if downstream is not None and fraction == 0:
                unmodified = _score(downstream, model, perturbation) if unmodified is None else unmodified
                row["downstream"] = unmodified
            elif downstream is not None:
                row["downstream"] = _score(downstream, model, perturbation)
            rows.append({"kind": kind, "fraction": fraction, **row})
    by_setting = pd.DataFrame(rows).groupby(["kind", "fraction"], sort=False)
    mean, error = by_setting.mean(), by_setting.sem()
    if undefined := int(mean["added_loss"].isna().sum()):
        warnings.warn(
            f"tokens: added_loss and kl are NaN in {undefined} of {len(mean)} rows, because no prediction that counts "
            "is intact: give longer texts, smaller fractions or more seeds",
            stacklevel=2,
        )
    table = mean[["moved", "intact"]].copy()
    table.insert(0, "draws", len(seeds))
    for name in [*_MEASURES, *(["downstream"] if downstream else [])]:
        table[name] = mean[name]
        if len(seeds) > 1:
            table[f"{name}_se"] = error[name]
    first, last = ("kind", "fraction", "added_loss", "added_loss_se"), ("downstream", "downstream_se", "kl", "kl_se")
    return reading.note(with_ends(table.reset_index(), first, last))


def lower_and_higher(
    table: pd.DataFrame, measure: str = "added_loss"
) -> tuple[Float64[np.ndarray, " row"], Float64[np.ndarray, " row"]]:
    """Compute the lower and the higher of two draws in each row, from their mean and standard error.

    The standard error of a mean of two numbers is half of their distance: an interval of one standard error is no more
    than the two numbers themselves.

    >>> table = pd.DataFrame({"added_loss": [3.0], "added_loss_se": [1.0]})
    >>> [float(x) for (x,) in lower_and_higher(table)]
    [2.0, 4.0]
    """
    mean, error = (table[name].to_numpy(dtype=float) for name in (measure, f"{measure}_se"))
    return mean - error, mean + error


def _perturbed(reading: Any, chosen: dict[str, Any], tokens: Any, attention_mask: Any = None, **more: Any) -> Perturbed:
    """Call ``perturb`` with the options of the curve, which override those of the caller."""
    return perturb(reading, tokens, attention_mask=attention_mask, **(more | chosen))


def _score(downstream: Downstream, model: Any, perturb: Perturb) -> float:
    """Call the measure of the user's, which must return a finite number."""
    value = downstream(model, perturb)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError("downstream", f"must return a number, got {shown(value)}") from error
    if not math.isfinite(number):
        raise ArgumentError("downstream", f"must return a finite number, got {number}")
    return number


def _measured(perturbed: Perturbed, clean: Tensor, logits: Tensor, group: TextGroup) -> dict[str, Tensor]:
    """Compute all measures of one run at each position, those of predictions where they count."""
    parts = []
    both = zip(in_blocks(clean, group.tokens), in_blocks(logits, perturbed.tokens), strict=True)
    for (_, clean_log_p, clean_losses), (_, log_p, losses) in both:
        n = losses.shape[1]
        added_loss = losses.double() - clean_losses.double()
        parts.append((losses.double(), added_loss, divergences(clean_log_p[:, :n], log_p[:, :n])))
    losses, added, kl = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    if not bool(losses.isfinite().all() and added.isfinite().all()):
        raise ValueError("the model's logits are not finite")
    counted, right = group.predictions.to(logits.device), correct(logits, perturbed.tokens).double()
    intact = perturbed.intact.to(logits.device) & counted
    measures = {"perplexity": losses[counted], "accuracy": right[counted], "added_loss": added[intact]}
    measures["kl"] = kl.double()[intact]
    shares = {"moved": perturbed.moved.double().flatten(), "intact": perturbed.intact.double().flatten()}
    return shares | measures
