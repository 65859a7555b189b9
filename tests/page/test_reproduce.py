"""The call under "How to reproduce" makes the same page, whatever was asked for."""

from __future__ import annotations

import html
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.lanes import slow

import tl_posdisent as tp

TOKENS = tp.demo_tokens(length=33)[:, 1:].view(2, 16)
FEW: dict[str, Any] = {"layers": [4], "sections": ["additivity"], "control": 0}
ALL: dict[str, Any] = {
    "layers": range(3, 5),
    "heads": [(4, 2), "L3H0"],
    "sections": ("shares", "additivity"),
    "control": np.int64(2),
    "title": "A 'title' of \"two\" <b>lines</b>\n& more é \u2028\\",
    "seed": np.int64(5),
}
CASES = {
    "nothing more": (TOKENS, FEW),
    "a text": (tp.demo_text()[:200], FEW),
    "heads alone": (TOKENS, FEW | {"layers": None, "heads": "L4H2"}),
    "all": (TOKENS, ALL),
}
TWO_MODELS = (TOKENS, ALL | {"heads": "L4H2", "sections": ["where_or_what"], "after": True})


@pytest.mark.parametrize(("text", "options"), [*CASES.values(), *slow([TWO_MODELS])], ids=[*CASES, "two models"])
def test_the_call_makes_the_same_page(
    text: Any, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tp.load_demo_model()
    names = {"model": model, "text": text, "tokens": text, "after": next(tp.random_control(model))}
    asked = options | ({"after": names["after"]} if "after" in options else {})
    first = tp.report(model, text, tmp_path / "a" / "page.html", progress=False, **asked).read_bytes()
    (call,) = re.findall(r"<code>(.*?)</code>", first.decode(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(html.unescape(call), names)
    assert Path("page.html").read_bytes() == first


def test_every_argument_is_tried() -> None:
    """All that changes a page, beside the model and the text."""
    named = {*inspect.signature(tp.report).parameters} - {"model", "text", "path", "progress"}
    assert named == {*ALL, "after"}
