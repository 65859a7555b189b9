"""The pages of the API name everything, and names in text become links to them."""

from __future__ import annotations

import importlib
import re
import sys

from support.pages import ROOT
from support.public import public_names

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import api_pages  # noqa: E402


def test_api_pages_have_every_public_name_once() -> None:
    pages = [path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.md"))]
    expanded = "\n".join(map(api_pages.expanded, pages))
    entries = re.findall(r"^\.\. auto(?:function|class|data):: (tl_posdisent\.[\w.]+)$", expanded, re.MULTILINE)
    assert sorted(path.rpartition(".")[2] for path in entries) == sorted(public_names())


def test_names_are_documented_where_they_are_imported_from() -> None:
    for path, module in api_pages.public_names().items():
        namespace, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(namespace), name)
        assert value is getattr(importlib.import_module(f"tl_posdisent.{module}"), name)


def test_names_in_text_become_links_to_their_entries() -> None:
    text = (DOCS / "patching.md").read_text(encoding="utf-8")
    site = api_pages.expanded(text)
    for name in ("position_patching", "hooks.patch_vectors"):
        assert f"`{name}`" in text
        assert f"{{py:obj}}`{name} <tl_posdisent.{name}>`" in site
    code = re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)
    assert re.findall(r"^```.*?^```$", site, re.MULTILINE | re.DOTALL) == code
