"""The command line says what the library says, in a table and in files, and errors in one line."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support import zoo
from support.processes import run as run_process
from transformers import LlamaForCausalLM
from typer.testing import CliRunner, Result

from tl_posdisent import additivity, demo_tokens, load_demo_model, random_control
from tl_posdisent.cli import app
from tl_posdisent.demo import demo_tokenizer
from tl_posdisent.demo.demo_model import demo_hf_model
from tl_posdisent.models.loading.load import has_hooked

BACKENDS = [pytest.param("bridge", marks=zoo.needs_bridge)]
BACKENDS += [pytest.param("hooked", marks=pytest.mark.skipif(not has_hooked(), reason="TransformerLens 4"))]
QUICK = ("--length", "32", "--no-progress")


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "120", "NO_COLOR": "1"})


def fit(*arguments: Any) -> Result:
    result = invoke("fit", *QUICK, *arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_table_is_that_of_the_library(backend: Any, tmp_path: Path) -> None:
    out = tmp_path / "new" / "table.csv"
    result = fit("--backend", backend, "--out", out)
    table = pd.read_csv(out)
    trained = table[table["weights"] == "trained"].drop(columns="weights").reset_index(drop=True)
    expected = additivity(load_demo_model(backend=backend), demo_tokens(length=32), progress=False)
    pd.testing.assert_frame_equal(trained, expected, rtol=1e-6)
    assert table["weights"].value_counts().to_dict() == {"trained": 40, "random 0": 40}
    r, chance = expected["r"], table[table["weights"] == "random 0"]["r"]
    assert f"mean r {r.mean():.3f} ({r.min():.3f}…{r.max():.3f}) over 40 heads" in result.stdout
    assert f"at random initialisation {chance.mean():.3f}" in result.stdout
    assert result.stderr == ""
    assert str(out) not in result.stdout


def test_every_layer_has_its_row() -> None:
    lines = fit("--control", "0").stdout.splitlines()
    by_layer = additivity(load_demo_model(), demo_tokens(length=32), progress=False).groupby("layer")["r"].mean()
    rows = [line.split() for line in lines if line.split()[:1] and line.split()[0].isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4"]
    assert [len(row) for row in rows] == [11] * 5  # layer, eight heads, mean, random
    assert [row[-2] for row in rows] == [f"{r:.2f}" for r in by_layer]
    assert [row[-1] for row in rows] == ["–"] * 5
    assert "random initialisation" not in "".join(lines)


def test_layers_and_controls(tmp_path: Path) -> None:
    out = tmp_path / "table.csv"
    fit("--layers", "0,2-3", "--control", 2, "--seed", 5, "--out", out)
    table = pd.read_csv(out)
    assert len(table) == 3 * 24
    assert set(table["layer"]) == {0, 2, 3}
    chance = next(random_control(load_demo_model(), [6]))
    expected = additivity(chance, demo_tokens(length=32), layers=[0, 2, 3], progress=False)
    got = table[table["weights"] == "random 6"].drop(columns="weights").reset_index(drop=True)
    pd.testing.assert_frame_equal(got, expected, rtol=1e-6)
    assert set(table["weights"]) == {"trained", "random 5", "random 6"}


def test_several_stretches_of_a_text(tmp_path: Path) -> None:
    """Each begins with the token that begins texts, and goes on where the last one ended."""
    words = " ".join(f"the people of state {n} are free." for n in range(40))
    text, out = tmp_path / "book.txt", tmp_path / "table.csv"
    text.write_text(words, encoding="utf-8")
    fit("--text", text, "--texts", "3", "--control", "0", "--layers", "2", "--out", out)
    ids = demo_tokenizer().encode(words, add_special_tokens=False)
    tokens = torch.tensor([[0, *ids[31 * n : 31 * (n + 1)]] for n in range(3)])
    expected = additivity(load_demo_model(), tokens, layers=[2], progress=False)
    pd.testing.assert_frame_equal(pd.read_csv(out).drop(columns="weights"), expected, rtol=1e-6)
    fit("--text", text, "--texts", "3", "--control", "0", "--layers", "2", "--pool", "--out", out)
    pooled = additivity(load_demo_model(), tokens, layers=[2], pool=True, progress=False)
    pd.testing.assert_frame_equal(pd.read_csv(out).drop(columns="weights"), pooled, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_directory_as_save_pretrained_writes_it(backend: Any, tmp_path: Path) -> None:
    folder, out = tmp_path / "my [bold] model", tmp_path / "table.csv"
    model = demo_hf_model()
    model.save_pretrained(folder)
    demo_tokenizer().save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text("We the people of the United States, in order to form a more perfect union. " * 3, encoding="utf-8")
    result = fit("--model", folder, "--text", text, "--backend", backend, "--out", out, "--control", "0")
    ids = torch.tensor([demo_tokenizer().encode(text.read_text(encoding="utf-8"))[:32]])
    expected = additivity(load_demo_model(backend=backend), ids, progress=False)
    pd.testing.assert_frame_equal(pd.read_csv(out).drop(columns="weights"), expected, rtol=1e-4)
    assert "[bold]" in result.stdout


def test_progress_goes_to_stderr() -> None:
    result = invoke("fit", "--length", "32", "--layers", "0", "--control", "0")
    assert "layers" in result.stderr
    assert "layers:" not in result.stdout


def small_model(folder: Path) -> Path:
    model: LlamaForCausalLM = zoo.hf_model("llama")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nowhere.txt"], "--text cannot be read: [Errno 2] No such file or directory: 'nowhere.txt'"),
        (["--text", "{short}"], "tokens, too few for 1 stretches of 32"),
        (["--text", "{latin}"], "latin.txt is not (byte 0xe9 at position 3)"),
        (["--text", "{empty}"], "--text must have words, but"),
        (["--text", "{here}"], "Is a directory"),
        (["--layers", "0,9"], "--layers must be integers from 0 to 4"),
        (["--layers", "3-5"], "--layers must be integers from 0 to 4"),
        (["--layers", "0,0-1"], "--layers must name at least one and none twice, got [0, 0, 1]"),
        (["--layers", "first"], "--layers must be numbers with commas between, or ranges such as 0-3, got 'first'"),
        (["--layers", "[b]0"], "ranges such as 0-3, got '[b]0'"),
        (["--layers", "3-1"], "ranges such as 0-3, got '3-1'"),
        (["--layers", "0-99999"], "ranges such as 0-3, got '0-99999'"),
        (["--layers", "-1"], "ranges such as 0-3, got '-1'"),
        (["--layers", ""], "ranges such as 0-3, got ''"),
        (["--device", "abacus"], "--device must be one that torch can use here, got 'abacus'"),
        (["--device", "meta"], "--device must be one that torch can use here, got 'meta'"),
        (["--device", "cuda:77"], "--device must be one that torch can use here, got 'cuda:77'"),
        (["--out", "table.xls"], "--out must end in .csv, .parquet, .json, .html, got 'table.xls'"),
        (["--out", "{folder}"], "--out must be a file, but"),
        (["--out", "{here}/short.txt/table.csv"], "short.txt"),
        (["--model", "{here}/none", "--text", "{short}"], "none: no such directory"),
        (["--model", "{here}", "--text", "{short}"], "cannot load a causal language model from"),
        (["--model", "{model}", "--text", "{short}"], "has no tokenizer, so it cannot read text"),
        (["--model", "{model}"], "--text is needed: only the demo model brings its own"),
        (["--model", "no-such/model", "--text", "{short}", "--backend", "hooked"], "no-such/model"),
        (["--texts", "1000"], "tokens, too few for 1000 stretches of 32"),
    ],
)
def test_errors_are_one_line_and_code_two(arguments: list[str], message: str, tmp_path: Path) -> None:
    if "hooked" in arguments and not has_hooked():
        pytest.skip("TransformerLens 4")
    (tmp_path / "short.txt").write_text("We the people", encoding="utf-8")
    (tmp_path / "empty.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "latin.txt").write_bytes("café ".encode("latin-1") * 100)
    places = {
        "here": tmp_path,
        "short": tmp_path / "short.txt",
        "latin": tmp_path / "latin.txt",
        "empty": tmp_path / "empty.txt",
        "folder": tmp_path / "folder.csv",
        "model": tmp_path / "m",
    }
    if "{model}" in arguments:
        small_model(places["model"])
    result = invoke("fit", *QUICK, "--control", "0", *(a.format(**places) for a in arguments))
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_a_format_that_nothing_here_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tl_posdisent.cli.output.find_spec", lambda name: None)
    result = invoke("fit", *QUICK, "--out", tmp_path / "table.parquet")
    assert result.exit_code == 2
    assert "needs pyarrow or fastparquet" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--length", "1"],
        ["--texts", "0"],
        ["--control", "-1"],
        ["--colour"],
        ["--backend", "keras"],
        ["--dtype", "int8"],
    ],
)
def test_options_out_of_range(arguments: list[str]) -> None:
    result = invoke("fit", *arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.stderr
    assert result.stdout == ""


def test_help_and_the_installed_command() -> None:
    assert "random initialisation" in invoke("fit", "--help").stdout
    assert "fit" in invoke("--help").stdout
    (command,) = entry_points(group="console_scripts", name="tl-posdisent")
    assert command.load() is app


def test_heads_of_a_fit_are_those_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "r.csv"
    quick = ["--length", "32", "--no-progress", "--control", "1"]
    result = invoke("fit", *quick, "--layers", "3-4", "--heads", "0,5", "--out", out)
    assert result.exit_code == 0, result.output
    table = pd.read_csv(out)
    assert table[["layer", "head"]].drop_duplicates().values.tolist() == [[3, 0], [3, 5], [4, 0], [4, 5]]
    assert set(table["weights"]) == {"trained", "random 0"}
    wrong = invoke("fit", *quick, "--heads", "8")
    assert wrong.exit_code == 2
    assert "--heads" in wrong.stderr


def test_length_ends_the_last_bucket(tmp_path: Path) -> None:
    out = tmp_path / "length.csv"
    result = invoke("length", "--length", "96", "--way", "plain", "--no-progress", "--out", out)
    assert result.exit_code == 0, result.output
    assert pd.read_csv(out)["stop"].max() == 96
    both = invoke("length", "--length", "96", "--lengths", "32,96")
    assert both.exit_code == 2
    assert "--length and --lengths must not be given together" in both.stderr


@pytest.mark.slow
def test_models_are_named_by_their_folder_and_nothing_but_results_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the path from here to it; ``--no-progress`` also turns off the bars of other libraries."""
    demo_hf_model().save_pretrained(tmp_path / "tiny")
    demo_tokenizer().save_pretrained(tmp_path / "tiny")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    text = Path("text.txt")
    text.write_text("We hold these truths to be self-evident, that all men are created equal, and so on. " * 3)
    code = "from tl_posdisent.cli import app; app()"
    given = ["fit", "--model", "../tiny", "--text", str(text), "--length", "16", "--control", "0", "--no-progress"]
    done = run_process(sys.executable, "-c", code, *given)
    assert "by layer and head: tiny, 1 × 16 tokens" in done.stdout
    assert done.stderr == ""
