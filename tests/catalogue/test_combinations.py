"""Arguments that are good each by itself and do not fit the others, the model or the text: what the error says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from support.intervention_cases import patch_scores
from support.public_calls import (
    DROPS,
    FEW,
    FIT,
    GOOD,
    HEADS,
    LABELS,
    ROTARY,
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

import tl_posdisent as tp
from tl_posdisent.hooks import patch_vectors, phase_noise
from tl_posdisent.rope import decompose
from tl_posdisent.synthetic import TrainRun, TriggerCount

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.tl4]

NAN, INF = float("nan"), float("inf")
X = numbers(3, 6, 6)
NOTHING = torch.zeros(6, 6, dtype=torch.bool)
ONE_CELL = NOTHING.index_put((torch.tensor(4), torch.tensor(2)), torch.tensor(True))
FEW_SAMPLES = TriggerCount(d_vocab=3, n_triggers=1, max_count=1, min_length=2, max_length=2, n_ctx=6)

ONE_SUBSET = pd.DataFrame({"scope": ["all"], "put_in": ["fit"], "keep": ["distance"], "loss": [1.0]})


LINEAR = torch.nn.Linear(2, 2)
ANGLES = torch.arange(64)[:, None] * ROTARY.frequencies
BENT = ANGLES + 0.1 * (torch.arange(64) == 37)[:, None]  # at a position that doubling from the first does not come by
SHIFTED = torch.arange(12) + 1000
CURVE = {"kinds": ["order"], "fractions": [0, 0.5], "seeds": 1}
FIVE = {"batches": 5, "batch_size": 4}
PADDED = SAMPLES.masked_fill(torch.arange(SAMPLES.numel()).view_as(SAMPLES) == 5, 0)


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
    ("fit_additive", {"scores": torch.ones(3)}, r"scores must have shape \(\.\.\., query, key\), got \(3,\)"),
    ("fit_additive", {"scores": torch.ones(2, 0, 3)}, r"at least one query and two keys, got shape \(2, 0, 3\)"),
    ("fit_additive", {"scores": torch.ones(1, 1)}, r"at least one query and two keys, got shape \(1, 1\)"),
    ("fit_additive", {"scores": torch.empty(4, 4, device="meta")}, "scores must be .*, got a meta tensor"),
    ("fit_additive", {"scores": {"blocks.0.hook_z": X}}, "a cache that holds hook_attn_scores"),
    ("fit_additive", {"scores": [X, X[:, :5, :5]]}, r"several layers must have one shape .*\(3, 6, 6\)"),
    ("fit_additive", {"scores": [X[0], X[0]]}, "scores of several layers must have one shape"),
    ("fit_additive", {"scores": [X, 3]}, "scores of layer 1 must be a floating point tensor, got int"),
    ("fit_additive", {"scores": X, "mask": ONE_CELL * 1.0}, r"dtype torch.bool .* got torch.float32"),
    ("fit_additive", {"scores": X[0], "mask": ONE_CELL.expand(2, 6, 6)}, "mask must broadcast to the scores' shape"),
    ("fit_additive", {"scores": X, "mask": torch.stack([ONE_CELL, NOTHING, ONE_CELL])}, r"leading index \(1,\)"),
    ("fit_additive", {"scores": X, "mask": ONE_CELL, "window": 2}, "that leaves none"),
    ("fit_additive", {"scores": X, "sinks": 6}, "sinks must be fewer than the 6 keys, got 6"),
    ("fit_additive_qk", {"k_rot": torch.zeros(2, 12, 4, 7)}, "d_head"),
    ("fit_additive_qk", {"k_rot": torch.zeros(12, 4, 8)}, "q_rot"),
    ("fit_additive_qk", {"q_rot": torch.zeros(2, 12, 3, 8)}, "multiple"),
    ("fit_additive_qk", {"q_rot": torch.zeros(2, 12, 8, 8) * NAN}, "q_rot must"),
    ("fit_additive_qk", {"q_rot": torch.zeros(1, 4, 8), "k_rot": torch.zeros(1, 4, 8)}, "at least"),
    ("fit_additive_qk", {"mask": ONE_CELL}, "mask must be"),
    ("fit_additive_qk", {"q_rot": Q[0], "k_rot": K[0], "pool": True}, "pool=True needs a leading axis of texts"),
    ("fit_attention", {"scores": None}, "scores or pattern="),
    ("fit_attention", {"scores": X.softmax(-1)}, "pass.*pattern="),
    ("fit_attention", {"scores": None, "pattern": X}, "pattern must be"),
    ("fit_attention", {"scores": None, "pattern": X.softmax(-1)}, "pattern must.*mask"),
    ("fit_attention", {"scores": with_one(-INF)}, "finite.*-inf"),
    ("fit_attention", {"scores": X, "keys": numbers(5, 1, 4)}, "keys must have"),
    ("fit_attention", {"scores": X[0], "pool": True}, "pool=True needs"),
    ("fit_attention", {"scores": X, "bands": (1, 1)}, "bands must be distances in ascending order"),
    ("toeplitz_share", {"scores": X[0], "pool": True}, "pool"),
    ("principal_angles", {"b": SCORES[1, 0, :5]}, "b must.*same d"),
    ("principal_angles", {"b": SCORES[1, 0] * 0}, "b must"),
    ("rotate", {"x": Q[..., :3]}, "x must be.*at least 4"),
    ("rotate", {"positions": torch.arange(9).expand(3, 9)}, "positions must"),
    ("rotate", {"x": Q[0, :, 0]}, r"x must have shape \(\*batch, pos, head, d_head\), got \(9, 6\)"),
    ("rotate", {"positions": torch.zeros(2, 2, 9)}, r"positions must have shape .*got .*\(2, 2, 9\)"),
    ("rotate", {"positions": torch.full((9,), True)}, "positions must be finite real numbers"),
    ("Rotary", {"frequencies": ROTARY.frequencies[None]}, r"frequencies must .* shape \(subspace,\), got .* \(1, 2\)"),
    ("Rotary", {"frequencies": ROTARY.frequencies / 0}, "frequencies must be finite, got 2 NaN or infinite"),
    ("Rotary", {"attention_factor": 0.0}, "attention_factor must be a finite number above 0"),
    ("to_complex", {"x": Q[..., :3]}, "at least 4"),
    ("rotary_from_table", {"sin": torch.zeros(5, 2)}, "shape"),
    ("rotary_from_table", {"cos": numbers(9, 2), "sin": numbers(9, 2)}, "cos"),
    ("rotary_from_table", {"cos": ANGLES[:1].cos(), "sin": ANGLES[:1].sin()}, "at least two positions, got"),
    ("rotary_from_table", {"cos": ANGLES.sin(), "sin": ANGLES.cos()}, "its angles do not grow linearly"),
    ("rotary_from_table", {"cos": BENT.cos(), "sin": BENT.sin()}, "its angles do not grow linearly"),
    ("Moments", {"q": numbers(2, 9, 3, 6)}, "divide"),
    ("Moments", {"k": K[..., :5]}, "d_head"),
    ("Moments", {"k": K * NAN}, "k must be finite"),
    ("Moments", {"q": Q[0, 0]}, r"q must have shape \(\*n_q, head, d_head\) and not be empty, got \(4, 6\)"),
    ("Moments", {"k": K[:0]}, r"k must have shape \(\*n_k, kv_head, d_head\) and not be empty"),
    ("Moments", {"q": Q[..., :2], "k": K[..., :2]}, "d_head must be at least 4, two per frequency, got 2"),
    ("Moments", {"k": K.to("meta")}, "k must be .*, got a meta tensor"),
    ("Moments", {"q": Q / 0}, "q must be finite"),
    ("Moments", {"q": Q.double() * 1e200}, "q must be .* small enough to be squared"),
    ("decompose", {"distances": torch.ones(2, 2)}, r"distances must be one-dim.* shape \(2, 2\)"),
    ("decompose", {"distances": torch.tensor([True])}, "distances must be finite real numbers"),
    ("decompose", {"distances": [1j]}, "distances must be finite real numbers"),
    ("decompose", {"scale": torch.ones(2)}, r"scale must be a finite number, got a Tensor of shape \(2,\)"),
    ("positional_symbolic_qk", {"q": Q[:, :1], "k": K[:, :1]}, "q"),
    ("positional_symbolic_qk", {"k": K[:, :5]}, "q and k"),
    ("subspace_patterns_qk", {"k": K * NAN}, "k must be"),
    ("rope_capacity", {"target": [1.0]}, "target must"),
    ("preference_flips_qk", {"k": K[:, :1]}, "at least two keys"),
    ("preference_flips_qk", {"near": [1, 2], "far": [2, 5]}, "near and far must"),
    ("additivity", {"mask": NOTHING}, "mask must"),
    ("additivity", {"mask": "full"}, "mask"),
    ("additivity", {"tokens": TOKENS.to("meta")}, "tokens must be .*, got a meta tensor"),
    ("check_model", {"tools": ["fit"]}, "tools must be"),
    ("check_model", {"lengths": 3}, "lengths must be an integer"),
    ("dummy_distance_check", {"distances": [12]}, "distances must be an integer from 0 to 11, got 12"),
    ("dummy_distance_check", {"distances": [3, 3]}, "distances must name at least one and none twice"),
    ("head_labels", {"tokens": TOKENS, "local": 12}, "local must be less than the shortest text.s 12 tokens, got 12"),
    ("head_labels", {"length": 10**6}, "length must be at most"),
    ("head_labels", {"sinks": 4, "window": 99, "streaming": True}, "window and sinks must hide keys"),
    ("length_generalization", {"lengths": [0, 11, 12]}, r"a token to predict in the last, got \[0, 11, 12\]"),
    ("length_generalization", {"lengths": [0, 2, 4]}, "three positions or more in the first bucket"),
    ("length_generalization", {"lengths": [4, 12], "in_range": 6}, "in_range must be an integer from 7 to 12, got 6"),
    ("length_generalization", {"lengths": [4, 12], "in_range": 13}, "in_range must be an integer from 7 to 12"),
    ("length_generalization", {"lengths": [4, 12], "in_range": 8.0}, "in_range must be an integer"),
    ("output_projection", {"in_range": 13}, "in_range must be an integer from"),
    ("perturb", {"unit": "word"}, 'unit must be "token" for a model without a tokenizer, got "word"'),
    ("perturb", {"until": 2}, "tokens must have at least two tokens that can move .* got 1"),
    ("perturbation_curve", {"kinds": ["order", "order"]}, "kinds must be some of order, index, feature, each once"),
    ("substitute_attention", {"by": "banded", "bands": ()}, "bands must be .* at least one"),
    ("perturbation_curve", CURVE | {"downstream": 3}, "downstream must be a function, a MultipleChoice or a list of"),
    ("perturbation_curve", CURVE | {"downstream": lambda model, perturb: None}, "must return a number, got None"),
    ("perturbation_curve", CURVE | {"downstream": lambda model, perturb: NAN}, "a finite number, got nan"),
    ("perturbation_curve", CURVE | {"downstream": lambda model, perturb: X}, "downstream must return a number"),
    ("controlled_distance", {"sinks": 12}, "sinks must"),
    ("positional_symbolic", {"sinks": 11}, "sinks must"),
    ("attention_ladder", {"tokens": TOKENS[:, :8], "heldout": TOKENS}, "heldout must be no longer"),
    ("substitute_attention", {"by": {0: None}}, "by must"),
    ("ablate_heads", {"mode": "mean"}, "reference must"),
    ("ablate_heads", {"reference": TOKENS}, 'reference must not be given with mode "zero", got Tensor'),
    ("ablate_heads", {"mode": "mean", "reference": "a text"}, "reference: tokens were given as text"),
    ("limit_frequencies", {"low": 2.0, "high": 1.0}, "low"),
    (
        "limit_frequencies",
        {"low": 100},
        "must enclose a frequency, .* got 100 and inf, and the layers have .*, 1$",
    ),
    ("limit_frequencies", {"low": 0.5, "high": 0.6}, "low and high must enclose a frequency, .* got 0.5 and 0.6"),
    ("patch_vectors", {"q_rot": None, "k_rot": None}, "q_rot"),
    ("component_patching", {"source": None}, "exactly one of source or source_positions"),
    ("component_patching", {"source_positions": SHIFTED}, "exactly one of source or source_positions"),
    ("component_patching", {"source": None, "source_positions": SHIFTED}, "source_positions must change the metric"),
    ("component_patching", {"source": None, "source_positions": [[[1.0]]]}, r"positions must have shape \(pos,\) or"),
    ("component_patching", {"component": ["key", "key"]}, "component must be some of"),
    ("position_patching", {"positions": SHIFTED}, "positions must change the metric, but it is .* no effect to divide"),
    ("position_patching", {"metric": lambda x, t: 3}, "positions must change the metric, but it is 3 in one run and 3"),
    ("position_patching", {"positions": GOOD["positions"].expand(3, 12)}, "given for 3 texts, and the model runs on 2"),
    ("head_ablation", {"metric": lambda logits, tokens: logits}, "metric must"),
    ("head_patching", {"metric": lambda logits, tokens: logits[:, -1, 5] * NAN}, "metric must"),
    ("positional_subspace", {"rank": 999}, "rank must"),
    ("positional_subspace", {"tokens": TOKENS[:1]}, "tokens"),
    ("positional_subspace", {"sinks": 11}, "sinks must be an integer from 0 to 10, got 11"),
    ("logit_difference", {"answers": " Mary"}, "answers must be token ids"),
    ("logit_difference", {"answers": [-1]}, "answers must be token ids: an integer"),
    ("logit_difference", {"answers": [[1], []]}, "answers must be token ids: an integer"),
    ("logit_difference", {"wrong": [[[1]]]}, "wrong must be token ids"),
    ("logit_difference", {"position": []}, "position must be an integer"),
    ("MultipleChoice", {"choices": []}, "choices must"),
    ("MultipleChoice", {"answer": 2}, "answer"),
    ("MultipleChoice", {"answer": -1}, "answer"),
    ("MultipleChoice", {"choices": "ab"}, "choices must be a sequence of at least two"),
    ("MultipleChoice", {"choices": TOKENS[0]}, "choices must be a sequence of at least two"),
    ("MultipleChoice", {"choices": [" a", ""]}, r"choices\[1\] must be text or integer token ids .* not empty, got ''"),
    ("MultipleChoice", {"context": ""}, "context must be text or integer token ids .* got ''"),
    ("MultipleChoice", {"context": TOKENS}, r"context must be .* got torch.int64 of shape \(2, 12\)"),
    ("MultipleChoice", {"context": TOKENS[0] > 3}, "context must be .* got torch.bool"),
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
    ("SyntheticConfig", {"dropout_at": "embed"}, "dropout_at must be a sequence of .* got 'embed'"),
    ("SyntheticConfig", {"d_rope": 4, "encoding": "learned"}, "d_rope must be left out with encoding='learned'"),
    ("SyntheticConfig", {"rotary_heads": 1, "encoding": "alibi"}, "rotary_heads must be left out with"),
    ("SyntheticConfig", {"rotary_heads": 3}, "rotary_heads must be an integer from 0 to 2 .n_heads., got 3"),
    ("SyntheticConfig", {"d_head": 7}, "d_head must be even to be rotated in pairs, got 7"),
    ("SyntheticConfig", {"d_model": 25, "d_head": 8, "encoding": "sinusoidal"}, "d_model must be even .* got 25"),
    ("SyntheticConfig", {"rope_base": 0.0}, "rope_base must be a finite number above 0, got 0.0"),
    ("SyntheticConfig", {"encoding": "mla", "d_rope": 3}, "d_rope must be even, above 0 and below d_head = 8, got 3"),
    ("SyntheticConfig", {"encoding": "t5", "t5_buckets": 6}, "t5_buckets must be a multiple of 4, got 6"),
    ("SyntheticConfig", {"encoding": "t5", "t5_max_distance": 8}, "t5_max_distance must be an integer of at least 9"),
    ("SyntheticConfig", {"pad_id": 8}, "pad_id must be an integer from 0 to 7 .a token id., got 8"),
    ("TrainConfig", {"epochs": 1, "checkpoints": (10**9,)}, "checkpoints must be"),
    ("TrainConfig", {"n_train": 4}, "n_train must be"),
    ("TrainConfig", {"lr": 0.0}, "lr must be a finite number above 0, got 0.0"),
    ("TrainConfig", {"betas": (0.9, 1.0)}, "betas must be a finite number of at least 0 and below 1, got 1.0"),
    ("TrainConfig", {"weight_decay": -1.0}, "weight_decay must be a finite number of at least 0, got -1.0"),
    ("TrainConfig", {"warmup": 1.5}, "warmup must be a finite number of at least 0 and at most 1, got 1.5"),
    ("TrainConfig", {"clip": 0.0}, "clip must be a finite number above 0, got 0.0"),
    ("TrainConfig", {"seed": 2**32}, "seed must be an integer from 0 to 4294967295, got 4294967296"),
    ("TriggerCount", {"d_vocab": 8, "n_triggers": 8}, "d_vocab"),
    ("TriggerCount", {"max_count": 101}, "min_length must be an integer of at least 101 .*must have room.*got 100"),
    ("TriggerCount", {"min_count": 101}, "max_count must be an integer of at least 101"),
    ("TriggerCount", {"max_length": 99}, "max_length must be an integer of at least 100"),
    ("TriggerCount", {"n_ctx": 119}, "n_ctx must be an integer of at least 120"),
    ("TriggerCount", {"n_logits": 100}, "n_logits must be an integer of at least 101"),
    ("TriggerDistance", {"min_gap": 5, "max_gap": 2}, "max_gap must be"),
    ("TriggerDistance", {"n_ctx": 10}, "n_ctx must be"),
    ("TriggerDistance", {"d_vocab": 2}, "d_vocab must be an integer of at least 3"),
    ("TriggerDistance", {"min_side": 26}, "max_side must be an integer of at least 26 .*got 25"),
    ("TriggerDistance", {"max_length": 96}, r"max_length must be an integer of at least 97 \(max_side \+ max_gap \+ 2"),
    ("TriggerDistance", {"n_logits": 69}, "n_logits must be an integer of at least 70"),
    ("TriggerDistance", {"d_vocab": 71, "repeats": False}, "d_vocab must be an integer of at least 72 .*got 71"),
    ("train", {"model": synthetic(d_vocab=4)}, "d_vocab"),
    ("train", {"resume": True}, "folder must be given"),
    ("train", {"task": FEW_SAMPLES, "config": replace(FEW, n_train=500)}, r"n_train \+ n_test"),
    ("train", {"model": LINEAR}, "model must be a SyntheticModel, got Linear"),
    ("train", {"model": synthetic(n_ctx=5)}, "model must have n_ctx of at least 6 for this task, got 5"),
    ("train", {"model": synthetic(n_out=3)}, "model must have n_out of at least 4 for this task, got 3"),
    ("train", {"model": synthetic(pad_id=1)}, "model must have pad_id=0, the task's, or None to read padding .* got 1"),
    ("positional_gradients", {"model": LINEAR}, "model must be a SyntheticModel, got Linear"),
    ("positional_gradients", {"model": synthetic(read_out="token")}, 'one answer per text .* got "token"'),
    ("positional_gradients", {"model": synthetic(encoding="learned"), "part": "encoding"}, 'part must be "distance"'),
    ("positional_gradients", {"batches": 1}, "batches must be an integer of at least 2, got 1"),
    ("positional_gradients", FIVE | {"task": (SAMPLES, LABELS)}, "batch_size = 20 texts, got 16 texts and 16 labels"),
    ("positional_gradients", FIVE | {"task": (SAMPLES, LABELS[:3])}, "got 16 texts and 3 labels"),
    ("evaluate", {"tokens": SAMPLES[:0], "labels": SAMPLES[:0, 0]}, "tokens must"),
    ("evaluate", {"labels": TASK.batch(16)[1] + 90}, "labels must be"),
    ("evaluate", {"labels": TASK.batch(3)[1]}, "labels must be"),
    ("evaluate", {"labels": LABELS[:, None]}, "labels must be integers of shape"),
    ("evaluate", {"labels": LABELS * 0 - 100}, "labels must have at least one other than -100"),
    ("head_drops", {"tokens": PADDED, "mode": "resample"}, 'tokens must be .* for mode "resample"'),
    ("sufficient_heads", {"model": synthetic(encoding="none")}, "by must be.*'none'"),
    ("sufficient_heads", {"model": LINEAR}, "model must be a SyntheticModel, got Linear"),
    ("sufficient_heads", {"order": pd.DataFrame()}, "order must be a table of head_drops"),
    ("sufficient_heads", {"order": DROPS[:1].assign(loss_effect=0.0)}, "a finite loss_effect for every head, .* L0H1"),
    ("deposit", {"drops": DROPS.iloc[:0]}, "drops must have rows"),
    ("deposit", {"drops": DROPS.assign(effect=NAN)}, "drops must have finite"),
    ("deposit", {"drops": DROPS.assign(head=0)}, "drops must have one row per head"),
    ("deposit", {"drops": DROPS.drop(columns="effect")}, "as a table of head_ablation, got no column 'effect'"),
    ("deposit", {"drops": DROPS.assign(baseline=INF)}, "drops must have finite numbers as baseline, got inf"),
    ("deposit", {"drops": DROPS.assign(baseline=[0.1, 0.2])}, r"drops must come from one model, .* got \[0.1, 0.2\]"),
    ("deposit", {"measure": "loss"}, "drops must have the column 'loss_baseline'"),
    ("deposit", {"sufficient": [1]}, "sufficient must be of type SufficientHeads, got int"),
    ("gradient_margins", {"table": HEADS[:1]}, "at least two heads"),
    ("train_preset", {"width": 3}, "width"),
    ("show_scores", {"tokens": WORDS[:5]}, "tokens must be as many"),
    ("show_scores", {"scale": 0.0}, "scale must be"),
    ("show_scores", {"fit": tp.fit_additive(X[None, None])}, r"got 3 leading axes: \(1, 1, 3\)"),
    ("show_scores", {"component": "scores"}, "scores must be given to show the component 'scores'"),
    ("show_scores", {"component": "residual"}, "scores must be given to show the component 'residual'"),
    ("show_scores", {"positions": [3, 2]}, r"positions must be ascending, got \[3, 2\]"),
    ("show_key_importance", {"fit": {0: FIT, 1: tp.fit_additive(SCORES[:1])}}, "one of the same shape for each layer"),
    ("show_key_importance", {"fit": {}}, "one of the same shape for each layer"),
    ("show_patterns", {"pattern": SCORES * 9}, "pattern must be probabilities"),
    ("show_patterns", {"pattern": SCORES[:, :2].softmax(-1)}, "pattern must have"),
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


CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: TASK.batch(0), "n must be an integer of at least 1, got 0"),
    (lambda: TASK.batch(1, seed=-1), "seed must be an integer from 0 to 4294967295, got -1"),
    (lambda: TASK.split(1, 1, seed=2**32), "seed must be an integer from 0 to 4294967295, got 4294967296"),
    (lambda: TASK.batch(1, torch.Generator(), device="meta"), "device must be the generator's, cpu, or None, got meta"),
    (lambda: tp.synthetic.dynamics(TrainRun(synthetic(), TASK, FEW, pd.DataFrame())), "run must have checkpoints"),
    (lambda: decompose(GOOD["moments"], [1, 2], scale=1.0).share("place"), "component must be 'distance', .* 'place'"),
]


@pytest.mark.parametrize(("refused", "message"), CALLS, ids=[message[:40] for _, message in CALLS])
def test_methods_refuse_what_does_not_fit(refused: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refused()


# Some of it at once, what depends on the text as soon as the model runs on one.
HOOKS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda m: tp.swap_positions(m, torch.arange(5)), "positions were given for 5.*12"),
    (lambda m: tp.swap_positions(m, torch.zeros(2, 2, 12)), r"positions must have shape \(pos,\) .*\(2, 2, 12\)"),
    (lambda m: tp.swap_positions(m, torch.arange(12) > 3), "positions must be finite real numbers"),
    (lambda m: tp.remap_distance(m, torch.zeros(12)), r"distances must have shape \(query, key\), .*got \(12,\)"),
    (lambda m: tp.remap_distance(m, torch.zeros(1, 1, 1, 12, 12)), r"distances must have shape .*\(1, 1, 1, 12, 12\)"),
    (lambda m: tp.remap_distance(m, torch.zeros(12, 12) * 1j), "distances must be a dense tensor of real numbers"),
    (lambda m: tp.remap_distance(m, torch.zeros(5, 5)), "distances"),
    (lambda m: tp.remap_distance(m, lambda d: None), "distances"),
    (lambda m: tp.remap_distance(m, lambda d: 5), "same shape .*, got 5"),
    (lambda m: tp.remap_distance(m, lambda d: d[:-1]), "same shape .*, got a Tensor of shape"),
    (lambda m: tp.remap_distance(m, torch.log), "got values that are not finite"),
    (lambda m: tp.remap_distance(m, lambda d: min(d, 16)), r"distances is called with a .*tensor .* d\.clamp\(max=16"),
    (lambda m: phase_noise(m, torch.zeros(12)), r"noise must have shape \(pos, subspace\) or .* got \(12,\)"),
    (lambda m: phase_noise(m, torch.zeros(0, 4)), r"noise must have shape .* got \(0, 4\)"),
    (lambda m: phase_noise(m, torch.full((12, 4), NAN)), "noise must be finite real numbers"),
    (lambda m: phase_noise(m, numbers(12, 3)), r"noise must have shape .* \(12, 4\) .* got \(12, 3\)"),
    (lambda m: phase_noise(m, numbers(11, 4), heads=[1]), r"noise must have shape .* \(12, 4\) .* got \(11, 4\)"),
    (lambda m: phase_noise(m, numbers(3, 12, 4)), r"noise must have shape .* \(12, 4\) .* got \(3, 12, 4\)"),
    (lambda m: patch_vectors(m, 0, KEYS, KEYS), r"q_rot must have shape \(batch, pos, 8, 8\), got \(2, 12, 4, 8\)"),
    (
        lambda m: patch_vectors(m, 0, QUERIES, QUERIES),
        r"k_rot must have shape .* got \(2, 12, 8, 8\)",
    ),
    (lambda m: patch_vectors(m, 0, QUERIES[0], KEYS), r"q_rot must have shape .* got \(12, 8, 8\)"),
    (lambda m: patch_vectors(m, 0, "q", KEYS), "q_rot must have shape .* got str"),
    (lambda m: patch_vectors(m, 0, QUERIES[:1], None), r"q_rot must have the shape of the run's own, \(2, 12, 8, 8\)"),
    (lambda m: patch_vectors(m, 0, None, KEYS[:, :5]), r"k_rot must have the shape of the run's own, \(2, 12, 4, 8\)"),
    (lambda m: patch_vectors(m, 0, QUERIES / 0, KEYS), "q_rot must be finite"),
    (
        lambda m: patch_scores(m, 0, SCORES[:1], "key"),
        r"scores must have the shape of the run's own, .* got \(1, 8, 12, 12\)",
    ),
    (lambda m: patch_scores(m, 0, SCORES[..., :5, :5], "key"), "scores must have the shape of the run's own"),
    (lambda m: patch_scores(m, 0, SCORES * NAN, "key"), "scores of layer 0 must be finite inside the mask of the run"),
]
QUERIES, KEYS = torch.zeros(2, 12, 8, 8), torch.zeros(2, 12, 4, 8)


@pytest.mark.parametrize(("hooks", "message"), HOOKS, ids=range(len(HOOKS)))
def test_hooks_that_do_not_fit_are_refused(hooks: Callable[[Any], Any], message: str, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    with pytest.raises(ValueError, match=message):
        model.run_with_hooks(TOKENS, fwd_hooks=hooks(model))
