"""Every experiment reads the model once, and takes layers and heads in the same forms."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import zoo
from support.lanes import by_cost
from support.public import public_names

import tl_posdisent as tp
from tl_posdisent.models.reading import model_reading as reading_module

TOKENS = zoo.random_tokens(10)
Call = Callable[..., Any]

GOOD: dict[str, Any] = {
    "tokens": TOKENS,
    "source": TOKENS.flip(1),
    "positions": torch.arange(10) ** 1.1,
    "metric": lambda logits, tokens: logits[:, -1, 5],
    "kind": "index",
    "fraction": 0.5,
    "fractions": [0.5],
    "lengths": [0, 4, 8],
    "distances": [1, 2],
    "interventions": lambda model: {"flat": tp.hooks.substitute_attention(model, "uniform")},
    "heldout": TOKENS,
    "layer": 1,
    "head": "L1H1",
    "query": -1,
    "seeds": [0],
    "rungs": ["uniform", "static"],
    "controls": [],
    "progress": False,
}


def experiments(*parameters: str) -> Any:
    """Public experiments on tokens that have these parameters."""
    found = [
        function
        for function in public_names().values()
        if inspect.isfunction(function)
        and function.__module__.startswith("tl_posdisent.experiments")
        and ("attention_mask" in inspect.signature(function).parameters or function is tp.attention_ladder)
        and set(parameters) <= set(inspect.signature(function).parameters)
    ]
    assert found
    return pytest.mark.parametrize("function", by_cost(found))


def call(function: Call, model: Any, good: dict[str, Any] = GOOD, **more: Any) -> Any:
    named = list(inspect.signature(function).parameters)[1:]
    if function is tp.head_patching:  # whose positions are tokens that are patched one by one
        named.remove("positions")
    arguments = {name: good[name] for name in named if name in good} | more
    if callable(arguments.get("interventions")):
        arguments["interventions"] = arguments["interventions"](model)
    return function(model, **arguments)


def few(function: Call) -> dict[str, Any]:
    """One head, where a test is about layers."""
    return {"heads": [0]} if "heads" in inspect.signature(function).parameters else {}


def same(a: Any, b: Any) -> None:
    """Equal tables, or results with equal tables."""
    pd.testing.assert_frame_equal(*(x if isinstance(x, pd.DataFrame) else x.to_frame() for x in (a, b)))


@pytest.mark.parametrize(("kind", "name"), zoo.cases("gptj"))
@experiments()
def test_texts_beyond_the_context(function: Call, kind: str, name: str, shared_model: Any) -> None:
    """Refused in words that say what helps, which helps."""
    model, tokens = shared_model(kind, name), zoo.random_tokens(140)  # of a context of 128
    long = GOOD | {"tokens": tokens, "source": tokens.flip(1), "positions": torch.arange(140) ** 1.1, "heads": [0]}
    if function.__name__ == "attention_by_distance" and kind == "bridge":
        pytest.skip("refused: GPT-J's bridge shows no scores, and edits of them only behind its pattern")
    # The first reads up to the last of its lengths, the other runs no model.
    if function.__name__ not in {"length_generalization", "perturb"}:
        with pytest.raises(ValueError, match=r"140 long, .* context of 128: .*; give shorter .* n_ctx=140"):
            call(function, model, long)
    changes = {"n_positions" if name == "gptj" else "max_position_embeddings": 210}  # head_labels has texts of its own
    call(function, {"bridge": zoo.bridge, "hooked": zoo.hooked}[kind](name, **changes), long)


@pytest.mark.usefixtures("unchecked")
@experiments()
def test_one_text_has_no_errors_over_texts(function: Call, shared_reading: Any) -> None:
    """A column of errors has numbers: of blocks of the text's tokens, or it is not there."""
    if function.__name__ in {"content_position_terms", "positional_subspace"}:
        pytest.skip("they need several texts, and say so")
    good = GOOD | {name: GOOD[name][:1] for name in ("tokens", "source", "heldout")}
    metric = inspect.signature(function).parameters.get("metric")
    optional = metric is not None and metric.default is not metric.empty
    ways = [good, {name: x for name, x in good.items() if name != "metric"}] if optional else [good]
    found = [call(function, shared_reading("bridge", "llama-gqa"), way) for way in ways]
    for table in (x for x in found if isinstance(x, pd.DataFrame)):
        errors = [name for name in table if re.search(r"(^|_)(se|error)(_|$)", str(name))]
        assert [name for name in errors if not (table[name] > 0).any()] == []


@experiments()
def test_the_model_is_read_once(function: Call, shared_reading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer once for a model (and once for each random copy), and not at all for a reading of it."""
    reading, read = shared_reading("bridge", "llama-gqa"), []
    layer_of = reading_module.Layer

    def counted(model: Any, layer: int, *more: Any) -> Any:
        read.append((model, layer))
        return layer_of(model, layer, *more)

    monkeypatch.setattr(reading_module, "Layer", counted)
    copies = int(function is tp.experiments.head_labels)
    one = {"layers": 1} if "layers" in inspect.signature(function).parameters else {}
    hooks = GOOD["interventions"](reading)
    call(function, reading.model, GOOD | {"interventions": hooks}, **one)
    assert len(set(read)) == len(read)
    assert len({model for model, _ in read}) == 1 + copies
    call(function, reading, **one)
    assert len({model for model, _ in read}) == 1 + 2 * copies


@pytest.mark.usefixtures("unchecked")
@experiments()
def test_tables_name_hooks_of_the_users_own(function: Call, shared_reading: Any) -> None:
    reading = shared_reading("bridge", "llama-gqa")
    point = "blocks.0.hook_resid_pre"
    with reading.model.hooks(fwd_hooks=[(point, lambda x, hook: 1.5 * x)]):
        table = call(function, reading, **few(function))
    if isinstance(table, pd.DataFrame):
        assert table.attrs["hooks"] == [point]


@pytest.mark.usefixtures("unchecked")
@experiments("layers")
def test_forms_of_layers(function: Call, shared_reading: Any) -> None:
    """An integer, numpy's from the end, and a tensor of one are the same."""
    reading, one = shared_reading("bridge", "llama-gqa"), few(function)
    expected = call(function, reading, layers=1, **one)
    for form in (np.int64(-1), torch.tensor([1])):
        same(call(function, reading, layers=form, **one), expected)


@pytest.mark.usefixtures("unchecked")
@experiments("layers")
def test_kinds_of_layers(function: Call, shared_reading: Any) -> None:
    """Local ones have a window: two of Gemma 3's three."""
    reading, one = shared_reading("bridge", "gemma3"), few(function)
    same(call(function, reading, layers="local", **one), call(function, reading, layers=[0, 1], **one))
    same(call(function, reading, layers="global", **one), call(function, reading, layers=2, **one))


@pytest.mark.usefixtures("unchecked")
def test_kinds_of_layers_that_are_refused(shared_reading: Any) -> None:
    gemma, llama = (shared_reading("bridge", name) for name in ("gemma3", "llama-gqa"))
    with pytest.raises(ValueError, match=r'^layers must be integers, "global" or "local", got .windowed.'):
        tp.additivity(gemma, TOKENS, layers="windowed")
    with pytest.raises(ValueError, match=r'^layers must be "global" or integers .* no layer has a sliding window'):
        tp.additivity(llama, TOKENS, layers="local")


@pytest.mark.usefixtures("unchecked")
@experiments("heads", "layers")
def test_forms_of_heads(function: Call, shared_reading: Any) -> None:
    """Heads of each layer, or pairs."""
    reading = shared_reading("bridge", "llama-gqa")
    expected = call(function, reading, layers=[1], heads=[3])
    for form in (np.int64(3), [-5], [(1, 3)], [(np.int64(-1), -5)]):
        same(call(function, reading, layers=[1], heads=form), expected)
    same(call(function, reading, heads=[(1, 3)]), expected)
    each = {"by": "head"} if function is tp.length_generalization else {}
    both = call(function, reading, heads=[(1, 3), (0, 2)], **each)
    both = both if isinstance(both, pd.DataFrame) else both.order.sort_values(["layer", "head"])
    places = both[["layer", "head"]].dropna().drop_duplicates()  # a row of several heads has no number
    assert places.values.tolist() == [[0, 2], [1, 3]]


OF_ONE_HEAD: dict[str, Callable[[Any, Any], Any]] = {
    "score_sources": lambda model, head: tp.score_sources(model, TOKENS, head, -1),
    "describe_head": lambda model, head: tp.describe_head(model, TOKENS, head, seeds=0, progress=False),
    "only": lambda model, head: tp.dummy_distance(model, 3).only(head),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", OF_ONE_HEAD)
def test_forms_of_one_head(name: str, shared_reading: Any) -> None:
    """A label, a pair, or a pair counted from the end, except in a list of hooks, which has no end."""
    reading = shared_reading("bridge", "llama-gqa")
    expected = OF_ONE_HEAD[name](reading, "L1H3")
    assert "L1H3" in repr(expected)
    for form in ((1, 3), (np.int64(-1), -5))[: 1 if name == "only" else 2]:
        same(OF_ONE_HEAD[name](reading, form), expected)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("head", ["L9H2", "L1H99", (0, 1)])
def test_a_head_without_an_intervention_is_no_part_of_a_list(head: Any, shared_reading: Any) -> None:
    """A misspelt head would read as one without effect."""
    hooks = tp.dummy_distance(shared_reading("bridge", "llama-gqa"), 3, layers=[1])
    with pytest.raises(ValueError, match=r"^heads must be some of those of dummy_distance\(3\) on .*, got L\d"):
        hooks.only("L1H2", head)


def test_no_function_takes_one_head_as_two_arguments() -> None:
    """Except of a fit: an index on its axis of heads, and the layer of a title."""
    functions = {name: inspect.signature(x).parameters for name, x in public_names().items() if inspect.isfunction(x)}
    assert {name for name, x in functions.items() if {"layer", "head"} <= set(x)} == {"show_parts"}
