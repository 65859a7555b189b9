"""Arguments that are good each by itself and do not fit the others, the model or the text: what the error says."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from support.public_calls import (
    DROPS,
    FEW,
    HEADS,
    SAMPLES,
    SCORES,
    TASK,
    TOKENS,
    WORDS,
    K,
    Q,
    call,
    callables,
    model_for,
    numbers,
    synthetic,
)

from tl_posdisent.synthetic import TriggerCount

pytestmark = pytest.mark.usefixtures("unchecked")

NAN, INF = float("nan"), float("inf")
X = numbers(3, 6, 6)
NOTHING = torch.zeros(6, 6, dtype=torch.bool)
ONE_CELL = NOTHING.index_put((torch.tensor(4), torch.tensor(2)), torch.tensor(True))
FEW_SAMPLES = TriggerCount(d_vocab=3, n_triggers=1, max_count=1, min_length=2, max_length=2, n_ctx=6)

ONE_SUBSET = pd.DataFrame({"scope": ["all"], "put_in": ["fit"], "keep": ["distance"], "loss": [1.0]})


def with_one(value: float) -> torch.Tensor:
    return X.index_put(tuple(torch.zeros(3, dtype=torch.long)), torch.tensor(value))


# The function, what is not as in a good call, and what the message must contain, in this order.
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("fit_additive", {"scores": with_one(NAN)}, r"scores .*finite.*nan.*\(0, 0, 0\)"),
    ("fit_additive", {"scores": with_one(-3.4e38)}, r"-3.4e\+38.*mask"),
    ("fit_additive", {"scores": X[0].to_sparse()}, "scores must.*sparse"),
    ("fit_additive", {"scores": numbers(6, 4)}, "6 queries and 4 keys"),
    ("fit_additive", {"scores": X, "mask": NOTHING}, "mask must leave"),
    ("fit_additive", {"scores": X, "mask": ONE_CELL[:5]}, "mask must have shape"),
    ("fit_additive", {"scores": X[0], "pool": True}, "pool=True needs"),
    ("fit_additive_qk", {"k_rot": torch.zeros(2, 12, 4, 7)}, "d_head"),
    ("fit_additive_qk", {"k_rot": torch.zeros(12, 4, 8)}, "q_rot"),
    ("fit_additive_qk", {"q_rot": torch.zeros(2, 12, 3, 8)}, "multiple"),
    ("fit_additive_qk", {"q_rot": torch.zeros(2, 12, 8, 8) * NAN}, "q_rot must"),
    ("fit_additive_qk", {"q_rot": torch.zeros(1, 4, 8), "k_rot": torch.zeros(1, 4, 8)}, "at least"),
    ("fit_additive_qk", {"mask": ONE_CELL}, "mask must be"),
    ("fit_attention", {"scores": None}, "scores or pattern="),
    ("fit_attention", {"scores": X.softmax(-1)}, "pass.*pattern="),
    ("fit_attention", {"scores": None, "pattern": X}, "pattern must be"),
    ("fit_attention", {"scores": None, "pattern": X.softmax(-1)}, "pattern must.*mask"),
    ("fit_attention", {"scores": with_one(-INF)}, "finite.*-inf"),
    ("fit_attention", {"scores": X, "keys": numbers(5, 1, 4)}, "keys must have"),
    ("fit_attention", {"scores": X[0], "pool": True}, "pool=True needs"),
    ("fit_attention_qk", {"mask": ONE_CELL}, "mask must be"),
    ("score_correlation", {"a": X, "b": X[:2]}, "shape"),
    ("score_correlation", {"a": X, "b": X, "mask": NOTHING}, "mask must leave"),
    ("toeplitz_share", {"scores": X[0], "pool": True}, "pool"),
    ("principal_angles", {"b": SCORES[1, 0, :5]}, "b must.*same d"),
    ("principal_angles", {"b": SCORES[1, 0] * 0}, "b must"),
    ("rotate", {"x": Q[..., :3]}, "x must be.*at least 4"),
    ("rotate", {"positions": torch.arange(9).expand(3, 9)}, "positions must"),
    ("unrotate", {"x": Q[..., :3]}, "x must be.*at least 4"),
    ("to_complex", {"x": Q[..., :3]}, "at least 4"),
    ("from_complex", {"rest": torch.zeros(1, 9, 4, 2)}, "rest must"),
    ("rotary_from_table", {"sin": torch.zeros(5, 2)}, "shape"),
    ("rotary_from_table", {"cos": numbers(9, 2), "sin": numbers(9, 2)}, "cos"),
    ("Moments", {"q": numbers(2, 9, 3, 6)}, "divide"),
    ("Moments", {"k": K[..., :5]}, "d_head"),
    ("Moments", {"k": K * NAN}, "k must be finite"),
    ("decompose", {"weights": [1.0]}, "weights must"),
    ("positional_symbolic_qk", {"q": Q[:, :1], "k": K[:, :1]}, "q"),
    ("positional_symbolic_qk", {"k": K[:, :5]}, "q and k"),
    ("subspace_patterns_qk", {"k": K * NAN}, "k must be"),
    ("rope_capacity", {"target": [1.0]}, "target must"),
    ("preference_flips_qk", {"k": K[:, :1]}, "at least two keys"),
    ("preference_flips_qk", {"near": [1, 2], "far": [2, 5]}, "near and far must"),
    ("additivity", {"mask": NOTHING}, "mask must"),
    ("additivity", {"mask": "full"}, "mask"),
    ("controlled_distance", {"sinks": 12}, "sinks must"),
    ("positional_symbolic", {"sinks": 11}, "sinks must"),
    ("attention_ladder", {"tokens": TOKENS[:, :8], "heldout": TOKENS}, "heldout must be no longer"),
    ("fit_attention_layers", {"rung": "additive"}, "rung must be"),
    ("substitute_attention", {"by": {0: None}}, "by must"),
    ("ablate_heads", {"mode": "mean"}, "reference must"),
    ("limit_frequencies", {"low": 2.0, "high": 1.0}, "low"),
    ("patch_vectors", {"q_rot": None, "k_rot": None}, "q_rot"),
    ("head_ablation", {"metric": lambda logits, tokens: logits}, "metric must"),
    ("head_patching", {"metric": lambda logits, tokens: logits[:, -1, 5] * NAN}, "metric must"),
    ("positional_subspace", {"rank": 999}, "rank must"),
    ("positional_subspace", {"tokens": TOKENS[:1]}, "tokens"),
    ("logit_difference", {"answers": " Mary"}, "answers must be token ids"),
    ("MultipleChoice", {"choices": []}, "choices must"),
    ("MultipleChoice", {"answer": 2}, "answer"),
    ("MultipleChoice", {"answer": -1}, "answer"),
    ("choice_scores", {"question": "a or b?"}, "question must be"),
    ("demo_tokens", {"length": 10**6}, "length must be an integer from 1 to"),
    ("shapley_values", {"table": ONE_SUBSET}, "table must have one row for each of the 16 subsets"),
    ("report", {"sections": ["all"]}, "sections must"),
    ("Text", {"first": -1}, "first must be"),
    ("Text", {"source": [[1, 2], [3]]}, "text must be"),
    ("jobs", {"experiments": "addictivity"}, "experiment"),
    ("jobs", {"experiments": ("additivity", {"mask": {1, 2}})}, "arguments must be"),
    ("sweep", {"jobs": []}, "jobs must be"),
    ("SyntheticConfig", {"n_heads": 3}, "n_heads must"),
    ("SyntheticConfig", {"dropout": 1.0}, "dropout must be"),
    ("TrainConfig", {"epochs": 1, "checkpoints": (10**9,)}, "checkpoints must be"),
    ("TrainConfig", {"n_train": 4}, "n_train must be"),
    ("TriggerCount", {"d_vocab": 8, "n_triggers": 8}, "d_vocab"),
    ("TriggerDistance", {"min_gap": 5, "max_gap": 2}, "max_gap must be"),
    ("TriggerDistance", {"n_ctx": 10}, "n_ctx must be"),
    ("train", {"model": synthetic(d_vocab=4)}, "d_vocab"),
    ("train", {"resume": True}, "folder must be given"),
    ("train", {"task": FEW_SAMPLES, "config": replace(FEW, n_train=500)}, r"n_train \+ n_test"),
    ("evaluate", {"tokens": SAMPLES[:0], "labels": SAMPLES[:0, 0]}, "tokens must"),
    ("evaluate", {"labels": TASK.batch(16)[1] + 90}, "labels must be"),
    ("evaluate", {"labels": TASK.batch(3)[1]}, "labels must be"),
    ("sufficient_heads", {"model": synthetic(encoding="none")}, "by must be.*'none'"),
    ("only_heads", {"heads": [(0, 2)]}, "heads must be"),
    ("only_heads", {"reference": SAMPLES}, "reference must be None"),
    ("deposit", {"drops": DROPS.iloc[:0]}, "drops must have rows"),
    ("deposit", {"drops": DROPS.assign(effect=NAN)}, "drops must have finite"),
    ("deposit", {"drops": DROPS.assign(head=0)}, "drops must have one row per head"),
    ("gradient_margins", {"table": HEADS[:1]}, "at least two heads"),
    ("train_preset", {"width": 3}, "width"),
    ("show_scores", {"tokens": WORDS[:5]}, "tokens must be as many"),
    ("show_scores", {"scale": 0.0}, "scale must be"),
    ("show_patterns", {"pattern": SCORES * 9}, "pattern must be probabilities"),
    ("show_patterns", {"pattern": SCORES[:, :2].softmax(-1)}, "pattern must have"),
    ("show_change", {"after": SCORES[:1]}, "after must have the shape"),
    ("plot_heads", {"table": HEADS.drop(columns="r")}, "table must have the columns.*r"),
    ("plot_heads", {"table": HEADS[:0]}, "table must have rows"),
    ("plot_heads", {"table": pd.concat([HEADS, HEADS])}, "table must have one row"),
    ("plot_heads", {"table": HEADS.assign(r="a")}, "must be numbers"),
    ("plot_length", {"tables": {}}, "tables must have"),
]


@pytest.mark.parametrize(("of", "changed", "message"), ROWS, ids=[f"{row[0]}-{','.join(row[1])}" for row in ROWS])
def test_what_does_not_fit_is_refused(of: str, changed: dict[str, Any], message: str, shared_reading: Any) -> None:
    function = callables()[of]
    named = inspect.signature(function).parameters
    if "model" in named:
        changed = {"model": model_for(function, shared_reading("bridge", "llama-gqa"))} | changed
    with pytest.raises((ValueError, TypeError), match=message):
        call(function, **changed)
