"""A parsed HTML file: tables, scripts, content policy, and the addresses that it would fetch."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

VOID = {"meta", "br", "img", "hr", "input", "link"}


class Document(HTMLParser):
    """A parsed page. ``wrong`` lists tags that do not close in the order in which they opened."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = path.read_text(encoding="utf-8")
        self.tables: dict[str, list[list[str]]] = {}
        self.scripts: list[str] = []
        self.figures: list[dict[str, Any]] = []  # those whose data are beside them
        self.captions: list[str] = []  # of the figures
        self.data: dict[str, Any] = {}  # other data, by id
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.wrong: list[str] = []
        self._open: list[str] = []
        self._rows: list[list[str]] = []
        self.feed(self.source)
        self.close()
        self.wrong += [f"<{tag}> is never closed" for tag in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self._rows = self.tables[str(dict(attrs)["id"]).removeprefix("table-")] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        elif tag == "script":
            self._is_packed, waiting = (dict(attrs).get("class") == name for name in ("packed", "waiting"))
            self._is_data = "type" in dict(attrs) and not (self._is_packed or waiting)
            self._name = dict(attrs).get("id")
            if not self._is_data:
                self.scripts.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.wrong.append(f"</{tag}> closes what is not open")

    def handle_data(self, data: str) -> None:
        if "script" in self._open and self._is_data:
            found = json.loads(data, object_hook=_decoded)
            if self._name is None:
                self.figures.append(found)
                self.captions += [str(a["aria-label"]) for _, a in self.attributes if a.get("class") == "plot"][-1:]
            else:
                self.data[self._name] = found
        elif "script" in self._open:
            self.scripts[-1] += gzip.decompress(base64.b64decode(data)).decode() if self._is_packed else data
        elif "style" not in self._open:
            self.text += data
        if {"td", "th"} & set(self._open):
            self._rows[-1][-1] += data

    @property
    def policy(self) -> str:
        """The Content-Security-Policy."""
        (found,) = [a for tag, a in self.attributes if a.get("http-equiv") == "Content-Security-Policy"]
        return str(found["content"])

    @property
    def allowed(self) -> set[str]:
        """Return the hashes of the scripts that the policy allows."""
        return set(re.findall(r"'sha256-([^']+)'", self.policy))

    @property
    def hashes(self) -> list[str]:
        """Return the hashes of the scripts in the page."""
        return [base64.b64encode(hashlib.sha256(x.encode()).digest()).decode() for x in self.scripts]

    def drawn(self, caption: str) -> list[dict[str, Any]]:
        """Return the traces of the figures whose caption contains this text."""
        found = [figure for label, figure in zip(self.captions, self.figures, strict=True) if caption in label]
        return [trace for figure in found for trace in figure["data"]]

    def rows(self, name: str) -> list[dict[str, str]]:
        """Return a table as dictionaries from column title to cell."""
        titles, *rows = self.tables[name]
        return [dict(zip(titles, row, strict=True)) for row in rows]


def _decoded(found: dict[str, Any]) -> Any:
    """Arrays, which plotly writes as base64."""
    if "bdata" not in found:
        return found
    array = np.frombuffer(base64.b64decode(found["bdata"]), found["dtype"])
    return array.reshape([int(n) for n in found["shape"].split(",")]) if "shape" in found else array


def as_number(cell: str) -> float:
    """What a cell says."""
    return float("nan") if cell == "–" else float(cell.replace("−", "-"))


def decoded(scores: list[Any], n: int, *, causal: bool) -> np.ndarray:
    """Return the score map of a panel, as the page's script reads it."""
    low, high, text = scores
    found = np.frombuffer(base64.b64decode(text), np.uint8)
    cells = np.full((n, n), 255.0)
    cells[np.tril(np.ones_like(cells)) > 0 if causal else cells > 0] = found
    return np.where(cells == 255, np.nan, low + cells / 254 * (high - low))
