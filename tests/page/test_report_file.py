"""A report is whole or not there, runs nothing that a text says, and stays small where a model is large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.documents import Document
from support.untouched import state

import tl_posdisent as tp
from tl_posdisent.page.build import check_sections, read_settings, write_report
from tl_posdisent.page.drawing.atlas import atlas, listed
from tl_posdisent.page.drawing.atlas_table import atlas_table
from tl_posdisent.page.drawing.document import page
from tl_posdisent.page.measuring.measurement import Measurement
from tl_posdisent.page.measuring.panels import Panels
from tl_posdisent.page.measuring.subject import Subject, read_subject
from tl_posdisent.page.sections.additivity import SHARES
from tl_posdisent.page.sections.all_sections import SECTIONS
from tl_posdisent.page.sections.show import show_section

TOKENS = tp.demo_tokens(length=97)[:, 1:].view(2, 48)
HEAD = ["layer", "head"]
NEEDED = [f"{name}{end}" for name in ("where", "what") for end in ("", "_se", "_unclipped")]
NEEDED += ["contribution", "contribution_se"]


def test_hostile_words_are_text(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)><!-- &lt;b&gt; \u202e"
    model = tp.load_demo_model()
    path = tmp_path / "report.html"
    subject = read_subject(model, hostile * 2)
    settings = read_settings(subject, 0, 0, progress=False)
    write_report(path, subject, check_sections(["heads"]), settings, hostile, hostile)
    document = Document(path)
    assert document.wrong == []
    assert set(document.hashes) == document.allowed
    assert len(document.scripts) == 7  # no figure, so no plotly
    assert not [tag for tag, _ in document.attributes if tag == "img"]
    assert not [name for _, attributes in document.attributes for name in attributes if name.startswith("on")]
    assert "alert(1)" in document.text
    for script in document.scripts[1:]:
        assert "</script" not in script.lower()
        assert "<!--" not in script


def atlas_page(subject: Subject, measurement: Measurement) -> str:
    """The atlas of some heads, with the panels of those that are listed: 48 scores of 48 keys."""
    heads = measurement.trained
    every = [*heads[HEAD].itertuples(index=False, name=None)]
    needs = heads.assign(verdict="what", exact=False)
    table = atlas_table(every, needs=needs[[*HEAD, *NEEDED, "verdict", "exact"]], additivity=heads, ablation=heads)
    random, pairs = np.random.default_rng(0), listed(table.heads)
    scores = {pair: random.random((48, 48)) for pair in pairs}
    index = pd.MultiIndex.from_tuples(pairs, names=["layer", "head"]).repeat(256)
    rows = pd.DataFrame(index=index).reset_index().assign(distance=[*range(256)] * len(pairs), attention=0.5, cells=1)
    attention = pd.concat([rows.assign(intervention=name) for name in ("unmodified", "every distance 5")])
    sentences = {
        pair: ["A head is described in some eighty characters of text, three or four times."] * 4 for pair in pairs
    }
    return atlas(subject, table, Panels(["word"] * 128, True, attention, scores, {}), sentences)


@pytest.mark.slow
def test_a_large_model_keeps_the_file_small(tmp_path: Path) -> None:
    """80 layers of 64 heads of 64 subspaces; what is random is their numbers, not their tables."""
    subject, drawn = read_subject(tp.load_demo_model(), TOKENS), 0
    index = pd.MultiIndex.from_product([range(80), range(64)], names=HEAD).to_frame(index=False)
    columns = ["r", "r2_adjusted", *NEEDED, *SHARES, "r_two_axis", "r_three_axis", *tp.rope.COMPONENTS]
    columns += ["baseline", "value", "effect"]
    numbers = torch.rand(len(index), len(columns), generator=torch.Generator().manual_seed(0)).double()
    table = index.join(pd.DataFrame(numbers.numpy(), columns=columns))
    first = table.nlargest(512, "contribution")
    path = tmp_path / "section.html"
    measurement = Measurement(table, table.assign(seed=0))
    pages = {"atlas": atlas_page(subject, measurement)}
    for section in (SECTIONS["additivity"], SECTIONS["shares"], SECTIONS["ablation"]):
        pages[section.name] = show_section(section, subject, measurement).html
    for name, html in pages.items():
        path.write_text(html)
        document = Document(path)
        assert document.wrong == []
        assert "the first 512 of 5120 rows" in document.text
        targets = {value for tag, found in document.attributes for key, value in found.items() if key == "id"}
        assert name != "atlas" or {f"L{x}H{y}" for x, y in first[HEAD].itertuples(index=False)} <= targets
        drawn += path.stat().st_size
    by_subspace = index.merge(pd.DataFrame({"subspace": range(64), "frequency": 0.9, "wavelength": 7.0}), how="cross")
    for column in ("turn", "key_concentration", "distance", "semantic", "interaction"):
        by_subspace[column] = 0.01
    path.write_text(show_section(SECTIONS["subspaces"], subject, Measurement(by_subspace)).html)
    drawn += path.stat().st_size
    assert drawn > 2_000_000
    assert drawn + len(page("", ['<div class="plot"'], {}, [""])) < 7_000_000


@pytest.mark.usefixtures("unchecked")
def test_refusals_leave_no_file_and_no_trace(tmp_path: Path) -> None:
    model = tp.load_demo_model()
    before = state(model)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"sections": ["additivity", "heat"]}, r"sections must be some of where_or_what, .*ablation.* got .*'heat'"),
        ({"sections": []}, "sections must be some of"),
        ({"sections": ["heads", "heads"]}, "each once"),
        ({"title": b"x"}, "title must be text"),
        ({"text": TOKENS.float()}, "text cannot be used: tokens must be text or an integer tensor"),
    ]
    for changed, message in wrong:
        arguments = {"text": TOKENS, "path": tmp_path / "report.html", "progress": False, **changed}
        with pytest.raises(ValueError, match=message):
            tp.report(model, arguments.pop("text"), arguments.pop("path"), **arguments)
    assert list(tmp_path.iterdir()) == []
    assert state(model) == before


@pytest.mark.usefixtures("unchecked")
def test_a_path_that_cannot_be_written_is_refused_before_the_model_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the model ran")

    model = tp.load_demo_model()
    cases: list[tuple[Any, str]] = [
        (tmp_path, "got .*, which is a folder"),
        (tmp_path / "file" / "new" / "page.html", "file' is not a folder"),
        ("/sys/page.html", r"no file can be created in '/sys'"),
        ("/dev/null", "which is a device or a pipe"),
        (tmp_path / ("x" * 300), "name too long"),
        ("a\0b", "null byte"),
        (tmp_path / "page.pdf", r"ending in \.html, got .*page\.pdf"),
        (tmp_path / "page", r"ending in \.html, got"),
        (5, "got int"),
        (b"page.html", "got bytes"),
    ]
    for path, message in cases:
        with (
            model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", fail)]),
            pytest.raises(ValueError, match=message) as raised,
        ):
            tp.report(model, TOKENS, path, progress=False)
        assert str(raised.value).startswith("path must be ")
        assert len(str(raised.value)) < 400
    assert [x.name for x in tmp_path.iterdir()] == ["file"]
    assert tp.report(model, TOKENS, tmp_path / "a" / "b.html", sections=["additivity"], progress=False).is_file()


@pytest.mark.usefixtures("unchecked")
def test_an_error_on_the_way_leaves_what_was_there(tmp_path: Path) -> None:
    """A hook of the user's that fails in the middle, behind half of the sections."""
    model, path = tp.load_demo_model(), tmp_path / "report.html"
    path.write_text("an older report")
    calls = []

    def fail_later(x: torch.Tensor, hook: Any) -> None:
        calls.append(hook.name)
        if len(calls) > 12:
            raise KeyError("mine")

    before = state(model)
    hooks = model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", fail_later)])
    with hooks, pytest.raises(KeyError, match="mine"):
        tp.report(model, TOKENS, path, progress=False)
    assert len(calls) == 13
    assert path.read_text() == "an older report"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert state(model) == before
