"""Each command puts out what its function returns, in every format, and nothing else on stdout."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner, Result

from tl_posdisent import (
    controlled_distance,
    demo_text,
    demo_tokens,
    head_ablation,
    lambda_mask,
    length_generalization,
    load_demo_model,
    perturbation_curve,
    position_interpolation,
    random_control,
)
from tl_posdisent.cli import app
from tl_posdisent.cli.output import FORMATS, save
from tl_posdisent.models import read_layers
from tl_posdisent.models.loading.load import has_hooked
from tl_posdisent.synthetic import deposit

pytestmark = pytest.mark.usefixtures("unchecked")
TOKENS = demo_tokens(length=32)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_demo_model()


def invoke(*arguments: Any, stdin: bytes | None = None, code: int = 0) -> Result:
    words = [str(a) for a in arguments]
    result = CliRunner().invoke(app, words, input=stdin, env={"COLUMNS": "60", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result


def quiet(command: str, *arguments: Any, **more: Any) -> Result:
    return invoke(command, "--no-progress", *arguments, **more)


def same(got: pd.DataFrame, expected: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(got.reset_index(drop=True), expected.reset_index(drop=True), check_dtype=False)


def shown(result: Result, column: int = -1) -> list[str]:
    """A column of the rows that begin with a number, as printed."""
    rows = [line.split() for line in result.stdout.splitlines() if re.match(r" *\d+ ", line)]
    return [row[column] for row in rows]


# --- commands -------------------------------------------------------------------------------------------------------


def test_controlled(model: Any, tmp_path: Path) -> None:
    out = tmp_path / "table.parquet"
    result = quiet("controlled", "--length", 32, "--layers", "1,4", "--sinks", 2, "--seed", 3, "--out", out)
    options: dict[str, Any] = {"layers": [1, 4], "sinks": 2, "progress": False}
    trained = controlled_distance(model, TOKENS, **options)
    chance = controlled_distance(next(random_control(model, [3])), TOKENS, **options)
    expected = pd.concat([trained.assign(weights="trained"), chance.assign(weights="random 3")])
    same(pd.read_parquet(out), expected)
    for name in ("r_three_axis", "r_two_axis"):
        r = trained[name]
        headline = f"mean {name} {r.mean():.3f} ({r.min():.3f}…{r.max():.3f}) over 16 heads"
        assert f"{headline}; at random initialisation {chance[name].mean():.3f}" in result.stdout
    by_layer = [table.groupby("layer")[n].mean() for n in ("r_three_axis", "r_two_axis") for table in (trained, chance)]
    assert shown(result, -2) == [f"{x:.2f}" for n in (0, 2) for x in by_layer[n]]
    assert shown(result, -1) == [f"{x:.2f}" for n in (1, 3) for x in by_layer[n]]


def test_perturb(model: Any, tmp_path: Path) -> None:
    out = tmp_path / "table.csv"
    chosen = ("--kind", "order", "--kind", "index", "--fractions", "0,0.5", "--seeds", 2, "--seed", 4, "--window", 3)
    result = quiet("perturb", "--length", 32, *chosen, "--out", out)
    expected = perturbation_curve(model, TOKENS, ["order", "index"], [0.0, 0.5], [4, 5], window=3, progress=False)
    same(pd.read_csv(out), expected)
    row = next(line for line in result.stdout.splitlines() if line.split()[:2] == ["index", "0.500"])
    loss = expected.loc[3, ["added_loss", "added_loss_se"]]
    assert f"{loss.iloc[0]:.3f} ± {loss.iloc[1]:.3f}" in row
    assert "±" not in quiet("perturb", "--length", 16, "--kind", "order", "--fractions", 1, "--seeds", 1).stdout


@pytest.mark.parametrize("unit", ["token", "word"])
def test_perturbed_units(unit: Any, model: Any, tmp_path: Path) -> None:
    out = tmp_path / "table.csv"
    chosen = ("--kind", "order", "--fractions", "0.5", "--seeds", 1, "--unit", unit)
    quiet("perturb", "--length", 32, *chosen, "--out", out)
    expected = perturbation_curve(model, TOKENS, ["order"], [0.5], 1, unit=unit, progress=False)
    same(pd.read_csv(out), expected)


def test_length(model: Any, tmp_path: Path) -> None:
    out = tmp_path / "table.csv"
    chosen = ("--lengths", "4,16,32,40", "--in-range", 20, "--sinks", 2, "--window", 8, "--ceiling", 12)
    quiet("length", *chosen, "--factor", 1.5, "--layers", "4", "--out", out)
    ways = {
        "plain": None,
        "lambda-mask": lambda_mask(model, 2, 8, 12),
        "interpolation": position_interpolation(model, 1.5),
    }
    got = pd.read_csv(out)
    tokens, edges = demo_tokens(length=41), [4, 16, 32, 40]
    assert list(got["way"].unique()) == list(ways)
    for name, hooks in ways.items():
        expected = length_generalization(model, tokens, edges, hooks, in_range=20, layers=[4], progress=False)
        same(got[got["way"] == name].drop(columns="way"), expected)


@pytest.mark.slow
def test_length_has_defaults_from_the_context(model: Any, tmp_path: Path) -> None:
    out = tmp_path / "table.csv"
    quiet("length", "--way", "lambda-mask", "--layers", "0", "--out", out)
    hooks = lambda_mask(model, 4, 256, 256)
    expected = length_generalization(
        model, demo_tokens(length=1025), [64, 256, 512, 768, 1024], hooks, in_range=512, layers=[0], progress=False
    )
    same(pd.read_csv(out).drop(columns="way"), expected)


def test_ablate(model: Any, tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    result = quiet("ablate", "--length", 32, "--layers", "3-4", "--heads", "0,2", "--mode", "mean", "--out", out)
    expected = head_ablation(model, TOKENS, layers=[3, 4], heads=[0, 2], mode="mean", progress=False)
    same(pd.DataFrame(json.loads(out.read_text(encoding="utf-8"))), expected)
    assert repr(deposit(expected, better="lower")) in result.stdout
    assert shown(result, 1) == [f"{x:.3f}" for x in expected.loc[expected["head"] == 0, "effect"]]


def test_ablate_foretells(model: Any, tmp_path: Path) -> None:
    out = tmp_path / "table.csv"
    options = ("--length", 16, "--texts", 3, "--layers", "4", "--mode", "resample", "--seed", 2)
    result = quiet("ablate", *options, "--metric", "accuracy", "--out", out)
    ids = model.to_tokens(demo_text(), truncate=False)[0]
    tokens = torch.stack([torch.cat([ids[:1], ids[1 + 15 * n : 16 + 15 * n]]) for n in range(3)])

    def right(logits: torch.Tensor, tokens: torch.Tensor) -> float:
        hits = [int(logits[t, i].argmax()) == int(tokens[t, i + 1]) for t in range(3) for i in range(15)]
        return sum(hits) / len(hits)

    expected = head_ablation(model, tokens, right, layers=[4], mode="resample", seed=2, progress=False)
    same(pd.read_csv(out), expected)
    assert repr(deposit(expected, better="higher")) in result.stdout


def test_report(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = pytest.importorskip("tl_posdisent.report.build").report
    out, title = tmp_path / "new" / "page.html", "A & B <1>"
    typed = ["report", "--length", "32", "--layers", "1", "--section", "additivity", "--title", title, "--no-progress"]
    monkeypatch.setattr("sys.argv", ["/usr/bin/tl-posdisent", *typed, "--out", str(out)])
    result = invoke(*typed, "--out", out)
    assert result.stdout == f"{out}\n"
    command = (
        f"tl-posdisent report --length 32 --layers 1 --section additivity --title 'A & B <1>' --no-progress --out {out}"
    )
    other = tmp_path / "other.html"
    report(
        model,
        TOKENS,
        other,
        layers=[1],
        sections=["additivity"],
        title=title,
        command=command,
        progress=False,
    )
    assert out.read_bytes() == other.read_bytes()
    assert "A &amp; B &lt;1&gt;" in out.read_text(encoding="utf-8")


# --- models ---------------------------------------------------------------------------------------------------------


def test_models(tmp_path: Path) -> None:
    out = tmp_path / "models.csv"
    result = invoke("models", "--untested", "--out", out)
    table = pd.read_csv(out).set_index("name")
    assert list(table.index[:2]) == ["demo", "smollm2"]
    assert table.index.is_unique
    assert (table.loc["EleutherAI/pythia-70m", ["bridge", "positions"]] == ["tested", "rotary"]).all()
    assert table.loc["openai-community/gpt2", "positions"] == "learned"
    assert (table["hooked"] == "yes").any() == has_hooked()
    lines = result.stdout.splitlines()
    assert lines[-1] == f"{len(table)} models"
    assert [line.split()[0] for line in lines[3:-2]] == list(table.index)
    brief = invoke("models", "--search", "PYTHIA-70m").stdout.splitlines()
    names = [line.split()[0] for line in brief if "/" in line]
    kept = table[(table["bridge"] == "tested") | (table["hooked"] == "yes")]
    assert names == [name for name in kept.index if "pythia-70m" in name]
    assert len(names) < sum("pythia-70m" in name for name in table.index)


@pytest.mark.parametrize("backend", ["hooked", "bridge"])
def test_models_of_one_class(backend: str) -> None:
    if backend == "hooked" and not has_hooked():
        assert "no model is like that" in invoke("models", "--backend", "hooked", code=2).stderr
        return
    words = [line.split() for line in invoke("models", "--search", "gpt2", "--backend", backend).stdout.splitlines()]
    column = [row[1 if backend == "hooked" else 2] for row in words if len(row) == 5 and row[0] != "name"]
    assert column
    assert "–" not in column


def test_no_model_is_like_that() -> None:
    result = invoke("models", "--search", "no such model", code=2)
    assert result.stdout == ""
    assert "no model is like that; more are listed with --untested" in result.stderr


@pytest.mark.slow
def test_what_is_said_of_positions_is_so(shared_model: Callable[[str, str], Any]) -> None:
    """For every architecture of the zoo that is in the list; and the list says nothing of any other."""
    from support import zoo

    found = {}
    for kind, name in [case.values if hasattr(case, "values") else case for case in zoo.cases()]:
        architecture = zoo.ARCHITECTURES[name].model
        if kind == "bridge" and architecture not in found:
            found[architecture] = any(spec.rotary is not None for spec in read_layers(shared_model(kind, name)))
    said = {name: encoding == "rotary" for name, encoding in models_encoding().items()}
    assert {name: said[name] for name in found if name in said} == {n: r for n, r in found.items() if n in said}
    assert set(said) <= {architecture.model for architecture in zoo.ARCHITECTURES.values()}


def models_encoding() -> dict[str, str]:
    from tl_posdisent.cli.commands.models import ENCODINGS

    return ENCODINGS


# --- formats --------------------------------------------------------------------------------------------------------


class Cells(HTMLParser):
    """The table of a page, numbers in full."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[Any]] = []
        self.tags: set[str] = set()
        self.value: Any = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.value = ""
        if tag == "data":
            self.value = float(dict(attrs)["value"] or "")

    def handle_data(self, data: str) -> None:
        if isinstance(self.value, str):
            self.value += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.rows[-1].append(self.value)
            self.value = None


TABLE = pd.DataFrame(
    {"layer": [0, 1], "<b>&": ['<script>alert("x")</script>', "…"], "r": [1 / 3, float("nan")], "big": [1e300, -2e-17]}
)


def read_html(path: Path) -> pd.DataFrame:
    parser = Cells()
    parser.feed(path.read_text(encoding="utf-8"))
    table = pd.DataFrame(parser.rows[1:], columns=parser.rows[0])
    return table.replace("–", float("nan")).astype({"layer": int, "r": float, "big": float})


READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".csv": lambda path: pd.read_csv(path, dtype=str).astype({"layer": int, "r": float, "big": float}),
    ".parquet": pd.read_parquet,
    ".json": lambda path: pd.DataFrame(json.loads(path.read_text(encoding="utf-8"))),
    ".html": read_html,
}


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_format_holds_every_digit(suffix: str, tmp_path: Path) -> None:
    out = tmp_path / "a" / f"table{suffix}"
    save(TABLE, out, "title")
    pd.testing.assert_frame_equal(READERS[suffix](out), TABLE, check_exact=True)
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_a_page_is_quiet_and_safe(tmp_path: Path) -> None:
    out = tmp_path / "table.html"
    save(TABLE, out, 'x <img src="y">')
    parser, page = Cells(), out.read_text(encoding="utf-8")
    parser.feed(page)
    assert parser.tags.isdisjoint({"script", "img", "link", "iframe", "b"})
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    assert '<meta name="viewport"' in page
    assert "http:" not in page.replace("http-equiv", "")
    assert "<title>x &lt;img src=&quot;y&quot;&gt;</title>" in page


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_is_whole_or_as_it_was(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / f"table{suffix}"
    out.write_text("old", encoding="utf-8")

    def full(*arguments: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space"):
        save(TABLE, out, "title")
    assert out.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [out]


# --- text, weights, streams -----------------------------------------------------------------------------------------

SHORT = ("ablate", "--length", "16", "--layers", "0", "--no-progress")


def test_text_from_stdin_is_that_of_a_file(tmp_path: Path) -> None:
    words = "Wir, the peôple of these states,\nare free & equal; and so are we. " * 2
    text = tmp_path / "text.txt"
    text.write_text(words, encoding="utf-8")
    from_file = invoke(*SHORT, "--text", text).stdout
    assert invoke(*SHORT, "--text", "-", stdin=words.encode()).stdout == from_file
    assert (
        invoke(*SHORT, "--text", "-", stdin=b"\xef\xbb\xbf" + words.replace("\n", "\r\n").encode()).stdout == from_file
    )
    assert invoke(*SHORT).stdout != from_file
    for bad, message in ((words.encode("latin-1"), "stdin is not (byte 0xf4 at position 11)"), (b"", "stdin is empty")):
        refused = invoke(*SHORT, "--text", "-", stdin=bad, code=2)
        assert message in refused.stderr
        assert refused.stdout == ""


@pytest.mark.parametrize("backend", ["bridge", "hooked"])
@pytest.mark.parametrize(("dtype", "close"), [("float64", 1e-5), ("bfloat16", 0.1), ("float16", 0.02)])
def test_other_weights(dtype: str, close: float, backend: str, model: Any, tmp_path: Path) -> None:
    if backend == "hooked" and not has_hooked():
        pytest.skip("TransformerLens 4")
    out = tmp_path / "table.csv"
    result = quiet(*SHORT, "--dtype", dtype, "--backend", backend, "--device", "cpu", "--out", out)
    expected = head_ablation(model, demo_tokens(length=16), layers=[0], progress=False)
    got = pd.read_csv(out)
    gap = (got["value"] - expected["value"]).abs().max()
    assert 0 < gap < close
    assert "Changing" not in result.stdout


def test_a_table_in_a_pipe_is_not_cut() -> None:
    """However narrow the screen is said to be."""
    wide = quiet("perturb", "--length", 16, "--fractions", "0.5", "--seeds", 2, "--kind", "order").stdout
    assert max(map(len, wide.splitlines())) > 60
    assert "kl" in wide
    assert "…" not in wide
    assert len([line for line in wide.splitlines() if line.strip().startswith("order")]) == 1


def test_letters_that_stdout_lacks() -> None:
    result = CliRunner(charset="ascii").invoke(app, [*SHORT])
    assert result.exit_code == 0, result.output
    assert "demo, 1 ? 16 tokens" in result.stdout


def test_a_defect_is_not_taken_for_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("tl_posdisent.experiments.causal.head_ablation.head_ablation", broken)
    assert invoke(*SHORT, code=1).stdout == ""


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tl_posdisent.experiments.causal.head_ablation.head_ablation", stop)
    result = invoke(*SHORT, code=130)
    assert (result.stdout, result.stderr) == ("", "interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["perturb", "--kind", "chaos"], "--kind must be one of order, index, feature, got 'chaos'"),
        (["perturb", "--fractions", "0,half"], "--fractions must be numbers with commas between, got '0,half'"),
        (["perturb", "--fractions", "0,2"], "--fractions must be a number from 0 to 1, got 2.0"),
        (["length", "--way", "fast"], "--way must be one of plain, lambda-mask, interpolation, got 'fast'"),
        (["length", "--lengths", "4,9000"], "--text has"),
        (["length", "--lengths", "16,4"], "--lengths must be at least two ascending integers"),
        (["length", "--lengths", "4,16", "--in-range", "17"], "--in-range must be an integer from 7 to 16"),
        (["length", "--lengths", "4,16", "--way", "interpolation", "--factor", "0"], "--factor must be"),
        (["ablate", "--length", "16", "--mode", "resample"], '--mode "resample" needs a batch of at least two texts'),
        (
            ["ablate", "--length", "16", "--heads", "8"],
            "--heads must be integers from 0 to 7 (or from -8 to -1, counted from the end), got 8",
        ),
        (["controlled", "--length", "16", "--sinks", "16"], "sinks"),
        (["report", "--out", "page.csv"], "--out must end in .html, got 'page.csv'"),
        (["report", "--section", "weather"], "--section must be one of additivity, "),
        (["models", "--out", "models.txt"], "--out must end in"),
    ],
)
def test_errors_name_the_option(arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments, code=2)
    assert result.stderr.splitlines()[-1].startswith(f"error: {message}") or message in result.stderr
    assert result.stdout == ""
    assert not list(tmp_path.iterdir())


def test_stdin_that_is_binary() -> None:
    refused = invoke(*SHORT, "--text", "-", stdin=io.BytesIO(b"\x00\xff").getvalue(), code=2)
    assert "--text must be UTF-8" in refused.stderr
