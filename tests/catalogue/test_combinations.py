"""Arguments that are good each by itself and do not fit the others, the model or the text: the error names them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from support.intervention_cases import patch_scores
from support.public_calls import (
    DROPS,
    GOOD,
    HEADS,
    LABELS,
    ROTARY,
    SAMPLES,
    SCORES,
    TASK,
    TOKENS,
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
from tl_posdisent.synthetic import TriggerCount
from tl_posdisent.utils.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("unchecked")

NAN = float("nan")
X = numbers(3, 6, 6)
NOTHING = torch.zeros(6, 6, dtype=torch.bool)
ONE_CELL = NOTHING.index_put((torch.tensor(4), torch.tensor(2)), torch.tensor(True))
FEW_SAMPLES = TriggerCount(d_vocab=3, n_triggers=1, max_count=1, min_length=2, max_length=2, n_ctx=6)

LINEAR = torch.nn.Linear(2, 2)
ANGLES = torch.arange(64)[:, None] * ROTARY.frequencies
BENT = ANGLES + 0.1 * (torch.arange(64) == 37)[:, None]  # at a position that doubling from the first does not come by
SHIFTED = torch.arange(12) + 1000
CURVE = {"kinds": ["order"], "fractions": [0, 0.5], "seeds": 1}
FIVE = {"batches": 5, "batch_size": 4}


def with_one(value: float) -> torch.Tensor:
    return X.index_put(tuple(torch.zeros(3, dtype=torch.long)), torch.tensor(value))


# The function, what is not as in a good call, and the argument, or the arguments, that the error is about.
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("fit_additive", {"scores": with_one(-3.4e38)}, "scores"),
    ("fit_additive", {"scores": numbers(6, 4)}, "scores"),
    ("fit_additive", {"scores": X, "mask": NOTHING}, "mask"),
    ("fit_additive", {"scores": X, "mask": ONE_CELL[:5]}, "mask"),
    ("fit_additive", {"scores": X[0], "pool": True}, "pool"),
    ("fit_additive", {"scores": torch.ones(3)}, "scores"),
    ("fit_additive", {"scores": torch.ones(2, 0, 3)}, "scores"),
    ("fit_additive", {"scores": {"blocks.0.hook_z": X}}, "scores"),
    ("fit_additive", {"scores": [X, X[:, :5, :5]]}, "scores of several layers"),
    ("fit_additive", {"scores": X, "mask": ONE_CELL * 1.0}, "mask"),
    ("fit_additive", {"scores": X[0], "mask": ONE_CELL.expand(2, 6, 6)}, "mask"),
    ("fit_additive", {"scores": X, "sinks": 6}, "sinks"),
    ("fit_additive_qk", {"k_rot": torch.zeros(2, 12, 4, 7)}, "q_rot and k_rot"),
    ("fit_additive_qk", {"q_rot": torch.zeros(2, 12, 8, 8) * NAN}, "q_rot"),
    ("fit_additive_qk", {"mask": ONE_CELL}, "mask"),
    ("fit_attention", {"scores": None}, "pass exactly one of scores or pattern="),
    ("fit_attention", {"scores": X.softmax(-1)}, "scores"),
    ("fit_attention", {"scores": None, "pattern": X.softmax(-1)}, "pattern"),
    ("fit_attention", {"scores": X, "keys": numbers(5, 1, 4)}, "keys"),
    ("rotate", {"x": Q[..., :3]}, "x"),
    ("rotate", {"positions": torch.arange(9).expand(3, 9)}, "positions"),
    ("rotate", {"x": Q[0, :, 0]}, "x"),
    ("rotate", {"positions": torch.full((9,), True)}, "positions"),
    ("Rotary", {"frequencies": ROTARY.frequencies[None]}, "frequencies"),
    ("Rotary", {"frequencies": ROTARY.frequencies / 0}, "frequencies"),
    ("rotary_from_table", {"sin": torch.zeros(5, 2)}, "cos and sin"),
    ("rotary_from_table", {"cos": BENT.cos(), "sin": BENT.sin()}, "cos and sin"),
    ("Moments", {"q": numbers(2, 9, 3, 6)}, "the number of key heads"),
    ("Moments", {"k": K[..., :5]}, "queries and keys"),
    ("Moments", {"q": Q[0, 0]}, "q"),
    ("Moments", {"k": K[:0]}, "k"),
    ("Moments", {"q": Q[..., :2], "k": K[..., :2]}, "d_head"),
    ("Moments", {"q": Q.double() * 1e200}, "q"),
    ("decompose", {"distances": torch.ones(2, 2)}, "distances"),
    ("subspace_patterns_qk", {"k": K * NAN}, "k"),
    ("additivity", {"mask": NOTHING}, "mask"),
    ("head_labels", {"length": 10**6}, "length"),
    ("length_generalization", {"lengths": [0, 4, 13]}, "lengths"),
    ("length_generalization", {"ignore": TOKENS[:, :4].flatten()}, "ignore"),  # nothing is left below 4
    *((of, {"metric": GOOD["metric"], "ignore": 3}, "ignore") for of in ("head_ablation", "head_effects")),
    *((of, {"metric": GOOD["metric"], "ignore": 3}, "ignore") for of in ("attention_ladder", "head_patching")),
    *((of, {"metric": GOOD["metric"], "ignore": 3}, "ignore") for of in ("position_patching", "component_patching")),
    ("perturb", {"unit": "word"}, "unit"),
    ("perturb", {"until": 2}, "tokens"),
    ("perturbation_curve", CURVE | {"downstream": 3}, "downstream"),
    ("perturbation_curve", CURVE | {"downstream": lambda model, perturb: NAN}, "downstream"),
    ("controlled_distance", {"sinks": 12}, "sinks"),
    ("attention_ladder", {"tokens": TOKENS[:, :8], "heldout": TOKENS}, "heldout"),
    ("ablate_heads", {"mode": "mean"}, "reference"),
    ("ablate_heads", {"reference": TOKENS}, "reference"),
    ("ablate_heads", {"mode": "mean", "reference": "a text"}, "reference"),
    ("limit_frequencies", {"low": 2.0, "high": 1.0}, "low"),
    ("limit_frequencies", {"unrotated": "drop"}, "unrotated"),
    (
        "limit_frequencies",
        {"low": 100, "high": None},
        "low and high",
    ),
    ("patch_vectors", {"q_rot": None, "k_rot": None}, "q_rot or k_rot"),
    ("component_patching", {"source": None}, "pass exactly one of source or source_positions"),
    ("component_patching", {"source": None, "source_positions": [[[1.0]]]}, "positions"),
    ("position_patching", {"positions": SHIFTED}, "positions"),
    ("position_patching", {"positions": GOOD["positions"].expand(3, 12)}, "positions"),
    ("head_ablation", {"metric": lambda logits, tokens: logits}, "metric"),
    ("head_patching", {"metric": lambda logits, tokens: logits[:, -1, 5] * NAN}, "metric"),
    ("positional_subspace", {"rank": 999}, "rank"),
    ("positional_subspace", {"tokens": TOKENS[:1]}, "tokens"),
    ("logit_difference", {"answers": [[1], []]}, "answers"),
    ("demo_tokens", {"length": 10**6}, "length"),
    ("SyntheticConfig", {"n_heads": 3}, "n_heads"),
    ("SyntheticConfig", {"dropout": 1.0}, "dropout"),
    ("SyntheticConfig", {"d_rope": 4, "encoding": "learned"}, "d_rope"),
    ("SyntheticConfig", {"rotary_heads": 1, "encoding": "alibi"}, "rotary_heads"),
    ("SyntheticConfig", {"rotary_heads": 3}, "rotary_heads"),
    ("SyntheticConfig", {"d_head": 7}, "d_head"),
    ("SyntheticConfig", {"d_model": 25, "d_head": 8, "encoding": "sinusoidal"}, "d_model"),
    ("SyntheticConfig", {"encoding": "mla", "d_rope": 3}, "d_rope"),
    ("SyntheticConfig", {"encoding": "t5", "t5_buckets": 6}, "t5_buckets"),
    ("SyntheticConfig", {"encoding": "t5", "t5_max_distance": 8}, "t5_max_distance"),
    ("SyntheticConfig", {"pad_id": 8}, "pad_id"),
    ("SyntheticConfig", {"n_train": 4}, "n_train"),
    ("SyntheticConfig", {"seed": 2**32}, "seed"),
    ("Brackets", {"min_pairs": 2}, "min_pairs"),
    ("Brackets", {"min_pairs": 61}, "max_pairs"),
    ("Brackets", {"n_ctx": 119}, "n_ctx"),
    ("Reversal", {"d_vocab": 2}, "d_vocab"),
    ("Reversal", {"min_length": 1}, "min_length"),
    ("Reversal", {"min_length": 121}, "max_length"),
    ("Reversal", {"n_ctx": 119}, "n_ctx"),
    ("TriggerCount", {"d_vocab": 8, "n_triggers": 8}, "d_vocab"),
    ("TriggerCount", {"max_count": 101}, "min_length"),
    ("TriggerCount", {"min_count": 101}, "max_count"),
    ("TriggerCount", {"n_logits": 100}, "n_logits"),
    ("TriggerDistance", {"min_gap": 5, "max_gap": 2}, "max_gap"),
    ("TriggerDistance", {"n_ctx": 10}, "n_ctx"),
    ("TriggerDistance", {"d_vocab": 2}, "d_vocab"),
    ("TriggerDistance", {"min_side": 26}, "max_side"),
    ("TriggerDistance", {"max_length": 96}, "max_length"),
    ("TriggerDistance", {"n_logits": 69}, "n_logits"),
    ("TriggerDistance", {"d_vocab": 71, "repeats": False}, "d_vocab"),
    ("train", {"model": synthetic(d_vocab=4)}, "model"),
    ("train", {"model": synthetic(n_train=500), "task": FEW_SAMPLES}, "n_train + n_test"),
    ("train", {"model": LINEAR}, "model"),
    ("train", {"model": synthetic(n_ctx=5)}, "model"),
    ("train", {"model": synthetic(n_out=3)}, "model"),
    ("train", {"model": synthetic(pad_id=1)}, "model"),
    ("positional_gradients", {"model": synthetic(read_out="token")}, "model"),
    ("positional_gradients", {"model": synthetic(encoding="learned"), "part": "encoding"}, "part"),
    ("positional_gradients", FIVE | {"task": (SAMPLES, LABELS)}, "task"),
    ("evaluate", {"tokens": SAMPLES[:0], "labels": SAMPLES[:0, 0]}, "tokens"),
    ("evaluate", {"labels": TASK.batch(16)[1] + 90}, "labels"),
    ("evaluate", {"labels": TASK.batch(3)[1]}, "labels"),
    ("evaluate", {"labels": LABELS * 0 - 100}, "labels"),
    ("head_drops", {"mode": "resample"}, "mode"),
    ("sufficient_heads", {"model": synthetic(encoding="none")}, "model"),
    ("sufficient_heads", {"order": pd.DataFrame()}, "order"),
    ("sufficient_heads", {"order": DROPS[:1].assign(loss_effect=0.0)}, "order"),
    ("deposit", {"drops": DROPS.assign(effect=NAN)}, "drops"),
    ("deposit", {"drops": DROPS.assign(head=0)}, "drops"),
    ("deposit", {"drops": DROPS.drop(columns="effect")}, "drops"),
    ("deposit", {"measure": "loss"}, "drops"),
    ("gradient_margins", {"table": HEADS[:1]}, "table"),
    ("show_scores", {"fit": tp.fit_additive(X[None, None])}, "scores"),
    ("show_scores", {"component": "scores"}, "scores"),
    ("show_scores", {"positions": [3, 2]}, "positions"),
    ("show_patterns", {"pattern": SCORES * 9}, "pattern"),
    ("show_patterns", {"pattern": SCORES[:, :2].softmax(-1)}, "pattern"),
    ("plot_length", {"tables": {}}, "tables"),
]


def about(error: Exception) -> str:
    """The argument of an error, or its whole text where it is about several."""
    return error.argument if isinstance(error, ArgumentError) else str(error)


@pytest.mark.parametrize(("of", "changed", "named"), ROWS, ids=[f"{row[0]}-{','.join(row[1])}" for row in ROWS])
def test_what_does_not_fit_is_refused(of: str, changed: dict[str, Any], named: str, shared_reading: Any) -> None:
    function = callables()[of]
    if "model" in inspect.signature(function).parameters:
        changed = {"model": model_for(function, shared_reading("bridge", "llama-gqa"))} | changed
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        call(function, **changed)
    assert about(caught.value).startswith(named)


CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: TASK.batch(0), "n"),
    (lambda: TASK.batch(1, seed=-1), "seed"),
    (lambda: TASK.split(1, 1, seed=2**32), "seed"),
    (lambda: tp.synthetic.dynamics({}, TASK), "models"),
    (lambda: decompose(GOOD["moments"], [1, 2], scale=1.0).share("place"), "component"),
]


@pytest.mark.parametrize(("refused", "named"), CALLS)
def test_methods_refuse_what_does_not_fit(refused: Callable[[], Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        refused()
    assert about(caught.value) == named


# Some of it at once, what depends on the text as soon as the model runs on one.
HOOKS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda m: tp.swap_positions(m, torch.arange(5)), "positions"),
    (lambda m: tp.swap_positions(m, torch.zeros(2, 2, 12)), "positions"),
    (lambda m: tp.swap_positions(m, torch.arange(12) > 3), "positions"),
    (lambda m: tp.remap_distance(m, torch.zeros(12)), "distances"),
    (lambda m: tp.remap_distance(m, torch.zeros(12, 12) * 1j), "distances"),
    (lambda m: tp.remap_distance(m, torch.zeros(5, 5)), "distances"),
    (lambda m: tp.remap_distance(m, lambda d: d[:-1]), "distances"),
    (lambda m: tp.remap_distance(m, torch.log), "distances"),
    (lambda m: tp.remap_distance(m, lambda d: min(d, 16)), "distances"),
    (lambda m: tp.knock_out(m, 12, 0), "queries"),
    (lambda m: tp.knock_out(m, 5, torch.ones(5) > 0), "keys"),
    (lambda m: tp.knock_out(m, keys=range(12)), "knock_out"),
    (lambda m: tp.knock_out(m, cells=torch.ones(5, 5) > 0), "cells"),
    (lambda m: tp.ablate_heads(m, [(0, 1)], positions=12), "positions"),
    (lambda m: phase_noise(m, torch.zeros(12)), "noise"),
    (lambda m: phase_noise(m, torch.full((12, 4), NAN)), "noise"),
    (lambda m: phase_noise(m, numbers(12, 3)), "noise"),
    (lambda m: patch_vectors(m, 0, KEYS, KEYS), "q_rot"),
    (
        lambda m: patch_vectors(m, 0, QUERIES, QUERIES),
        "k_rot",
    ),
    (lambda m: patch_vectors(m, 0, QUERIES[:1], None), "q_rot"),
    (lambda m: patch_vectors(m, 0, None, KEYS[:, :5]), "k_rot"),
    (lambda m: patch_vectors(m, 0, QUERIES / 0, KEYS), "q_rot"),
    (
        lambda m: patch_scores(m, 0, SCORES[:1], "key"),
        "scores",
    ),
    (lambda m: patch_scores(m, 0, SCORES * NAN, "key"), "scores of layer 0"),
]
QUERIES, KEYS = torch.zeros(2, 12, 8, 8), torch.zeros(2, 12, 4, 8)


@pytest.mark.parametrize(("hooks", "named"), HOOKS, ids=range(len(HOOKS)))
def test_hooks_that_do_not_fit_are_refused(hooks: Callable[[Any], Any], named: str, shared_model: Any) -> None:
    model = shared_model("bridge", "llama-gqa")
    with pytest.raises(ValueError, match=named) as caught:
        model.run_with_hooks(TOKENS, fwd_hooks=hooks(model))
    assert about(caught.value).startswith(named)
