"""A progress bar ends at its total: what a tool says that it will run is what it runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.lanes import by_cost
from support.public_calls import call, functions

import tl_posdisent as tp

CASES = [pytest.param(case.values[0], {}, id=case.id, marks=case.marks) for case in by_cost(functions("progress"))]
CASES += [
    pytest.param(function, options, id=f"{function.__name__}-{name}")
    for function, name, options in (
        (tp.attention_ladder, "heads", {"layers": 0, "heads": [0, 3], "controls": ["shuffled"]}),
        (tp.attention_ladder, "layers", {"unit": "layer", "controls": ["shuffled"]}),
        (tp.head_ablation, "few", {"layers": 1, "heads": [0, 1, 5]}),
        (tp.head_effects, "few", {"exact": 2}),
    )
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("function", "options"), CASES)
def test_a_bar_ends_at_its_total(
    function: Any, options: dict[str, Any], shared_reading: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rungs = {"rungs": ["distance", "static", "additive"]} if function is tp.attention_ladder else {}
    call(function, shared_reading("bridge", "llama-gqa"), **{"progress": True, **rungs, **options})
    bars = {x.split(":")[0].strip(): x for x in re.split(r"[\r\n]", capsys.readouterr().err) if "it/s" in x or "%" in x}
    assert bars
    for last in bars.values():
        assert re.search(r"100%|: 0it", last), last  # tqdm shows no share of nothing
