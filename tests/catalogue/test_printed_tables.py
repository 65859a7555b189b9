"""Every public table shows its answer where pandas prints the ends of a wide table: in a script, at 80 columns."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from support.printed_tables import printed
from support.public import public_names
from support.public_calls import call, callables, model_for, synthetic

import tl_posdisent as tp
from tl_posdisent.synthetic import deposit, gradient_margins, positional_gradients

# What is asked for: the columns that name a row, if they are not all alike, and those that answer.
ANSWERS: dict[str, list[str]] = {
    "accuracies": ["encoding", "task", "seed", "accuracy"],
    "additivity": ["layer", "head", "r", "share_distance", "share_key"],
    "attention_by_distance": ["layer", "head", "distance", "attention"],
    "attention_ladder": ["layer", "head", "rung", "control", "recovered", "se"],
    "compare_heads": ["layer", "head", "changed"],
    "component_patching": ["layer", "head", "effect"],
    "controlled_distance": ["layer", "head", "distance", "query", "key"],
    "disentanglement": ["layer", "head", "r", "r_three_axis", "r_two_axis"],
    "dynamics": ["step", "layer", "head", "r", "norm_of_mean"],
    "gradient_margins": ["layer", "head", "margin", "margin_se"],
    "head_ablation": ["layer", "head", "effect"],
    "head_drops": ["layer", "head", "effect", "loss_effect"],
    "head_effects": ["intervention", "layer", "head", "estimate", "exact", "kl"],
    "head_labels": ["layer", "head", "label", "previous_token", "induction"],
    "head_patching": ["layer", "head", "effect"],
    "head_verdicts": ["layer", "head", "verdict", "recovered", "gap", "error"],
    "intervention_losses": ["intervention", "added_loss", "added_loss_se", "kl", "kl_se"],
    "length_generalization": ["start", "stop", "loss", "entropy"],
    "perturbation_curve": ["kind", "fraction", "added_loss", "kl", "kl_se"],
    "position_patching": ["layer", "head", "effect"],
    "positional_gradients": ["layer", "head", "mean_norm", "norm_of_mean", "expected_norm"],
    "subspace_patterns": ["layer", "head", "key_concentration", "wavelength", "distance"],
    "subspace_patterns_qk": ["head", "subspace", "key_concentration", "wavelength", "distance"],
    "where_or_what": ["layer", "head", "contribution", "where_part", "what_part", "verdict"],
    "AdditiveFit": ["batch", "head", "r", "share_distance", "share_query", "share_key"],
    "AttentionFit": ["batch", "head", "explained", "kl"],
    "ContentPosition": ["head", "term", "share"],
    "DepositReport": ["layer", "head", "drop", "share"],
    "HeadDescription": ["part", "quantity", "value", "se"],
    "ModelReading": ["layer", "attention", "why_not"],
    "RopeHadamard": ["batch", "head", "toeplitz_before", "toeplitz_after"],
    "ScoreSources": ["key", "query_source", "key_source", "term"],
    "SufficientHeads": ["heads", "accuracy"],
    "TrainRun": ["step", "test_loss", "test_accuracy"],
    "VarianceShares": ["head", "distance", "query", "key"],
}
OF_THE_USER = {"sweep", "read_results"}  # the tables of a function of the user's
# What makes a result that has a table.
MADE_BY = {
    "AdditiveFit": "fit_additive",
    "AttentionFit": "fit_attention",
    "ContentPosition": "content_position_terms",
    "HeadDescription": "describe_head",
    "ModelReading": "read_model",
    "RopeHadamard": "rope_hadamard",
    "ScoreSources": "score_sources",
    "SufficientHeads": "sufficient_heads",
    "TrainRun": "train",
    "VarianceShares": "decompose",
}
# Options that give a table columns.
WIDE: dict[str, dict[str, Any]] = {
    "attention_ladder": {"controls": ["shuffled"]},
    "head_labels": {"seeds": 1},
    "perturbation_curve": {"seeds": 2},
}
LADDER = pd.DataFrame(
    {"layer": 0, "head": 0, "control": "none", "rung": ["uniform", "distance", "untouched"], "kl": [1.0, 0.1, 0.0]}
).assign(recovered_kl=[0.0, 0.9, 1.0], error_kl=0.01, se_kl=0.01, blocks=16, df=15.0, causal=True, loss=3.0)
"""Of one head, with what ``head_verdicts`` needs."""
OTHERWISE: dict[str, Callable[[], Any]] = {
    "accuracies": lambda: tp.synthetic.accuracies({("rope", "count", 0): call(tp.synthetic.train, synthetic())}),
    "gradient_margins": lambda: gradient_margins(call(positional_gradients, synthetic())),
    "head_verdicts": lambda: tp.head_verdicts(LADDER.assign(recovered=1.0, se=0.1)),
    "DepositReport": lambda: deposit(call(tp.synthetic.head_drops, synthetic())),
    "subspace_patterns_qk": lambda: call(tp.rope.subspace_patterns_qk),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_printed(name: str, shared_reading: Any) -> None:
    function = callables().get(MADE_BY.get(name, name))
    if name in OTHERWISE:
        result = OTHERWISE[name]()
    else:
        assert function
        named = inspect.signature(function).parameters
        model = [model_for(function, shared_reading("bridge", "llama-gqa"))] if "model" in named else []
        result = call(function, *model, **WIDE.get(name, {}))
    table = result if isinstance(result, pd.DataFrame) else result.to_frame()
    assert len(table)
    assert [column for column in ANSWERS[name] if column not in printed(table)] == []


def test_every_public_table_has_an_answer() -> None:
    functions = {
        name: inspect.signature(x).return_annotation for name, x in public_names().items() if inspect.isfunction(x)
    }
    tables = {name for name, annotation in functions.items() if annotation == "pd.DataFrame"}
    results = {name for name, x in public_names().items() if inspect.isclass(x) and hasattr(x, "to_frame")}
    assert {*ANSWERS} | OF_THE_USER == tables | results
