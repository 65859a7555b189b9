"""Sphinx configuration: `make docs` builds the site into docs/_build/html, and any warning is an error."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

sys.path.insert(0, os.path.dirname(__file__))

import api_pages
import llms

from tl_posdisent import __version__

project = "tl_posdisent"
author = "the tl_posdisent authors"
project_copyright = "2026, the tl_posdisent authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "tl_posdisent"
html_static_path = ["_static"]
html_css_files = ["tables.css"]

nitpicky = True  # a page that names a function which is gone is a warning
nitpick_ignore_regex = [  # types in signatures, and what other packages document
    ("py:class", r".*"),
    ("py:.*", r"(?!tl_posdisent\.).*"),
]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_class_signature = "separated"  # the fields of a result are explained under Attributes
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True  # a function as a default has a name, not an address
python_maximum_signature_line_length = 90
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_attr_annotations = False  # shapes are in the text; as types they are no reStructuredText


def drop_stubs(app: Any, name: str, content: list[str]) -> None:
    """Leave out what a page says where it is shown without the parts that are inserted here."""
    content[0] = re.sub(r"<!-- on a code host -->.*?<!-- end -->\n*", "", content[0], flags=re.DOTALL)


def as_restructured_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written to be read in an editor; two of their habits mean something else to Sphinx.

    ``|x|`` is a size and no substitution, and ``a, b: text`` under Attributes is about both, where Sphinx would take
    the first for the type of the second.
    """
    paragraphs = "\n".join(lines).split("\n\n")
    for n, paragraph in enumerate(paragraphs):
        if ">>>" not in paragraph:
            parts = re.split("(``.*?``)", paragraph, flags=re.DOTALL)  # every other one is code
            parts[::2] = [part.replace("|", "\\|") for part in parts[::2]]
            paragraphs[n] = "".join(parts)
    lines[:] = "\n\n".join(paragraphs).split("\n")
    if what == "class":
        lines[:] = [re.sub(r"^ +\w+(, \w+)+(?=: )", lambda m: m[0].replace(", ", ","), line) for line in lines]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)  # before napoleon
    app.connect("source-read", drop_stubs)
    app.connect("source-read", api_pages.insert)
    app.connect("build-finished", llms.write)
