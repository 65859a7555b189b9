"""Every argument of every public function refuses bad values of its kind, in words that begin with its name.

Functions and arguments are found, not listed: a new one is tested from its first day, or the test names it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from functools import cache
from itertools import islice
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pandas as pd
import pytest
import torch
from jaxtyping import AbstractArray
from support.lanes import LONG
from support.public import public_names
from support.public_calls import (
    SCORES,
    TOKENS,
    Function,
    call,
    callables,
    model_for,
    numbers,
)
from support.untouched import state

import tl_posdisent as tp
from tl_posdisent.models.loading.load import has_hooked
from tl_posdisent.utils.errors import ArgumentError

NAN, INF = float("nan"), float("inf")


def words_of(text: str) -> set[str]:
    return set(text.split())


# Bad values, or pairs of one and what its error must say beyond the argument's name, and the arguments of that kind by
# name: those of which the annotation says no more than that they are integers, sequences or words.
KINDS: dict[str, tuple[Sequence[Any], str]] = {
    "flag": ([1, "yes"], ""),
    "choice": (["no such thing", 3], "measure piece part dtype"),
    "column": ([("no such thing", "table must have the columns .*no such thing")], ""),
    "": ([], ""),
    "choices": ([["no such thing"], 3], "encodings measures remove rungs tasks"),
    "count": ([0, 2.5, True, "3", NAN, 2**63, 10**400], ""),
    "count or none": (
        [-1, 0.5, True, "a", NAN, 2**63],
        "control distance_ceiling draws exact first_label max_count min_count min_gap min_side"
        " pad_id rotary_heads sinks split_seed start until",
    ),
    "seed": ([-1, 0.5, True, "a"], "seed"),
    "seeds": ([0, [], [-1], "0", 0.5], "seeds"),
    "seeds or none": ([-1, [-1], "0", "", 0.5, [1, 1]], ""),
    "number": ([NAN, "1", True, 1j, 10**400], "noise"),
    "scales": ([0, -1.0, NAN, "wide", [], [0.1, 0.1], True], "std"),
    "one head": ([3, "L9H0", "head", (0, 9), [(0, 1)], (0, 1, 2), None], "head"),
    "index": ([8, -9, 0.5, "0", True, 2**63], "layer"),
    "indices": ([[8], [-9], [True], [0.0], ["0"], "0", [], [1, 1], 10**400, {1: [0]}, 1.0], "layers heads"),
    "tokens": (
        [
            *(TOKENS.float(), TOKENS * 1j, TOKENS > 30, TOKENS.tolist(), None),
            *(TOKENS[None], TOKENS[0, 0], TOKENS[:, :1], TOKENS[:0]),
            *(TOKENS + 58, TOKENS - 30),  # ids that the model does not have
            *("a text", ["a text", "and one"]),  # the model has no tokenizer
        ],
        "tokens",
    ),
    "words": ([None, TOKENS[0].tolist(), ["w"] * 11], ""),
    "samples": ([None, "ids", [1.0]], "labels"),
    "token mask": ([NAN, "mask", torch.ones(5), numbers(2, 12)], "attention_mask reference"),
    "distances": ([[], [NAN], "near", [[1, 2]]], "distances far near"),
    "fractions": ([[], [NAN], "x", [2.0]], "fractions"),
    "lengths": ([[0, 12, 4], [0, 400], [], "x", [NAN]], "lengths"),
    "positions": (
        [torch.full((12,), NAN), torch.full((12,), INF), "0123", [], torch.arange(12) * 1j, [0, 10**400]],
        "positions",
    ),
    "ignored": ([-1, 512, 2.5, True, "<s>", ["<s>"], [[1]], torch.ones(2)], "ignore"),
    "places": ([12, -13, [0, 0], [0.5], [], "0", True], ""),
    "slots": ([[0, 0], [0.5], [], "0", True, 10**400], ""),  # those beyond a text are refused while it runs
    "cells": ([3, "x", [[True]], torch.ones(12, 12), torch.ones(12, dtype=torch.bool)], "cells"),
    "source": ([TOKENS[:, :5]], "source"),
    "metric": ([3, "loss"], ""),
    "device": (["no such device"], "device"),
    "path": ([5, None, 2.5, True, b"a", ["a"], TOKENS], "checkpoint folder name_or_dir out path"),
    "tokenizer": (["gpt2", 3, ["a"], b"a"], "tokenizer"),
    "dtype": ([torch.int64, "float32"], ""),
    "betas": ([0.9, (0.9, 0.9, 0.9), (NAN, 0.9)], "betas"),
    "wavelengths": ([[0.0], [NAN], "x"], "wavelengths"),
    "token": ([0.5, "a"], "against position"),
    "hooks": ([3, [("x", print)]], "hooks"),
    "interventions": ([3, {}, [], "x", {"x": 3}, {3: []}, {"x": [("x", print)]}], "interventions"),
    "groups": ([3, {}, ["L0H1"], {"a": ["L9H0"]}, {3: ["L0H1"]}, {"a": []}, {"a": "head"}], "groups"),
    "limits": ([3, (1.0, 0.0), (NAN, 1.0)], "limits"),
    "title": ([3], "title"),
    "number of a text": ([3, -1.5, "x"], ""),
    "a text": ([3, None], "text"),
    "scores": (
        [
            None,
            "x",
            SCORES.tolist(),
            SCORES.long(),
            SCORES > 0,
            SCORES * 1j,
            SCORES * NAN,
        ],
        "scores",
    ),
    "vectors": ([None, 3, "x", [1.0], SCORES.long()], ""),
    "numbers": ([None, [0.0, NAN], [1.0]], "target"),
    "answers": ([None, 3.5, "a"], "answers"),
    "result": ([None, 3, [1]], "fit jobs runs tables task"),
}
# By function, where a name means another kind there.
ELSEWHERE = {
    **({} if has_hooked() else {("hooked_from_hf", "hf_model"): "", ("hooked_from_hf", "tokenizer"): ""}),
    **dict.fromkeys([("plot_distance", "value"), ("plot_heads", "value")], "column"),
    **dict.fromkeys([("plot_perturbation", "measure"), ("plot_subspaces", "value")], "column"),
    **{(f"show_{of}", "layer"): "" for of in ("parts", "patterns", "scores")},  # most take any
    **{(of, "tokens"): "samples" for of in ("evaluate", "head_drops", "sufficient_heads")},
    ("describe_head", "key"): "places",
    ("describe_head", "seeds"): "seeds or none",
    ("head_labels", "seeds"): "seeds or none",
    ("head_patching", "positions"): "places",
    ("remap_distance", "distances"): "metric",
    ("score_sources", "keys"): "places",
    ("show_parts", "head"): "index",  # of the fit's axis
    ("patch_vectors", "q_rot"): "",  # one of both may be None
    ("patch_vectors", "k_rot"): "",
    ("knock_out", "keys"): "slots",
    ("rotary_from_table", "sin"): "",  # as cos
    ("load_model", "device"): "",
    ("load_model", "backend"): "",  # tested with a folder
    ("load_model", "dtype"): "",
    ("load_model", "n_ctx"): "",
    ("capture", "scores"): "flag",
    ("fit_attention", "pattern"): "vectors",
}
# Only the result that they take is tried: the rest is tested where there is such a result.
OF_A_RESULT = {
    *("plot_length", "plot_perturbation", "plot_shares"),
    *("plot_subspaces", "plot_verdicts", "plot_where_or_what"),
    *("dynamics", "sweep"),
}
# Refused in other words, or not at all.
NOT_YET = words_of(
    """
    head_labels.attention_mask length_generalization.hooks
    show_scores.scores show_parts.scores show_patterns.pattern
    sufficient_heads.order
    fit_attention.pattern
    """
)
# Arguments without a kind: any truth value, the user's functions and words, and those of one function alone,
# whose refusals are in test_combinations.py and test_damaged_files.py.
WITHOUT_KIND = words_of(
    """
    after answer before body changed client command context
    downstream draw fitted_to heldout in_range model models notes
    on_step perturb profiles progress queries query signed source_positions sufficient
    wrong
    """
)
# Made by the package and given back; who makes one by hand knows what belongs in it.
RESULTS = {
    *("AdditiveFit", "AttentionFit", "AttentionSpec", "Captured", "ContentPosition", "DepositReport"),
    *("HeadDescription", "LogitDifference", "ModelReading", "Perturbed", "PositionalSubspace"),
    *("RopeHadamard", "ScoreSources", "Split"),
    *("SufficientHeads", "TrainRun", "VarianceShares", "Widget"),
}
NO_FUNCTIONS = {"COMPONENTS", "Preset", "Task"}  # nor are presets checked before they are used

# By name and annotation, where the name alone says another kind.
BY_ANNOTATION = {("text", int): "number of a text", ("tokens", Sequence[str]): "words"}
BY_NAME = {name: kind for kind, (_, names) in KINDS.items() for name in names.split()}


def kind_of_type(hint: Any) -> str | None:
    """The kind of an annotation; None if it does not determine one."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    types = {part for part in parts if part is not NoneType}
    if any(get_origin(part) is Literal for part in types):
        return "choice"
    if any(get_origin(item) is Literal for part in types for item in get_args(part)):
        return "choices"
    for kind, members in {"flag": {bool}, "count": {int}, "number": {int, float}, "dtype": {torch.dtype}}.items():
        if types <= members:
            return kind
    if any(get_origin(part) is Callable for part in types):
        return "metric"
    if all(isinstance(part, type) and issubclass(part, AbstractArray) for part in types):
        return "vectors"
    known = (pd.DataFrame, torch.nn.Module)
    if all(is_dataclass(part) or (isinstance(part, type) and issubclass(part, known)) for part in types):
        return "result"
    return None


@cache
def hints(function: Function) -> dict[str, Any]:
    return get_type_hints(function.__init__ if inspect.isclass(function) else function)  # type: ignore[misc]


def kind_of(of: str, function: Function, argument: str) -> str | None:
    """The kind of an argument: of this function, of its name, of its annotation."""
    if (of, argument) in ELSEWHERE:
        return ELSEWHERE[of, argument]
    hint = hints(function).get(argument)
    return BY_ANNOTATION.get((argument, hint)) or BY_NAME.get(argument) or kind_of_type(hint)


def parameters(function: Function) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if p.name not in WITHOUT_KIND]


def bad_values(of: str, function: Function, argument: str) -> Iterable[tuple[Any, str]]:
    """And the pattern of the error; a default is never bad."""
    kind = kind_of(of, function, argument) or ""
    default = inspect.signature(function).parameters[argument].default
    for value in KINDS[kind][0]:
        value, message = value if kind == "column" else (value, f"{argument.removesuffix('s')}s? ")
        if value is not default and not (type(value) is type(default) is not torch.Tensor and value == default):
            yield value, message


def tried(of: str, function: Function) -> list[str]:
    """Its arguments whose bad values are tried."""
    named = parameters(function)[: 1 if of in OF_A_RESULT else None]
    return [argument for argument in named if f"{of}.{argument}" not in NOT_YET]


def not_refused(of: str, argument: str, bad: Iterable[tuple[Any, str]], reading: Any) -> list[str]:
    """What does not happen as it should: each value is refused, in few words and without a tensor."""
    function, wrong = callables()[of], []
    model = {"model": model_for(function, reading)} if "model" in inspect.signature(function).parameters else {}
    for value, message in bad:
        shown = f"{of}({argument}={type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)})"
        try:
            call(function, **model, **{argument: value})
        except ValueError as error:
            said = str(error)
            if not re.match(message, said) or "tensor([" in said or len(said) > 400:
                wrong.append(f"{shown}: {said}")
        except Exception as error:  # noqa: BLE001 - all of another kind are listed
            wrong.append(f"{shown}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{shown}: nothing raised")
    return wrong


pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("of", callables())
def test_every_argument_refuses_another_kind(of: str, shared_reading: Any) -> None:
    """By one bad value of each argument; the model stays as it was."""
    function, wrong, reading = callables()[of], [], shared_reading("bridge", "llama-gqa")
    before = state(reading.model)
    for argument in tried(of, function):
        wrong += not_refused(of, argument, islice(bad_values(of, function, argument), 1), reading)
    assert not wrong, "\n".join(wrong)
    assert state(reading.model) == before


def first_arguments() -> dict[str, tuple[str, str]]:
    """The first function and argument of each kind, of functions that do not take long."""
    found: dict[str, tuple[str, str]] = {}
    for of, function in sorted(callables().items(), key=lambda item: item[1] in LONG):
        for argument in tried(of, function):
            found.setdefault(kind_of(of, function, argument) or "", (of, argument))
    return {kind: found[kind] for kind in KINDS if kind in found}


@pytest.mark.parametrize("kind", first_arguments())
def test_every_bad_value_of_a_kind(kind: str, shared_reading: Any) -> None:
    of, argument = first_arguments()[kind]
    bad = bad_values(of, callables()[of], argument)
    wrong = not_refused(of, argument, bad, shared_reading("bridge", "llama-gqa"))
    assert not wrong, "\n".join(wrong)


def test_a_tuple_of_two_integers_is_not_a_choice_of_heads(shared_reading: Any) -> None:
    """It could be one head or two of each layer, so it is refused with both ways to write it."""
    with pytest.raises(ArgumentError, match=r"got \(0, 1\): write \[\(0, 1\)\] .* or \[0, 1\]") as caught:
        tp.ablate_heads(shared_reading("bridge", "llama-gqa"), (0, 1))
    assert caught.value.argument == "heads"


def test_other_choices_of_two_heads(shared_reading: Any) -> None:
    """Also as iterators, which are read once."""
    reading, edits = shared_reading("bridge", "llama-gqa"), {}
    for name, heads in {"list": [3, 4], "once": iter([3, 4]), "pair": ((1, 4),), "label": "L1H4"}.items():
        ablated = tp.ablate_heads(reading, heads).to_frame()
        edits[name] = [*zip(ablated["layer"], ablated["head"], strict=True)]
    each = [(layer, head) for layer in range(reading.n_layers) for head in (3, 4)]
    assert edits == {"list": each, "once": each, "pair": [(1, 4)], "label": [(1, 4)]}


def test_every_argument_has_a_kind() -> None:
    left = {
        (of, argument)
        for of, function in callables().items()
        for argument in parameters(function)
        if kind_of(of, function, argument) is None
    }
    assert not left


def test_every_public_name_is_tried() -> None:
    assert {*public_names()} - {*callables()} == RESULTS | NO_FUNCTIONS
