"""A report is whole or not there, runs nothing that a text says, and stays small where a model is large."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from markupsafe import Markup
from support.documents import Document
from support.untouched import state

import tl_posdisent as tp
from tl_posdisent.page.atlas import atlas, atlas_table, places_of
from tl_posdisent.page.build import check_sections, read_settings, write_report
from tl_posdisent.page.contract import Panel
from tl_posdisent.page.document import Part, page
from tl_posdisent.page.panels import Panels
from tl_posdisent.page.section import HEAD, Measured, render_section
from tl_posdisent.page.sections import SECTIONS
from tl_posdisent.page.subject import Subject, read_subject

TOKENS = tp.demo_tokens(length=97)[:, 1:].view(2, 48)
NEEDED = ["contribution", *(f"{name}_part" for name in ("where", "what", "neither")), "joint"]
NEEDED += ["kept_distance", "kept_content", "kept_uniform", "gate"]
NEEDED += [f"{name}_se" for name in NEEDED]


def test_hostile_words_are_text(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)><!-- &lt;b&gt; \u202e"
    model = tp.load_demo_model()
    path = tmp_path / "report.html"
    subject = read_subject(model, hostile * 2, layers=[2])
    settings = read_settings(subject, 0, 0, progress=False)
    write_report(path, subject, check_sections(["additivity"]), settings, hostile, hostile)
    document = Document(path)
    assert document.wrong == []
    assert set(document.hashes) == document.allowed
    assert len(document.scripts) == 4  # plotly, two of ours, and what runs them
    assert not [tag for tag, _ in document.attributes if tag == "img"]
    assert not [name for _, attributes in document.attributes for name in attributes if name.startswith("on")]
    assert "alert(1)" in document.text
    for script in re.findall(r"<script[^>]*>(.*?)</script>", document.source, re.DOTALL):
        assert "<script" not in script
        assert "<!--" not in script


@pytest.mark.slow
def test_a_large_model_keeps_the_file_small(tmp_path: Path) -> None:
    """80 layers of 64 heads; what is random is their numbers, not their tables."""
    subject = read_subject(tp.load_demo_model(), TOKENS)
    index = pd.MultiIndex.from_product([range(80), range(64)], names=HEAD).to_frame(index=False)
    columns = ["r", "share_distance", "share_key", *NEEDED, "r_two_axis", "r_three_axis", *tp.rope.COMPONENTS, "effect"]
    numbers = torch.rand(len(index), len(columns), generator=torch.Generator().manual_seed(0)).double()
    table = index.join(pd.DataFrame(numbers.numpy(), columns=columns))
    profiles = index.merge(pd.DataFrame({"distance": range(48), "value": 0.5, "cells": 1}), how="cross")
    needed = table[[*HEAD, *NEEDED]].assign(verdict="what", open="", measured="estimated")
    needed.attrs["answer"] = "Of what 5120 heads contribute, half depends on where keys are."
    measured = {
        "where_or_what": Measured(subject, needed),
        "distance": Measured(subject, profiles),
        **{name: Measured(subject, table, [table.assign(seed=0)]) for name in ("additivity", "shares", "ablation")},
    }
    parts = [render_section(name, SECTIONS[name], one, subject) for name, one in measured.items()]  # type: ignore[arg-type, index]
    parts.append(atlas_of(subject, measured))
    first = table.nlargest(512, "contribution")
    (tmp_path / "atlas.html").write_text(parts[-1])
    document = Document(tmp_path / "atlas.html")
    assert document.wrong == []
    assert "the first 512 of 5120 rows" in document.text
    targets = {value for _, found in document.attributes for key, value in found.items() if key == "id"}
    assert {f"L{x}H{y}" for x, y in first[HEAD].itertuples(index=False)} <= targets
    drawn = sum(len(part.encode()) for part in parts)
    assert drawn > 1_500_000
    assert drawn + len(page("", [Part("a", "", Markup('<div class="plot"'))])) < 7_000_000


def atlas_of(subject: Subject, measured: dict[str, Measured]) -> str:
    """The atlas, with a panel for each head that is listed: 48 scores of 48 keys."""
    heads = atlas_table([*measured["distance"].trained.groupby(HEAD).groups], measured)  # type: ignore[union-attr]
    attention = {name: [0.5] * 8 for name in ("unmodified", "every distance 5")}
    says = ["A head is described in some eighty characters of text, three or four times."] * 4
    one: Panel = {"says": says, "scores": (0.0, 1.0, "A" * 1568), "attention": attention, "profile": [0.5] * 6}
    panels = {f"L{layer}H{head}": one for layer, head in places_of(heads.head(512))}
    return atlas(subject, heads, Panels(panels, [*range(8)], [*range(6)], True, {}))


@pytest.mark.usefixtures("unchecked")
def test_refusals_leave_no_file_and_no_trace(tmp_path: Path) -> None:
    model = tp.load_demo_model()
    before = state(model)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"sections": ["additivity", "heat"]}, r"sections must be some of where_or_what, .*ablation.* got .*'heat'"),
        ({"sections": []}, "sections must be some of"),
        ({"sections": ["labels", "labels"]}, "each once"),
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
    options: Any = {"sections": ["additivity"], "layers": [0], "control": 0, "progress": False}
    assert tp.report(model, TOKENS[:, :8], tmp_path / "a" / "b.html", **options).is_file()


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
