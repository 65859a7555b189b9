"""Models that mix attention with other layers: the layers that attend are taken, and the others are named."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from support import public_calls, zoo

from tl_posdisent import (
    ablate_heads,
    additivity,
    bridge_from_hf,
    capture,
    head_ablation,
    head_labels,
    read_model,
    subspace_patterns,
    swap_positions,
)

WITHOUT: dict[str, dict[str, Any]] = {
    "Mamba": {"vocab_size": zoo.VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 4},
    "RecurrentGemma": {
        **{"vocab_size": zoo.VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
        **{"num_attention_heads": 8, "num_key_value_heads": 1, "lru_width": 64, "attention_window_size": 32},
        "block_types": ["recurrent", "attention"],
    },
}
TOKENS = zoo.random_tokens()


def bridge(name: str, arguments: dict[str, Any]) -> Any:
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**arguments))
    return bridge_from_hf(model.eval())


def test_the_layers_that_attend_are_taken(shared_model: Any) -> None:
    model = shared_model("bridge", "lfm2")
    reading = read_model(model)
    assert ([spec.layer for spec in reading.specs()], reading.without_attention) == ([1, 3], (0, 2))
    assert [layer.layer for layer in capture(reading, TOKENS)] == [1, 3]
    tables = [
        additivity(reading, TOKENS, progress=False),
        head_ablation(reading, TOKENS, heads=2, progress=False),
        head_labels(reading, TOKENS, length=6, progress=False),
        subspace_patterns(reading, TOKENS, progress=False),
    ]
    for table in tables:
        assert set(table["layer"]) == {1, 3}
        assert table.attrs["layers_without_attention"] == [0, 2]
        assert table[table["layer"] == 3].attrs == table.attrs  # pandas keeps them
    assert repr(ablate_heads(model, 2)) == "ablate_heads(zero) on L1H2, L3H2"


def test_a_layer_without_attention_is_named(shared_model: Any) -> None:
    model = shared_model("bridge", "lfm2")
    reading = read_model(model)
    for ask in (
        lambda: read_model(model).specs(0),
        lambda: reading.specs([1, 0]),
        lambda: reading.heads(heads=[(0, 1)]),
        lambda: ablate_heads(model, [(0, 1), (1, 2)]),
        lambda: ablate_heads(model, 1, layers=[0, 1]),
    ):
        with pytest.raises(ValueError, match=r"layers must have attention, got .*0.* of Lfm2ForCausalLM"):
            ask()


@pytest.mark.parametrize("name", WITHOUT)
def test_models_without_attention_are_refused_by_name(name: str) -> None:
    model = bridge(name, WITHOUT[name])
    for function in (
        read_model,
        lambda m: additivity(m, zoo.random_tokens()),
        lambda m: swap_positions(m, torch.arange(12)),
        lambda m: ablate_heads(m, 1),
    ):
        with pytest.raises(ValueError, match=f"model must have attention layers .*, got {name}ForCausalLM"):
            function(model)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_every_table_over_layers_names_the_others(shared_model: Any) -> None:
    """Those of experiments, where layers are chosen by default; refusals are errors of one kind."""
    reading, tables = read_model(shared_model("bridge", "lfm2")), 0
    for function in public_calls.functions("layers"):
        if function.__module__.split(".")[1] != "experiments":
            continue
        try:
            table = public_calls.call(function, reading)
        except ValueError:
            continue
        if isinstance(table, pd.DataFrame) and "layer" in table:
            tables += 1
            assert table.attrs.get("layers_without_attention") == [0, 2], function.__name__
            assert set(table["layer"].dropna()) == {1, 3}, function.__name__
    assert tables > 10
