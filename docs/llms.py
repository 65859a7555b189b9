"""``llms.txt``, an index for programs: made of the pages, the stubs and the docstrings when the site is built."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

import api_pages  # noqa: E402

_LONGEST_DEFAULT = 12  # characters; longer ones are shown as …


def call_of(path: str) -> str:
    """A name as it is called, with defaults but without annotations."""
    namespace, _, name = path.rpartition(".")
    value: Any = getattr(importlib.import_module(namespace), name)
    shown = path.removeprefix("tl_posdisent.")
    if not inspect.isfunction(value):
        return shown
    parts, keywords_only = [], False
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords_only:
            parts.append("*")
            keywords_only = True
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            keywords_only = keywords_only or parameter.kind is parameter.VAR_POSITIONAL
            parts.append(("*" if parameter.kind is parameter.VAR_POSITIONAL else "**") + parameter.name)
            continue
        default = "" if parameter.default is parameter.empty else f"={_short(parameter.default)}"
        parts.append(parameter.name + default)
    return f"{shown}({', '.join(parts)})"


def _short(default: Any) -> str:
    text = f'"{default}"' if isinstance(default, str) else getattr(default, "__name__", repr(default))
    return text if len(text) <= _LONGEST_DEFAULT or callable(default) else "…"


def _summary(path: str) -> str:
    return api_pages.summary(path).replace("``", "`")


def subjects() -> dict[str, tuple[Path, list[str]]]:
    """The API pages by title, and their names."""
    found = {}
    for path in sorted((DOCS / "api").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        modules = re.findall(r"<!-- api: ([\w. ]+) -->", text)
        found[text.splitlines()[0].removeprefix("# ")] = path, api_pages.names_of(" ".join(modules))
    return found


def pages() -> list[tuple[str, str, str]]:
    """Title, path and first sentence of each page of the documentation but those of the API."""
    found = []
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        prose = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL).lstrip()
        prose = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", prose)  # the words of links
        prose = re.sub(r"\{[\w:]+\}`~?(?:\w+\.)*(\w+)`", r"`\1`", prose)  # the names of roles
        paragraphs = [" ".join(each.split()) for each in prose.split("\n\n")[1:]]
        plain = next((each for each in paragraphs if each[:1].isalpha() or each[:1] == "`"), "")
        sentence = re.match(r".+?[.?:](?=\s|$)", plain)
        found.append((prose.splitlines()[0][2:], path.name, sentence[0] if sentence else plain))
    return found


def llms() -> str:
    """An index of the documentation for programs that read it, in the form of llmstxt.org."""
    about = (
        "> Position and content in attention scores of transformers: additive fits of scores, interventions on the "
        "positions that RoPE receives, ablation and patching of heads, random-weights baselines. A plugin for "
        "TransformerLens: functions take a HookedTransformer or a TransformerBridge and return pandas tables or hooks."
    )
    listed = [f"- [{title}]({path}): {sentence}".rstrip(": ") for title, path, sentence in pages()]
    parts = ["# tl_posdisent", about, "## Pages", "\n".join(listed)]
    for title, (path, names) in subjects().items():
        lines = [f"- `{call_of(name)}`: {_summary(name)}" for name in names]
        parts += [f"## {title}", f"[Details](api/{path.name})", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def write(app: Any, exception: Exception | None) -> None:
    """For Sphinx's ``build-finished``."""
    if exception is None:
        Path(app.outdir, "llms.txt").write_text(llms(), encoding="utf-8")
