"""Each command prints and saves what its function returns, in every format; an error is one line on stderr."""

from __future__ import annotations

import html
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import pandas as pd
import pytest
import torch
from support import zoo
from support.command_line import run_command
from typer.testing import Result

from tl_posdisent import additivity, demo_text, demo_tokens, load_demo_model, random_control, report
from tl_posdisent.cli import app
from tl_posdisent.cli.inputs import NAMES, check_in_range
from tl_posdisent.cli.output import FORMATS, save
from tl_posdisent.demo import demo_tokenizer
from tl_posdisent.demo.demo_model import demo_hf_model
from tl_posdisent.models.loading.names import check_name

pytestmark = pytest.mark.usefixtures("unchecked")
SHORT = "fit --length 16 --layers 0 --texts 1 --control 0 --no-progress"


@pytest.fixture(scope="module")
def model() -> Any:
    return load_demo_model()


def same(got: pd.DataFrame, expected: pd.DataFrame) -> None:
    got, expected = got.reset_index(drop=True), expected.reset_index(drop=True).replace("", float("nan"))
    missing = [name for name in expected.select_dtypes("Int64") if expected[name].isna().all()]
    expected = expected.astype(dict.fromkeys(missing, float))
    pd.testing.assert_frame_equal(got, expected, check_dtype=False, rtol=1e-6, atol=1e-7)


def rows(result: Result, first: str = r"\d+") -> list[list[str]]:
    """The words of the lines that begin with a number, or with another word."""
    return [line.split() for line in result.stdout.splitlines() if re.match(f" *{first} ", line)]


# Tables


@dataclass
class Case:
    """A command, and what its table is by direct calls of the model."""

    line: str
    expected: Callable[..., pd.DataFrame]
    tokens: torch.Tensor


def beside_random(
    measure: Callable[..., pd.DataFrame], seeds: list[int], model: Any, tokens: torch.Tensor, std: float = 0.02
) -> pd.DataFrame:
    tables = [measure(model, tokens, progress=False).assign(weights="trained", seed=float("nan"), std=float("nan"))]
    for seed, random in zip(seeds, random_control(model, seeds, std=std) if seeds else [], strict=True):
        tables.append(measure(random, tokens, progress=False).assign(weights="random", seed=seed, std=std))
    return pd.concat(tables)


def stretches(count: int, length: int) -> torch.Tensor:
    """Of the demo text, each after token 0, and from where the last one ended."""
    ids = demo_tokenizer().encode(demo_text(), add_special_tokens=False)
    return torch.tensor([[0, *ids[(length - 1) * n : (length - 1) * (n + 1)]] for n in range(count)])


ONE, QUIET = demo_tokens(length=32), {"progress": False}
CASES = {
    "fit": Case(
        "fit --length 32 --texts 2 --layers 0,2-3 --control 2 --seed 5",
        partial(beside_random, partial(additivity, layers=[0, 2, 3]), [5, 6]),
        stretches(2, 32),
    ),
    "fit labels": Case(
        "fit --length 32 --heads L4H5,L0H7 --control 0 --texts 1",
        lambda m, t: beside_random(partial(additivity, layers=[0, 4]), [], m, t).iloc[[7, 13]],
        ONE,
    ),
    "fit pooled": Case(
        "fit --length 32 --layers 2 --texts 3 --pool --control 0",
        partial(beside_random, partial(additivity, layers=[2], pool=True), []),
        stretches(3, 32),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_table_is_that_of_the_library(name: str, model: Any, tmp_path: Path) -> None:
    case, out = CASES[name], tmp_path / "new" / "table.csv"
    result = run_command(case.line, "--no-progress", "--out", out)
    same(pd.read_csv(out), case.expected(model, case.tokens))
    assert result.stderr == ""
    assert str(out) not in result.stdout


def test_means_over_heads_are_shown_beside_random_weights(model: Any) -> None:
    trained, chance = (additivity(m, stretches(2, 32), **QUIET) for m in (model, next(random_control(model, [0]))))
    result = run_command("fit --length 32 --texts 2 --no-progress")
    shown = [words[0:1] + words[-2:] for words in rows(result)]
    r, by_layer = trained["r_held_out"], [t.groupby("layer")["r_held_out"].mean() for t in (trained, chance)]
    assert shown == [[str(n), f"{by_layer[0][n]:.2f}", f"{by_layer[1][n]:.2f}"] for n in range(5)]
    headline = f"mean r_held_out {r.mean():.3f} ({r.min():.3f}…{r.max():.3f}) over 40 heads"
    at_random = f"at random initialisation (standard deviation 0.02) {chance['r_held_out'].mean():.3f}"
    assert f"{headline}; {at_random}" in result.stdout
    heads, limit = trained.groupby(["layer", "head"])["r_held_out"].mean(), {}
    for (layer, _), x in chance.groupby(["layer", "head"])["r_held_out"].mean().items():
        limit[layer] = max(x, limit.get(layer, 0))
    low = [f"L{layer}H{head}" for (layer, head), x in heads.items() if x <= limit[layer]]
    said = f"above the highest random head of their layer: {40 - len(low)} of 40 heads"
    assert said + (f", all but {', '.join(low)}\n" if low else "\n") in result.stdout
    without = run_command("fit --length 32 --texts 2 --no-progress --control 0")
    assert {words[-1] for words in rows(without)} == {"–"}
    assert {len(words) for words in rows(without)} == {11}  # layer, eight heads, mean, random
    assert "random initialisation" not in without.stdout


def test_report(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, other, title = tmp_path / "new" / "page.html", tmp_path / "other.html", "A & B <1>"
    line = f"report --length 32 --texts 2 --layers 1 --section additivity --title '{title}' --no-progress --out {out}"
    typed = ["report", "--length", "32", "--texts", "2", "--layers", "1", "--section", "additivity", "--title", title]
    monkeypatch.setattr("sys.argv", ["/usr/bin/tl-posdisent", *typed, "--no-progress", "--out", str(out)])
    assert run_command(line).stdout == f"{out}\n"
    chosen: dict[str, Any] = {"layers": [1], "sections": ["additivity"], "title": title}
    report(model, stretches(2, 32), other, **chosen, progress=False)
    check_same_but_for_the_call(out, other, f"tl-posdisent {line}")
    assert "A &amp; B &lt;1&gt;" in out.read_text(encoding="utf-8")


def test_the_report_of_a_text_is_that_of_python(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six texts, shorter if need be; of a text beyond the context, which is cut, nothing is said."""
    words = demo_text()[:1700]
    text, out, other = tmp_path / "text.txt", tmp_path / "page.html", tmp_path / "other.html"
    text.write_text(words, encoding="utf-8")
    line = f"report --text {text} --layers 4 --section additivity --no-progress --out {out}"
    monkeypatch.setattr("sys.argv", ["tl-posdisent", *line.split()])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the longest text has")
        run_command(line)
        report(model, words, other, layers=[4], sections=["additivity"], progress=False)
    check_same_but_for_the_call(out, other, f"tl-posdisent {line}")
    assert "6 texts of " in other.read_text(encoding="utf-8")


def check_same_but_for_the_call(by_command: Path, by_python: Path, line: str) -> None:
    """The page of the command has the command line where that of Python has the call."""
    call = re.compile(r"<code>(.*?)</code>", re.DOTALL)
    pages = [path.read_text(encoding="utf-8") for path in (by_command, by_python)]
    assert html.unescape(call.findall(pages[0])[0]) == line
    assert call.sub("", pages[0]) == call.sub("", pages[1])


# Formats


WORD = "a" * 99  # which pandas would cut
TABLE = pd.DataFrame({"layer": [0, 1], "<b>&": ['<script>alert("x")</script>', WORD], "r": [1 / 3, float("nan")]})
TABLE["big"] = [1e300, -2e-17]
TYPES = {"layer": int, "r": float, "big": float}


READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".csv": lambda path: pd.read_csv(path, dtype=str).astype(TYPES),
    ".parquet": pd.read_parquet,
}


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_format_holds_every_digit(suffix: str, tmp_path: Path) -> None:
    out = tmp_path / "a" / f"table{suffix}"
    save(TABLE, out)
    pd.testing.assert_frame_equal(READERS[suffix](out), TABLE, check_exact=True)
    assert [path.name for path in out.parent.iterdir()] == [out.name]


# Texts, weights, streams


def test_the_demo_text_by_its_name(tmp_path: Path) -> None:
    """It is the default, also for other models, which say so; --text demo is the same without a note."""
    line = "fit --length 32 --layers 0 --control 0"
    assert run_command(f"{line} --text demo --no-progress").stdout == run_command(f"{line} --no-progress").stdout
    folder = tmp_path / "other"
    demo_hf_model().save_pretrained(folder)
    demo_tokenizer().save_pretrained(folder)
    results = [run_command(line, "--model", folder, *text) for text in ([], ["--text", "demo"])]
    assert results[0].stdout == results[1].stdout
    assert ["text: the demo text; --text names another" in each.stderr for each in results] == [True, False]


def test_an_error_about_the_model_stands_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for line in ("fit", "report"):
        (stderr,) = run_command(line, "--model", tmp_path / "model", code=2).stderr.splitlines()
        assert stderr.startswith("error: ")


def test_a_short_text_is_read_whole(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("We the people of the United States, in order to form a more perfect union", encoding="utf-8")
    n = len(demo_tokenizer().encode(text.read_text(encoding="utf-8")))
    assert f"demo, 1 × {n} tokens" in run_command("fit --layers 4 --texts 1 --no-progress", "--text", text).stdout
    assert (
        f"demo, 2 × {(n - 1) // 2 + 1} tokens"
        in run_command("fit --layers 4 --texts 2 --no-progress", "--text", text).stdout
    )


def test_text_from_stdin_is_that_of_a_file(tmp_path: Path) -> None:
    words = "Wir, the peôple of these states,\nare free & equal; and so are we. " * 2
    text = tmp_path / "text.txt"
    text.write_text(words, encoding="utf-8")
    from_file = run_command(SHORT, "--text", text).stdout
    with_marks = b"\xef\xbb\xbf" + words.replace("\n", "\r\n").encode()
    for content in (words.encode(), with_marks):
        assert run_command(SHORT, "--text", "-", stdin=content).stdout == from_file
    assert run_command(SHORT).stdout != from_file
    latin = words.encode("latin-1")
    for content, message in ((latin, "stdin is not (byte 0xf4 at position 11)"), (b"", "stdin is empty")):
        refused = run_command(SHORT, "--text", "-", stdin=content, code=2)
        assert message in refused.stderr
        assert refused.stdout == ""


@pytest.mark.parametrize("backend", zoo.KINDS)
def test_a_directory_as_save_pretrained_writes_it(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Titles name it by its folder, not by the path from here to it."""
    folder, text, out = tmp_path / "my [bold] model", tmp_path / "text.txt", tmp_path / "table.csv"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    demo_hf_model().save_pretrained(folder)
    demo_tokenizer().save_pretrained(folder)
    text.write_text("We the people of the United States, in order to form a more perfect union. " * 3, encoding="utf-8")
    line = f"fit --length 32 --texts 1 --control 0 --backend {backend} --no-progress"
    result = run_command(line, "--model", "../my [bold] model", "--text", text, "--out", out)
    ids = torch.tensor([demo_tokenizer().encode(text.read_text(encoding="utf-8"))[:32]])
    expected = additivity(load_demo_model(backend=backend), ids, progress=False)
    pd.testing.assert_frame_equal(pd.read_csv(out).drop(columns=["weights", "seed", "std"]), expected, rtol=1e-4)
    assert "by layer and head: my [bold] model, 1 × 32 tokens" in result.stdout


@pytest.mark.parametrize("backend", zoo.KINDS)
@pytest.mark.parametrize(("dtype", "close"), [("float64", 1e-5), ("bfloat16", 0.1), ("float16", 0.02)])
def test_other_weights(dtype: str, close: float, backend: str, model: Any, tmp_path: Path) -> None:
    out = tmp_path / "table.csv"
    result = run_command(SHORT, "--dtype", dtype, "--backend", backend, "--device", "cpu", "--out", out)
    expected = additivity(model, demo_tokens(length=16), layers=[0], progress=False)
    gap = (pd.read_csv(out)["r"] - expected["r"]).abs().max()
    assert 0 < gap < close
    assert "Changing" not in result.stdout


def test_letters_that_stdout_lacks() -> None:
    assert "demo, 1 ? 16 tokens" in run_command(SHORT, charset="ascii").stdout


# Errors: those of the user are one line and code 2, Ctrl-C is 130, a defect is 1


def test_a_defect_and_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code, stderr in (
        (RuntimeError("a bug"), 1, None),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (MemoryError("scores take\n3 GB"), 2, "error: scores take 3 GB\n"),
    ):

        def stop(*arguments: Any, error: BaseException = error, **options: Any) -> None:
            raise error

        monkeypatch.setattr("tl_posdisent.experiments.attention_scores.additivity.additivity", stop)
        result = run_command(SHORT, code=code)
        assert result.stdout == ""
        assert stderr is None or result.stderr == stderr


ENDS = "must be a file such as table.csv, ending in .csv or .parquet, got"
REFUSED = [
    ("fit --text nowhere.txt", "text cannot be read: [Errno 2] No such file or directory: 'nowhere.txt'"),
    ("fit --text short.txt --length 32", "text has 2 tokens, too few for 1 × 32"),
    ("fit --text latin.txt", "text must be UTF-8, but latin.txt is not (byte 0xe9 at position 3)"),
    ("fit --text empty.txt", "text must have words, but"),
    ("fit --text folder.csv", "text cannot be read: [Errno 21] Is a directory"),
    ("fit --text /dev/zero", "text must have at most 100 MB, but /dev/zero has more"),
    *((f"fit --length 32 --layers {x}", "layers must be integers") for x in ("0,9", "0,1-x", "0,3-1", "-9")),
    *((f"{x} --length 16 --layers first", "layers must be integers, ") for x in ("fit", "report")),
    *((f"fit --length 16 --layers '{x}'", "layers must be integers") for x in ("", "[b]0", "0, 1", "3-1", "0-99999")),
    ("fit --length 16 --layers 0-9999", "layers must be integers from 0 to 4"),
    ("fit --length 16 --heads 8", "heads must be integers from 0 to 7"),
    ("fit --length 16 --heads L4H2,x", "heads given as text must be labels such as"),
    *(
        (f"fit --length 16 --std {x}", f"std must be a finite number above 0, or config, got {x}")
        for x in ("-1.0", "nan", "0.0")
    ),
    ("fit --length 16 --std confg", "std must be a finite number above 0, or config, got 'confg'"),
    ("fit --length 16 --control 0 --std confg", "std must be a finite number above 0, or config, got 'confg'"),
    ("fit --length 16 --control 0 --std -1.0", "std must be a finite number above 0, or config, got -1.0"),
    *((f"fit --device {x}", f"device must be one that torch can use, got {x!r}: ") for x in ("abacus", "cuda:77")),
    *((f"fit --out {x}", f"out {ENDS} '{x}'") for x in ("table.xls", "table.json", ".", "..", "/", "new", ".csv")),
    ("fit --out short.txt/table.csv", "out must be a file that can be written, got 'short.txt/table.csv': "),
    ("fit --out folder.csv", "out must be a file that can be written, got 'folder.csv', which is a folder"),
    ("report --out /sys/x.html", "out must be a file that can be written, got '/sys/x.html': no file can be created"),
    (f"fit --out {'x' * 300}.csv", "out must be a file that can be written, got 'xxx"),
    ("report --out page.csv", "out must be a file such as table.html, ending in .html, got 'page.csv'"),
    ("report --out .", "out must be a file such as table.html, ending in .html, got '.'"),
    ("fit --model ./none", "model must be the folder of a model, or a model's name, got './none', where no folder is"),
    (
        "head --after ~/none",
        "after must be the folder of a model, or a model's name, got '~/none', where no folder is: ",
    ),
    ("fit --model demoo", "model cannot be 'demoo': did you mean 'demo'?"),
    ("head --after SmolM2", "after cannot be 'SmolM2': did you mean 'smollm2'?"),
    ("fit --model ./model --text short.txt", "model must have a tokenizer, so that it can read a text, got ./model"),
    ("head --after ./model --length 32", "after must have a tokenizer, so that it can read a text, got ./model"),
    ("fit --length 600", "tokens are 600 long, and the model fails beyond its context of 512: "),
    ("fit --length 32 --texts 1000", "text has 3257 tokens, too few for 1000 × 32"),
    ("report --section share", "section cannot be 'share': did you mean 'shares'? It must be 'where_or_what', "),
]


@pytest.mark.parametrize("name", ["google/gemma-3-270m", "gemma-3-270m", "gemma-2b", "smollm2-135m", *NAMES])
def test_a_name_that_may_be_meant_is_not_refused(name: str) -> None:
    """Names of TransformerLens and of repositories near those of packaged models."""
    check_name("model", name, shell=True)


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"num_hidden_layers": 2, "num_attention_heads": [3, 3]}'])
def test_a_size_that_is_not_stated_refuses_nothing(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    for model in (tmp_path, tmp_path / "nothing", "EleutherAI/pythia-70m"):
        check_in_range(str(model), [99], ["L99H99"])


COUNTS = [  # options that are a number of things
    (command.callback.__name__, "--" + option.replace("_", "-"))
    for command in app.registered_commands
    for option, kind in get_type_hints(command.callback).items()
    if kind in (int, int | None) and option != "seed"
]


@pytest.mark.parametrize(("name", "option"), COUNTS)
def test_a_count_that_no_memory_holds_is_refused_at_once(name: str, option: str) -> None:
    result = run_command(name, option, 10**9, code=2)
    assert f"Invalid value for '{option}'" in result.stderr
    assert "1000000" in result.stderr.replace("10000000", "")


@pytest.mark.parametrize("texts", [1, 2])
def test_what_two_tokens_leave_undefined_is_not_printed_as_a_number(texts: int) -> None:
    said = run_command("fit", "--length", 2, "--texts", texts, "--layers", 0).stdout
    assert "r is undefined in all 8 heads: too few tokens, or scores that do not vary" in said
    assert not re.search(r"\bnan\b", said, re.IGNORECASE)


TYPED = [  # options that are parsed before a command runs
    (command.callback.__name__, "--" + option.replace("_", "-"))
    for command in app.registered_commands
    for option, kind in get_type_hints(command.callback).items()
    if kind in (int, int | None, float, float | None) or get_origin(kind) is Literal
]


@pytest.mark.parametrize(("name", "option"), TYPED)
def test_errors_of_the_parser_name_the_option(name: str, option: str) -> None:
    said = " ".join(run_command(name, option, "nonsense", code=2).stderr.replace("│", " ").split())
    assert re.search(rf"Invalid value for '{option}': (Input should be|(Value error, )?'nonsense' is not )", said), said


def test_there_are_counts() -> None:
    assert ("fit", "--dtype") in TYPED
    assert len(COUNTS) >= 6
    assert ("report", "--texts") in COUNTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("errors")
    (folder / "short.txt").write_text("We the", encoding="utf-8")
    (folder / "empty.txt").write_text(" \n", encoding="utf-8")
    (folder / "latin.txt").write_bytes("café ".encode("latin-1") * 100)
    (folder / "folder.csv").mkdir()
    zoo.hf_model("llama").save_pretrained(folder / "model")
    return folder


@pytest.mark.parametrize(("line", "message"), REFUSED, ids=[line for line, _ in REFUSED])
def test_errors_are_one_line_with_the_words_of_the_function(
    line: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    result = run_command(line, "--no-progress", code=2)
    assert result.stderr.splitlines()[-1].startswith(f"error: {message}")
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert sorted(folder.iterdir()) == before
