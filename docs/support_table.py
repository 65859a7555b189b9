"""Which tool works with which architecture in which model class: tried, not typed.

Builds the tiny models of `tests/support/zoo.py`, uses every tool on each of them and checks what it did. A tool that
refuses is noted with its error; one that runs and does something else stops this script.

    .venv/bin/python docs/support_table.py       # writes what holds for the installed TransformerLens
    .venv-tl4/bin/python docs/support_table.py   # and for the other one; what is there of the rest stays

`tests/test_docs.py` does the same and compares.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which reads it once

import torch
from torch import Tensor

import tl_posdisent as tp

HERE = Path(__file__).parent
TABLE = HERE / "support_table.md"
sys.path.append(str(HERE.parent / "tests"))

from support import zoo  # noqa: E402

LENGTH = 12
OK = "✓"
CLASSES = {"H3": "hooked", "B3": "bridge", "B4": "bridge"}  # code in the table: kind in the zoo
Row = dict[str, str]
"""One architecture in one class: for every tool OK, or the error with which it refuses."""
Table = dict[tuple[str, str], Row]
"""By (architecture, class code)."""


class Wrong(AssertionError):
    """A tool ran and did not do what it says."""


# --- the trials: each passes if the tool did its work, and lets the tool's own ValueError out --------------------


def _fit(model: Any, tokens: Tensor) -> None:
    table = tp.additivity(model, tokens, progress=False)
    _expect(len(table) == len(tokens) * model.cfg.n_layers * model.cfg.n_heads, "a fit per text, layer and head")
    _expect(bool(table["r"].between(0, 1).all()), "r between 0 and 1")


def _capture(model: Any, tokens: Tensor) -> None:
    places, seen = torch.arange(tokens.shape[1]), []
    for layer in tp.capture(model, tokens):
        scores = layer.spec.score(layer.spec.rotated(layer.q, places), layer.spec.rotated(layer.k, places))
        inside = layer.spec.mask(tokens.shape[1])
        _expect(_same(scores[..., inside], layer.scores[..., inside]), "scores follow from q and k")
        seen.append(layer.layer)
    _expect(seen == list(range(model.cfg.n_layers)), "every layer")


def _controlled_distance(model: Any, tokens: Tensor) -> None:
    table = tp.controlled_distance(model, tokens, progress=False)
    for layer in tp.capture(model, tokens, layers=table["layer"].unique().tolist()):
        spec = replace(layer.spec, soft_cap=None)
        q, k = (x.flatten(0, 1)[None] for x in (layer.q, layer.k))  # every query with every key of both texts
        keys = spec.rotated(k, torch.zeros(k.shape[1]))
        each = [spec.score(spec.rotated(q, d * torch.ones(q.shape[1])), keys) for d in range(LENGTH)]
        variance = torch.stack(each).double().movedim(2, 0).flatten(1).var(1, correction=0)
        _expect(_same(torch.tensor(table.query(f"layer == {layer.layer}")["total"].to_list()), variance), "brute force")


def _swap_positions(model: Any, tokens: Tensor) -> None:
    plain, places = _logits(model, tokens, []), torch.arange(tokens.shape[1])
    _expect(_same(_logits(model, tokens, tp.swap_positions(model, places + 7)), plain), "a shift changes nothing")
    _expect(not _same(_logits(model, tokens, tp.swap_positions(model, places.flip(0))), plain), "the order matters")


def _dummy_distance(model: Any, tokens: Tensor) -> None:
    everywhere = torch.full((model.cfg.n_heads, LENGTH, LENGTH), 3.0)  # given per head, so scores are recomputed
    dummy = _logits(model, tokens, tp.dummy_distance(model, 3))
    _expect(_same(dummy, _logits(model, tokens, tp.remap_distance(model, everywhere))), "two ways to one distance")
    _expect(not _same(dummy, _logits(model, tokens, [])), "the distances matter")


def _remap_distance(model: Any, tokens: Tensor) -> None:
    plain, i = _logits(model, tokens, []), torch.arange(LENGTH)
    real = (i[:, None] - i).expand(model.cfg.n_heads, -1, -1)
    _expect(_same(_logits(model, tokens, tp.remap_distance(model, real)), plain), "real distances change nothing")
    ceiling = tp.remap_distance(model, lambda d: d.clamp(max=3))
    _expect(not _same(_logits(model, tokens, ceiling), plain), "a ceiling matters")


def _one_head(model: Any, tokens: Tensor) -> None:
    layer = next((spec.layer for spec in tp.read_layers(model) if spec.rotary is not None), 0)
    hooks = tp.dummy_distance(model, 3, layers=[layer], heads=[1])
    seen: list[Tensor] = []
    for some in ([], hooks):
        _logits(model, tokens, [*some, (f"blocks.{layer}.attn.hook_z", lambda z, hook: seen.append(z.clone()))])
    others = [h for h in range(model.cfg.n_heads) if h != 1]
    _expect(_same(seen[0][:, :, others], seen[1][:, :, others]), "the other heads stay")
    _expect(not _same(seen[0][:, :, 1], seen[1][:, :, 1]), "the head changes")


TRIALS: dict[str, Callable[[Any, Tensor], None]] = {
    "additivity": _fit,
    "capture": _capture,
    "controlled_distance": _controlled_distance,
    "swap_positions": _swap_positions,
    "dummy_distance": _dummy_distance,
    "remap_distance": _remap_distance,
    "some heads": _one_head,
}


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise Wrong(what)


def _logits(model: Any, tokens: Tensor, hooks: list[Any]) -> Tensor:
    """The logits under hooks, all of which must fire."""
    with torch.no_grad(), tp.applied(model, hooks) as m:
        return m(tokens)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 2e-4 * b.abs().max())


# --- rows -------------------------------------------------------------------------------------------------------


def try_tools(model: Any) -> Row:
    """Every tool on one model."""
    tokens = zoo.random_tokens(LENGTH)
    return {tool: _outcome(trial, model, tokens) for tool, trial in TRIALS.items()}


def _outcome(trial: Callable[[Any, Tensor], None], model: Any, tokens: Tensor) -> str:
    try:
        trial(model, tokens)
    except ValueError as error:
        return _shortened(str(error))
    return OK


def _shortened(error: str) -> str:
    """An error without what differs between tools and models, so that the same reason is given once."""
    words = error.splitlines()[0].split(" ")
    words = ["…" if w.rstrip(":").endswith(("ForCausalLM", "LMHeadModel")) or w in TRIALS else w for w in words]
    return " ".join(words)


def codes() -> list[str]:
    """The classes of the installed TransformerLens."""
    return [code for code in CLASSES if code.endswith(str(zoo.TL_MAJOR))]


def cases() -> list[tuple[str, str]]:
    """(architecture, class code) for all that the installed TransformerLens has."""
    names = {"hooked": zoo.HOOKED_NAMES, "bridge": zoo.BRIDGE_NAMES}
    return [(name, code) for code in codes() for name in names[CLASSES[code]]]


# --- the table as Markdown ------------------------------------------------------------------------------------------


def to_markdown(table: Table) -> str:
    """Architectures that behave alike in several classes share a row; refusals are numbered and quoted beneath."""
    reasons = list(dict.fromkeys(text for row in table.values() for text in row.values() if text != OK))
    lines = [
        "<!-- Written by docs/support_table.py. Do not edit. -->",
        "| architecture | Hugging Face class | where | "
        + " | ".join(f"`{t}`" if t.isidentifier() else t for t in TRIALS)
        + " |",
        "| --- " * (3 + len(TRIALS)) + "|",
    ]
    for name in zoo.NAMES:
        alike: dict[tuple[str, ...], list[str]] = {}
        for code in CLASSES:
            if (name, code) in table:
                alike.setdefault(tuple(table[name, code][tool] for tool in TRIALS), []).append(code)
        for row, where in alike.items():
            cells = [text if text == OK else str(reasons.index(text) + 1) for text in row]
            lines.append(f"| {' | '.join([name, zoo.ARCHITECTURES[name].model, ' '.join(where), *cells])} |")
    return "\n".join([*lines, "", *(f"{n}. `{text}`" for n, text in enumerate(reasons, 1)), ""])


def from_markdown(text: str) -> Table:
    """The inverse."""
    reasons = {line.split(".")[0]: line.split("`")[1] for line in text.splitlines() if line[:1].isdigit()}
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {
        (name, code): {tool: reasons.get(cell, cell) for tool, cell in zip(TRIALS, cells, strict=True)}
        for name, _, where, *cells in rows[2:]
        for code in where.split()
    }


def main() -> None:
    """Replace what the table says of the installed TransformerLens."""
    torch.set_num_threads(1)
    table = from_markdown(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    kept = {case: row for case, row in table.items() if case[1] not in codes()}
    new = {(name, code): try_tools(zoo.load(CLASSES[code], name)) for name, code in cases()}
    TABLE.write_text(to_markdown(kept | new), encoding="utf-8")
    print(f"{TABLE.name}: {len(new)} tried with TransformerLens {zoo.TL_MAJOR}, {len(kept)} kept")


if __name__ == "__main__":
    main()
