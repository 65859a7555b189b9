"""``tl-posdisent run`` is a call of the experiment with the arguments that ``--set`` gives, as in a sweep."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.command_line import run_command

from tl_posdisent import (
    ablate_heads,
    attention_ladder,
    controlled_distance,
    demo_tokens,
    dummy_distance,
    head_ablation,
    head_effects,
    lambda_mask,
    load_demo_model,
    perturbation_curve,
    position_patching,
)
from tl_posdisent.cli.values import settings
from tl_posdisent.experiments import intervention_losses, rope_hadamard
from tl_posdisent.sweeps import Text, jobs
from tl_posdisent.sweeps.jobs import experiments_by_name, settable

pytestmark = pytest.mark.usefixtures("unchecked")

TOKENS = demo_tokens(length=32)
QUIET: dict[str, Any] = {"progress": False}
INTERVENTIONS = {
    "mean": ["ablate_heads", {"mode": "mean"}],
    "five": ["dummy_distance", {"distance": 5}],
    "window": ["lambda_mask", {"sinks": 2, "window": 6, "distance_ceiling": 32}],
}


@pytest.fixture(scope="module")
def model() -> Any:
    return load_demo_model()


def effects(model: Any) -> pd.DataFrame:
    hooks = {
        "mean": ablate_heads(model, None, mode="mean", reference=TOKENS),
        "five": dummy_distance(model, 5),
        "window": lambda_mask(model, 2, 6, 32),
    }
    return head_effects(model, TOKENS, hooks, layers=[3, 4], draws=2, exact=3, seed=1, **QUIET)


CASES: dict[str, tuple[list[str], Callable[[Any], pd.DataFrame]]] = {
    "controlled_distance": (
        ["layers=1,4", "sinks=2"],
        lambda m: controlled_distance(m, TOKENS, layers=[1, 4], sinks=2, **QUIET),
    ),
    "perturbation_curve": (
        ["kinds=order,index", "fractions=0,0.5", "seeds=4-5", "window=3"],
        lambda m: perturbation_curve(m, TOKENS, ["order", "index"], [0.0, 0.5], [4, 5], window=3, **QUIET),
    ),
    "head_ablation": (
        ["heads=L3H0,L4H2", "mode=mean"],
        lambda m: head_ablation(m, TOKENS, heads=["L3H0", "L4H2"], mode="mean", **QUIET),
    ),
    "head_effects": (
        [f"interventions={json.dumps(INTERVENTIONS)}", "layers=3-4", "draws=2", "exact=3", "seed=1"],
        effects,
    ),
    "intervention_losses": (
        ['interventions={"five": ["dummy_distance", {"distance": 5, "heads": ["L4H2"]}]}'],
        lambda m: intervention_losses(m, TOKENS, {"five": dummy_distance(m, 5, heads=["L4H2"])}, **QUIET),
    ),
    "position_patching": (
        ["layers=4", "what=key", f"positions={','.join(map(str, range(0, 64, 2)))}"],
        lambda m: position_patching(m, TOKENS, torch.arange(32) * 2, what="key", layers=[4], **QUIET),
    ),
    "attention_ladder": (
        ["heads=[[4, 2]]", "rungs=uniform,distance,additive,untouched", "controls=[]"],
        lambda m: attention_ladder(
            m, TOKENS, heads=["L4H2"], rungs=["uniform", "distance", "additive", "untouched"], controls=[], **QUIET
        ),
    ),
    "rope_hadamard": (["layer=3"], lambda m: rope_hadamard(m, TOKENS, 3).to_frame()),
}


@pytest.mark.parametrize("name", CASES)
def test_the_table_is_that_of_a_direct_call(name: str, model: Any, tmp_path: Path) -> None:
    given, direct = CASES[name]
    out = tmp_path / "new" / "table.csv"
    words = [word for setting in given for word in ("--set", setting)]
    result = run_command(f"run {name} --length 32 --no-progress", *words, "--out", out)
    assert result.stderr == ""
    expected = direct(model)
    got = pd.read_csv(out)[[*expected.columns]]
    pd.testing.assert_frame_equal(got, expected.reset_index(drop=True), check_dtype=False, rtol=1e-6, atol=1e-7)
    title, _, header, *lines = result.stdout.splitlines()
    assert title == f"{name}: demo, 1 × 32 tokens"
    assert header.split()[0] == pd.read_csv(out).columns[0]
    assert len(lines) - 1 - (len(expected) > 50) == min(50, len(expected))


def test_texts_are_those_of_the_other_commands(tmp_path: Path, model: Any) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "table.csv"
    text.write_text("We the people of these free and equal states. " * 10, encoding="utf-8")
    run_command(f"run additivity --text {text} --length 16 --texts 3 --set layers=0 --no-progress --out {out}")
    tokens = Text.of(text, length=16, count=3).tokens(model)
    expected = experiments_by_name()["additivity"](model, tokens, layers=[0], **QUIET)
    pd.testing.assert_frame_equal(pd.read_csv(out), expected, check_dtype=False, rtol=1e-6, atol=1e-7)


NEEDED = {
    "interventions": INTERVENTIONS,
    "layer": 3,
    "head": 1,
    "query": 15,
    "positions": list(range(0, 32, 2)),
    "lengths": [4, 16],
    "heldout": ["We the people", "hold these truths"],
    "labels": [0],
}
MORE = {"component_patching": {"source_positions": list(range(0, 32, 2))}}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(experiments_by_name()))
def test_every_experiment_runs_or_says_on_one_line_what_it_needs(name: str, tmp_path: Path) -> None:
    arguments = settable(name)
    given = {x: NEEDED[x] for x, p in arguments.items() if p.default is p.empty} | MORE.get(name, {})
    given |= {x: value for x, value in {"layers": [4], "heads": [0]}.items() if x in arguments}
    words = [word for x, value in given.items() for word in ("--set", f"{x}={json.dumps(value)}")]
    out = tmp_path / "table.parquet"
    refused = name in ("head_drops", "sufficient_heads")  # of synthetic models alone
    line = f"run {name} --length 16 --texts 2 --no-progress --out {out}"
    result = run_command(line, *words, code=2 if refused else 0)
    if refused:
        assert result.stderr.count("\n") == 1
        assert result.stdout == ""
    else:
        assert len(pd.read_parquet(out))
        assert result.stdout.startswith(f"{name}: demo, 2 × 16 tokens")


def test_experiments_are_listed_and_explained() -> None:
    listed = run_command("run").stdout
    for name, function in experiments_by_name().items():
        assert f" {name} " in listed
        assert (function.__doc__ or "").splitlines()[0] in listed
    for name in ("head_ablation", "head_effects"):
        explained = run_command(f"run {name} --help").stdout
        first = explained.split("\n\n")[1]
        assert [line.split()[0] for line in first.splitlines()] == list(settable(name))
        assert "Returns:" in explained
    assert "interventions   needed" in explained
    assert "default next_token_loss" in explained


REFUSED = [
    ("--set layers=0", "EXPERIMENT must be given with --set or --out"),
    ("--out table.csv", "EXPERIMENT must be given with --set or --out"),
    ("additivty", "experiment must be one of additive_substitution, additivity, attention_by_distance, "),
    ("load_model", "experiment must be one of "),
    ("show_scores --help", "experiment must be one of "),
    ("head_patching", "experiment must be one of "),
    (
        "additivity --set layer=3",
        "--set must be among attention_mask, layers, heads, mask, sinks, pool, controls for additivity, got ['",
    ),
    (
        "additivity --set tokens=[3]",
        "--set must be among attention_mask, layers, heads, mask, sinks, pool, controls for additivity",
    ),
    ("additivity --set progress=true", "--set must be among "),
    ("head_effects", "--set must include interventions for head_effects, got []"),
    *((f"additivity --set '{x}'", "--set must be NAME=VALUE, such as layers=0-3, got") for x in ("layers", "=3", "x=")),
    ("additivity --set layers=0 --set layers=1", "--set must name each argument once, got layers twice"),
    ("additivity --set layers=5-3", "--set layers must be ranges from a smaller to a larger number, such as 3-5, got"),
    ("additivity --set layers=0,,1", "--set layers must have a value between commas, got '0,,1'"),
    ("additivity --set 'layers=[0,'", "--set layers must be JSON if it has spaces or brackets, such as [0, 1] or "),
    ("additivity --set 'layers=0, 1'", "--set layers must be JSON if it has spaces or brackets"),
    (f"additivity --set layers=[{'9' * 5000}]", "--set layers must be JSON if it has spaces or brackets"),
    (f"additivity --set layers={'[' * 5000}", "--set layers must be JSON if it has spaces or brackets"),
    ("additivity --set layers=0-999999", "--set layers must be at most 100000 numbers, got more"),
    ("additivity --set layers=[NaN]", "--set must be numbers, strings, lists or None, as in JSON, got"),
    ("additivity --set sinks=1e999", "--set must be numbers, strings, lists or None, as in JSON, got"),
    ("additivity --length 16 --set layers=9", "layers must be integers from 0 to 4, got 9"),
    ("additivity --length 16 --set layers=first", 'layers must be integers, "global" or "local", got \'first\''),
    ("additivity --length 16 --set pool=2", "pool must be True or False, got 2"),
    ("head_ablation --length 16 --set heads=3.4,5.1", "heads must be "),
    ("head_ablation --length 16 --set mode=drop", "mode must be "),
    ("head_ablation --length 16 --set metric=loss", "metric must be a function"),
    ("head_labels --length 16 --set length=1", "length must be "),
    ("perturbation_curve --length 16 --set fractions=0,half", "fractions must be "),
    ("perturbation_curve --length 16 --set seeds=[]", "seeds must "),
    ("head_effects --set interventions=mean --length 16", "interventions must be hooks by name"),
    (
        'head_effects --set \'interventions={"a": "swap"}\' --length 16',
        "interventions must be hooks by name; 'a': hooks must be a list of hooks, or one of ablate_heads, ",
    ),
    ("additivity --out .", "--out must be a file such as table.csv, ending in .csv, .parquet or .json, got '.'"),
]


def test_a_misspelt_experiment_is_answered_with_the_nearest_name() -> None:
    for name, hint in (("additivty", ": did you mean 'additivity'?\n"), ("load_model", "got 'load_model'\n")):
        assert run_command(f"run {name}", code=2).stderr.endswith(hint)


@pytest.mark.parametrize(("line", "message"), REFUSED, ids=[line[:60] for line, _ in REFUSED])
def test_errors_are_one_line(line: str, message: str) -> None:
    result = run_command(f"run {line} --no-progress", code=2)
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: {message}")
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("additivty", {}),
        ("additivity", {"layer": 3}),
        ("head_effects", {}),
    ],
)
def test_errors_about_names_are_those_of_a_sweep(name: str, arguments: dict[str, Any]) -> None:
    words = [word for x, value in arguments.items() for word in ("--set", f"{x}={json.dumps(value)}")]
    with pytest.raises(ValueError, match="must") as error:
        jobs("demo", (name, arguments), "demo")
    shown = run_command(f"run {name}", *words, code=2).stderr
    assert shown == f"error: {str(error.value).replace('arguments ', '--set ')}\n"


VALUES = {
    "3": 3,
    "-1": -1,
    "0.5": 0.5,
    "1e-3": 0.001,
    "true": True,
    "False": False,
    "None": None,
    "null": None,
    "mean": "mean",
    "none": "none",
    "low-rank": "low-rank",
    "L4H2": "L4H2",
    "0-3": [0, 1, 2, 3],
    "2-2": [2],
    "0,2-4": [0, 2, 3, 4],
    "0,0.1,1": [0, 0.1, 1],
    "order,index": ["order", "index"],
    "[]": [],
    "[[4, 2]]": [[4, 2]],
    '"0-3"': "0-3",
    '"a, b"': "a, b",
    '{"a": ["ablate_heads", {}]}': {"a": ["ablate_heads", {}]},
    "9" * 19: int("9" * 19),
}


@pytest.mark.parametrize("text", VALUES)
def test_values(text: str) -> None:
    (value,) = settings([f"x={text}"]).values()
    assert (type(value), value) == (type(VALUES[text]), VALUES[text])
