"""``tl-posdisent head`` prints what ``describe_head`` says, and saves its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.command_line import run_command
from support.lanes import slow

from tl_posdisent import compare_heads, demo_text, describe_head, load_demo_model, where_or_what
from tl_posdisent.demo import demo_tokenizer
from tl_posdisent.demo.demo_model import demo_hf_model

pytestmark = pytest.mark.usefixtures("unchecked")


def test_it_is_that_of_the_library(tmp_path: Path) -> None:
    ids = demo_tokenizer().encode(demo_text(), add_special_tokens=False)
    tokens = torch.tensor([[0, *ids[31 * n : 31 * (n + 1)]] for n in range(3)])
    found = describe_head(load_demo_model(), tokens, "L4H2", seeds=[5], seed=5, progress=False)
    out = tmp_path / "new" / "head.parquet"
    result = run_command("head L4H2 --length 32 --texts 3 --seed 5 --no-progress", "--out", out)
    assert result.stdout == f"{found!r}\n"
    assert result.stderr == ""
    pd.testing.assert_frame_equal(pd.read_parquet(out), found.to_frame(), rtol=1e-6, atol=1e-7)


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
    for place, column, digits in (
        (1, "where_part", 2),
        (4, "what_part", 2),
        (7, "neither_part", 2),
        (10, "contribution", 4),
    ):
        shown = [f"{largest[column]:.{digits}f}", "±", f"{largest[f'{column}_se']:.{digits}f}"]
        assert first[place : place + 3] == shown
    assert " ".join(first[13:]) == largest["verdict"]
    saved, expected = pd.read_csv(out).fillna({"open": ""}), pd.DataFrame(found)
    pd.testing.assert_frame_equal(saved, expected, rtol=1e-6, atol=1e-7, check_dtype=False)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo model whose L3H0 writes less."""
    folder, model = tmp_path_factory.mktemp("scaled"), demo_hf_model()
    with torch.no_grad():
        model.model.layers[3].self_attn.o_proj.weight[:, :16].mul_(0.3)
    model.save_pretrained(folder)
    demo_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("head", ["L3H0", *slow([""])])
def test_what_changed_in_another_model(head: str, scaled: Path, tmp_path: Path) -> None:
    ids, after = demo_tokenizer().encode(demo_text(), add_special_tokens=False), load_demo_model()
    with torch.no_grad():
        after.blocks[3].attn.W_O[0].mul_(0.3)
    tokens = torch.tensor([[0, *ids[47 * n : 47 * (n + 1)]] for n in range(6)])
    one: dict[str, Any] = {"heads": [head], "exact": "all"} if head else {}
    found = compare_heads(load_demo_model(), after, tokens, **one, progress=False)
    out = tmp_path / "changes.csv"
    said = run_command(
        f"head {head} --after {scaled} --length 48 --texts 6 --no-progress", "--out", out
    ).stdout.splitlines()
    assert said[0] == found.attrs["statement"]
    row = found.loc[found["contribution_change"].abs().idxmax()]
    shown = said[4].split()
    assert shown[0] == "L3H0"
    assert shown[1:4] == [f"{row['where_part_change']:+.2f}", "±", f"{row['where_part_change_se']:.2f}"]
    assert shown[10:14] == [
        f"{row['contribution_before']:.4f}",
        *(f"{row['contribution_change']:+.4f}", "±", f"{row['contribution_change_se']:.4f}"),
    ]
    assert " ".join(shown[14:]) == row["changed"]
    pd.testing.assert_frame_equal(
        pd.read_csv(out, keep_default_na=False, na_values=[""])[["contribution_change", "where_part_after"]],
        found[["contribution_change", "where_part_after"]],
        rtol=1e-3,
        atol=1e-6,
        check_dtype=False,
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("head L9H0 --length 16", "head must be L0H0 to L4H7, as labels or as pairs (layer, head) (or negative"),
        ("head first --length 16", 'head given as text must be labels such as "L16H0", got'),
        ("head L4H2,L3H1", "head given as text must be labels such as \"L16H0\", got 'L4H2,L3H1': give each head as a"),
        ("head L4H2 --length 16 --out table.xls", "out must be a file such as table.csv"),
        ("head L4H2 --text nowhere.txt", "text cannot be read: "),
        ("head --after demo --device abacus", "device must be one that torch can use"),
        ("head L9H0 --after demo --length 16", "head must be L0H0 to L4H7, as labels or as pairs (layer, head)"),
    ],
    ids=["layer", "word", "two", "out", "text", "device", "layer of both"],
)
def test_refusals(line: str, message: str) -> None:
    assert run_command(line, code=2).stderr.startswith(f"error: {message}")


def test_one_text_is_refused_before_a_model_is_loaded() -> None:
    """Errors are over texts."""
    assert "--texts" in run_command("head --texts 1 --model nowhere", code=2).stderr
