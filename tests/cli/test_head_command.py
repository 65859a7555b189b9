"""``tl-posdisent head`` prints what ``describe_head`` says, and saves its numbers."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from support.command_line import run_command

from tl_posdisent import demo_text, describe_head, load_demo_model, where_or_what
from tl_posdisent.demo import demo_tokenizer

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_it_is_that_of_the_library(suffix: str, tmp_path: Path) -> None:
    ids = demo_tokenizer().encode(demo_text(), add_special_tokens=False)
    tokens = torch.tensor([[0, *ids[31 * n : 31 * (n + 1)]] for n in range(3)])
    found = describe_head(load_demo_model(), tokens, "L4H2", seeds=[5], seed=5, progress=False)
    out = tmp_path / "new" / f"head{suffix}"
    result = run_command("head L4H2 --length 32 --texts 3 --seed 5 --no-progress", "--out", out)
    assert result.stdout == f"{found!r}\n"
    assert result.stderr == ""
    table = pd.read_csv(out) if suffix == ".csv" else pd.read_parquet(out)
    pd.testing.assert_frame_equal(table, found.to_frame(), rtol=1e-6, atol=1e-7)


def test_without_a_head_it_prints_all(tmp_path: Path) -> None:
    ids = demo_tokenizer().encode(demo_text(), add_special_tokens=False)
    tokens = torch.tensor([[0, *ids[31 * n : 31 * (n + 1)]] for n in range(3)])
    found = where_or_what(load_demo_model(), tokens, seed=5, progress=False)
    out = tmp_path / "heads.csv"
    lines = run_command("head --length 32 --texts 3 --seed 5 --no-progress", "--out", out).stdout.splitlines()
    assert lines[0] == found.attrs["statement"]
    largest = found.nlargest(1, "contribution").iloc[0]
    first = lines[4].split()
    assert first[0] == f"L{largest['layer']}H{largest['head']}"
    assert first[1:4] == [f"{largest['where_unclipped']:.2f}", "±", f"{largest['where_se']:.2f}"]
    assert " ".join(first[11:]) == largest["verdict"]
    pd.testing.assert_frame_equal(pd.read_csv(out), found, rtol=1e-6, atol=1e-7, check_dtype=False)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("head L9H0 --length 16", "head must be L0H0 to L4H7, as labels or as pairs (layer, head) (or negative"),
        ("head first --length 16", 'head given as text must be labels such as "L16H0", got'),
        ("head L4H2 --length 16 --out table.xls", "out must be a file such as table.csv"),
        ("head L4H2 --text nowhere.txt", "text cannot be read: "),
    ],
    ids=["layer", "word", "out", "text"],
)
def test_refusals(line: str, message: str) -> None:
    assert run_command(line, code=2).stderr.startswith(f"error: {message}")
