"""Laws of ``read_model``: one reading serves many calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.public_calls import call, functions

from tl_posdisent import (
    additivity,
    capture,
    dummy_distance,
    read_model,
    remap_distance,
    swap_positions,
)
from tl_posdisent.models.reading import model_reading
from tl_posdisent.models.running.model_parts import modules

FUNCTIONS = {function.__name__: function for function in functions()}


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "olmo2", "gemma2", "gptj"))
def test_a_reading_is_a_value(kind: str, name: str, shared_model: Any) -> None:
    """Two of one model are equal, so that hooks made by both go together; a reading is not read again."""
    model = shared_model(kind, name)
    reading, again = read_model(model), read_model(model)
    assert reading.specs() == again.specs()
    assert len((dummy_distance(reading, 5, heads=[0]) + dummy_distance(again, 3, heads=[1])).to_frame()) == 4
    assert read_model(reading) is reading


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "deepseek_v3"))
def test_reading_runs_nothing(kind: str, name: str) -> None:
    """Nor does its table."""
    model = zoo.load(kind, name)

    def refuse(*_: Any) -> None:
        raise AssertionError("a module ran")

    for part in modules(model):
        part.register_forward_pre_hook(refuse)
    assert read_model(model).to_frame()["rotation"].all()


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gemma2", "gptj", "gpt2", "bloom"))
def test_the_table_of_a_reading_is_what_the_configuration_says(kind: str, name: str, shared_model: Any) -> None:
    model = shared_model(kind, name)
    table, arguments = read_model(model).to_frame(), zoo.ARCHITECTURES[name].arguments
    assert table["layer"].tolist() == list(range(model.cfg.n_layers))
    assert (table["n_heads"] == 8).all()
    assert (table["n_kv_heads"] == arguments.get("num_key_value_heads", 8)).all()
    windows = [spec.window for spec in read_model(model).specs()]
    assert [None if pd.isna(x) else x for x in table["window"]] == windows
    assert table["attention"].tolist() == ["global" if x is None else "local" for x in windows]
    assert set(table["attention"]) == ({"local", "global"} if name == "gemma2" else {"global"})
    if name in ("gpt2", "bloom"):
        assert (table["rotated"] == 0).all()
        assert table["base"].isna().all()
    else:
        rotated = arguments.get("rotary_dim", arguments.get("head_dim", table["d_head"].iloc[0]))
        assert (table["rotated"] == rotated).all()
        base = 10_000.0 if name == "gptj" else 500.0  # what the zoo sets
        assert table["base"].to_numpy() == pytest.approx(base, rel=1e-4)
    assert read_model(model)._repr_html_().startswith("<p>ModelReading(")


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa"))
def test_layers_as_in_python(kind: str, name: str, shared_model: Any) -> None:
    reading = read_model(shared_model(kind, name))
    assert [spec.layer for spec in reading.specs([1, 0])] == [1, 0]
    assert reading.specs([1, 0]) == [*reading.specs(-1), read_model(reading).specs(0)[0]]
    assert reading.heads(0, -1) == {0: [reading.specs()[0].n_heads - 1]}
    assert reading.heads(heads=[(1, 2), (0, 1)]) == {0: [1], 1: [2]}
    assert [spec.layer for spec in reading.rotary(-1, "a tool")] == [1]


def _shared_weights(model: Any, other: Any) -> None:
    """Put the weights of another model into this one, past torch's count of changes."""
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.data.copy_(theirs.data)


def _other_weights(kind: str, name: str) -> Any:
    model = zoo.load(kind, name)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data.mul_(1 + 0.5 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize(("kind", "name"), zoo.cases("llama-gqa", "gptj", "gemma2", "olmo2"))
def test_other_weights_need_no_other_reading(kind: str, name: str) -> None:
    """A reading holds what the architecture does; what the weights give is that of a fresh model with them."""
    model, fresh, tokens = zoo.load(kind, name), _other_weights(kind, name), zoo.random_tokens()
    reading = read_model(model)
    _shared_weights(model, fresh)
    for found, expected in zip(capture(reading, tokens), capture(fresh, tokens), strict=True):
        assert torch.equal(found.q_rot, expected.q_rot)
        assert torch.equal(found.scores, expected.scores)
    tools: list[Callable[[Any], Any]] = [
        lambda m: dummy_distance(m, 5),
        lambda m: swap_positions(m, torch.arange(12).flip(0), heads=[1]),
        lambda m: remap_distance(m, lambda d: d.sqrt(), heads=[0, 6]),
    ]
    with torch.no_grad():
        for tool in tools:
            hooks = tool(reading), tool(fresh)
            found, expected = (
                m.run_with_hooks(tokens, fwd_hooks=x) for m, x in zip((model, fresh), hooks, strict=True)
            )
            assert torch.equal(found, expected)
    found, expected = (additivity(m, tokens, progress=False) for m in (reading, fresh))
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


@pytest.mark.parametrize("name", ["capture", "dummy_distance", "additivity", "where_or_what"])
def test_a_public_call_reads_its_model_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at all, given its reading."""
    model, read = zoo.bridge("llama-gqa"), list[int]()
    described = model_reading._described
    monkeypatch.setattr(model_reading, "_described", lambda layer: read.append(layer.number) or described(layer))
    function = FUNCTIONS[name]
    one = {"heads": [0]} if name in ("additivity", "where_or_what") else {}
    call(function, read_model(model), **one)
    call(function, model, **one)
    assert read == [0, 1, 0, 1]
