"""The experiments that a sweep can run, by name: which arguments each takes, and its result as a table."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from tl_posdisent.experiments.attention_scores.additivity import additivity
from tl_posdisent.experiments.attention_scores.controlled_distance import controlled_distance, dummy_distance_check
from tl_posdisent.experiments.attention_scores.disentanglement import disentanglement
from tl_posdisent.experiments.attention_scores.head_labels import head_labels
from tl_posdisent.experiments.attention_scores.head_preferences import preference_flips
from tl_posdisent.experiments.attention_scores.positional_symbolic_plane import positional_symbolic
from tl_posdisent.experiments.attention_scores.subspace_patterns import subspace_patterns
from tl_posdisent.experiments.attention_scores.trained_vs_random import trained_vs_random
from tl_posdisent.experiments.causal.additive_substitution import additive_substitution
from tl_posdisent.experiments.causal.head_ablation import head_ablation
from tl_posdisent.experiments.causal.loss_attribution import component_attribution
from tl_posdisent.experiments.causal.position_patching import component_patching, position_patching
from tl_posdisent.experiments.causal.streaming import streaming_ablation
from tl_posdisent.experiments.residual_stream.content_position import content_position_terms
from tl_posdisent.experiments.residual_stream.distance_sources import distance_sources
from tl_posdisent.experiments.residual_stream.rope_hadamard import rope_hadamard
from tl_posdisent.experiments.residual_stream.source_removal import distance_sources_check
from tl_posdisent.experiments.robustness.length_generalization import length_generalization
from tl_posdisent.experiments.robustness.perturbation_curve import perturbation_curve
from tl_posdisent.synthetic.analysis.deposit import head_drops

from .merging import marginals_by_layer, moments_by_layer

EXPERIMENTS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        additive_substitution,
        additivity,
        component_patching,
        content_position_terms,
        controlled_distance,
        disentanglement,
        distance_sources,
        distance_sources_check,
        dummy_distance_check,
        head_ablation,
        head_drops,
        head_labels,
        length_generalization,
        marginals_by_layer,
        moments_by_layer,
        component_attribution,
        perturbation_curve,
        position_patching,
        positional_symbolic,
        preference_flips,
        rope_hadamard,
        streaming_ablation,
        subspace_patterns,
        trained_vs_random,
    )
}
"""Functions of ``(model, tokens, ...)`` that return a table, or a result with ``to_frame()``."""


def canonical(arguments: Mapping[str, Any]) -> str:
    """Arguments as JSON that is the same for the same arguments.

    Raises:
        ValueError: what JSON cannot hold.
    """
    try:
        return json.dumps(dict(arguments), sort_keys=True, allow_nan=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError) as error:
        raise ValueError(f"arguments must be numbers, words, lists and None, as in JSON, got {arguments!r}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, range):
        return list(value)
    raise TypeError(f"{type(value).__name__} is none of these")


def experiment_named(name: str) -> Callable[..., Any]:
    """A public function of a model and tokens that answers with a table.

    Raises:
        ValueError: a name that is no such function's.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"experiment must be one of {', '.join(sorted(EXPERIMENTS))}, got {name!r}")
    return EXPERIMENTS[name]


def takes_seed(function: Callable[..., Any]) -> bool:
    """Whether there is anything random about it."""
    return bool({"seed", "seeds"} & set(inspect.signature(function).parameters))


def check_call(name: str, arguments: Mapping[str, Any], seed: int | None) -> None:
    """Refuse what the experiment would not take, before anything is loaded.

    Raises:
        ValueError: an unknown or missing argument; a seed for what takes none.
    """
    function = experiment_named(name)
    if seed is not None and not takes_seed(function):
        raise ValueError(f"seed must be None for {name}, which takes none, got {seed}")
    if seed is not None and {"seed", "seeds"} & set(arguments):
        raise ValueError(f"seeds must be given once, got seed={seed} and {dict(arguments)} for {name}")
    try:
        inspect.signature(function).bind("model", "tokens", **_arguments(function, arguments, seed))
    except TypeError as error:
        raise ValueError(f"arguments of {name} must be its own, got {dict(arguments)}: {error}") from error


def ask(name: str, model: Any, tokens: Any, arguments: Mapping[str, Any], seed: int | None) -> pd.DataFrame:
    """The experiment's table."""
    function = experiment_named(name)
    answer = function(model, tokens, **_arguments(function, arguments, seed))
    table = answer if isinstance(answer, pd.DataFrame) else answer.to_frame()
    return table if isinstance(table.index, pd.RangeIndex) else table.reset_index()


def _arguments(function: Callable[..., Any], arguments: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """With the seed where the function expects it, and no bar of its own."""
    known, given = inspect.signature(function).parameters, dict(arguments)
    if "progress" in known:
        given["progress"] = False
    if seed is not None:
        given |= {"seed": seed} if "seed" in known else {"seeds": [seed]}
    return given
