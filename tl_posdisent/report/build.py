"""``report``: measure a model on a text, and write what came out as one HTML file that admits nothing from outside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs
from torch import Tensor

from tl_posdisent.models.loading.random_init import USUAL_STD, Scale, initial_scale
from tl_posdisent.models.texts import Tokens
from tl_posdisent.report.atlas import atlas
from tl_posdisent.report.markup import escape
from tl_posdisent.report.measurements import SECTIONS, Copies, SectionName, measure, read_subject
from tl_posdisent.report.sections import TITLES, analysed, headline, reproduce, section, verdict
from tl_posdisent.utils.files import whole_file
from tl_posdisent.utils.validation import check_integer, check_seed, check_subset, head_label, shown
from tl_posdisent.viz.widgets.offline import library, policy


def report(
    model: Any,
    text: Tokens,
    path: str | PathLike[str],
    *,
    attention_mask: Tensor | None = None,
    layers: int | Iterable[int] | None = None,
    control: int = 1,
    std: Scale = "config",
    heads: int | str | Iterable[int | str | tuple[int, int]] | None = None,
    sections: Iterable[SectionName] | None = None,
    title: str | None = None,
    seed: int = 0,
    command: str | None = None,
    progress: bool = True,
) -> Path:
    """Measure which positions and tokens the heads of a model attend to in a text, and write one HTML file.

    The file has plotly figures and circuitsvis widgets, loads nothing from a network, and is the same, byte for byte,
    when made again. Its numbers are those of the experiments called alone; random initialisations read the same text.

    Texts of at most 1024 tokens (or the model's context) are read, at most 4096 tokens altogether; a string of more
    than 512 tokens is cut into equal stretches. Sections that cost a forward pass for each run read less, and of a
    large model measure a sample of the heads; each says what it read.

    Args:
        model: HookedTransformer, TransformerBridge or alike, or its ``read_model``; hooks on it act on all that is
            measured. It is read once.
        text: ids ``[batch, pos]``, or text if the model has a tokenizer: a string, or a list of strings of any lengths.
        path: the HTML file; its folder is made if need be.
        attention_mask: 1 at tokens, 0 at padding, for padded ids. Each text is run without its padding.
        layers: default all.
        control: number of random initialisations (seeds ``seed``, ``seed + 1`` …) for the baseline; 0 for none.
        std: standard deviation of their weights, one, as in ``random_control``.
        heads: integers (in each layer), pairs ``(layer, head)`` or labels ``"L3H4"``; default all.
        sections: which of ``"additivity"``, ``"distance"``, ``"shares"``, ``"subspaces"``, ``"labels"``,
            ``"heads"``, ``"perturbation"``, ``"ablation"``, ``"ladder"``; default all. Those that cannot be made give
            the reason.
        title: of the page; default names the model.
        seed: of random initialisations, perturbations and samples of heads.
        command: the command line to print under "How to reproduce"; default this call.
        progress: show one bar.

    Raises:
        ValueError: unusable arguments; a model for which none of these sections can be measured.

    Example:
        >>> import pathlib, tempfile
        >>> from tl_posdisent import demo_tokens, load_demo_model, report
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = report(
        ...         load_demo_model(), demo_tokens(length=64), pathlib.Path(folder, "report.html"),
        ...         sections=["additivity"], progress=False,
        ...     )
        ...     path.name, "Headline numbers" in path.read_text(encoding="utf-8")
        ('report.html', True)
    """
    subject = read_subject(model, text, attention_mask, layers, heads)
    chosen = check_subset("sections", SECTIONS if sections is None else sections, SECTIONS)
    wanted = [name for name in SECTIONS if name in chosen]
    if not wanted:
        raise ValueError(f"sections must be some of {', '.join(SECTIONS)}, got none")
    check_seed(seed)
    control = check_integer("control", control, 0)
    scale = initial_scale(subject.model, std) if control else USUAL_STD
    for name, value in (("title", title), ("command", command)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} must be text, got {shown(value)}")
    if not isinstance(path, (str, PathLike)) or not str(path) or Path(path).is_dir():
        raise ValueError(f"path must be that of the HTML file, got {shown(path)}")
    target = Path(path)
    found = measure(subject, wanted, copies=Copies(control, scale), seed=seed, progress=progress)
    found = {name: found[name] for name in wanted}
    options = {
        "layers": subject.asked,
        "control": control if control != 1 else None,
        "std": std if std != "config" else None,
        "heads": None if heads is None else [head_label(*pair) for pair in subject.pairs],
        "sections": None if sections is None else wanted,
        "seed": seed or None,
    }
    given = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
    given += "" if isinstance(text, list) or bool(subject.real.all()) else ", attention_mask=attention_mask"
    what = "text" if isinstance(text, (str, list)) else "tokens"
    call = command or f"from tl_posdisent import report\n\nreport(model, {what}, {target.name!r}{given})"
    measured = {name: section(name, subject, one) for name, one in found.items()}
    opening = atlas(found)
    parts = [
        opening,
        verdict(found),
        analysed(subject),
        headline(subject, found),
        *(content for content, _ in measured.values()),
        reproduce(subject, call, seed, Copies(control, scale)),
    ]
    contents = {"atlas": "Atlas"} if opening else {}
    contents |= {"verdict": "Verdict", "analysed": "What was analysed", "headline": "Headline numbers"}
    contents |= {name: TITLES[name] for name in wanted} | {"reproduce": "How to reproduce"}
    scripts = [script for _, some in measured.values() for script in some]
    name = f"Position and content in {subject.name()}" if title is None else title
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as file:
        file.write(page(name, parts, contents, scripts).encode("utf-8"))
    return target


# Light, dark, on a phone and on paper. Figures and widgets are on white cards.
STYLE = """
:root { color-scheme: light; --bg: #fff; --fg: #1b1f24; --muted: #55606c; --line: #d5dae0; --soft: #f3f5f8;
  --link: #0b57a4; --warn: #8a3b00 }
@media screen and (prefers-color-scheme: dark) {
  :root { color-scheme: dark; --bg: #14181d; --fg: #e4e8ed; --muted: #a5afba; --line: #39424c; --soft: #1d232a;
    --link: #7db8f0; --warn: #f0a868 } }
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100% }
body { margin: 0; background: var(--bg); color: var(--fg); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  "Liberation Sans", sans-serif }
main, header, footer { max-width: 1040px; margin: 0 auto; padding: 0 16px; overflow-wrap: anywhere }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 1.6rem 0 .6rem }
h2 { font-size: 1.3rem; margin: 0 0 .5rem }
h3 { font-size: 1.05rem; margin: 1.4rem 0 .3rem }
section { padding: 1.3rem 0; border-top: 1px solid var(--line) }
p { margin: .5rem 0 .8rem; max-width: 46rem }
a { color: var(--link) }
nav ul { list-style: none; padding: 0; margin: .4rem 0 1.2rem; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem }
.refused { border-left: 4px solid var(--warn); background: var(--soft); padding: .6rem .9rem }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .3rem 1rem; margin: .6rem 0 }
dt { color: var(--muted) }
dd { margin: 0; white-space: pre-wrap }
figure { margin: .8rem 0; min-width: 0 }
figcaption { color: var(--muted); font-size: .88rem; margin-top: .2rem }
.grid { display: grid; gap: 0 28px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)) }
.plot { background: #fff; overflow: hidden }
.plot, .widget { border: 1px solid var(--line); border-radius: 6px }
.widget { overflow: hidden; margin: .5rem 0 1rem }
.widget figcaption { color: #222; font-size: 14px }
.narrow { max-width: 720px }
.scroll { overflow-x: auto; max-width: 100% }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; margin: .4rem 0 .8rem }
caption { text-align: left; color: var(--muted); padding: .2rem 0 }
th, td { padding: .22rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top;
  overflow-wrap: normal }
thead th { color: var(--muted); font-weight: 600; vertical-align: bottom }
#atlas .scroll:has(table) { max-height: 26rem; overflow-y: auto }
#atlas thead th { position: sticky; top: 0; background: var(--bg) }
th[aria-sort="ascending"]::after { content: " ▲" }
th[aria-sort="descending"]::after { content: " ▼" }
#table-headline th, #table-headline td { text-align: left; min-width: 5.5rem }
#table-headline tbody th { font-weight: 400 }
#table-headline td:nth-of-type(1) { font-weight: 600 }
details { margin: .6rem 0 }
summary { cursor: pointer; color: var(--link) }
pre { background: var(--soft); border: 1px solid var(--line); padding: .7rem .9rem; overflow-x: auto;
  font-size: .85rem }
tr:has(:target) > * { background: var(--soft); outline: 2px solid var(--link) }
footer { color: var(--muted); font-size: .85rem; padding-bottom: 2rem }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px }
@media (max-width: 480px) { dl { grid-template-columns: 1fr; gap: 0 } dd { margin-bottom: .5rem }
  th, td { padding: .2rem .45rem } h1 { font-size: 1.4rem } }
@media print { nav, summary { display: none } body { font-size: 11pt } main, header, footer { max-width: none }
  details::details-content { content-visibility: visible; display: block } .plot { print-color-adjust: exact }
  figure, tr, .widget { break-inside: avoid } h2, h3 { break-after: avoid }
  .scroll, #atlas .scroll:has(table) { overflow: visible; max-height: none } }
"""


_WITHOUT_SCRIPTS = "<noscript><p>The figures need JavaScript; the tables do not.</p></noscript>"
# A finger scrolls the page and does not zoom; paper is narrower than most windows.
_DRAW = """
for (const plot of document.querySelectorAll(".plot")) {
  const { data, layout } = JSON.parse(plot.nextElementSibling.textContent);
  layout.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
  const modeBarButtons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
  Plotly.newPlot(plot, data, layout, { responsive: true, displaylogo: false, modeBarButtons });
  if (layout.meta === "linked")
    plot.on("plotly_click", ({ points: [{ x, y }] }) => { location.hash = `L${y}H${x}`; });
  addEventListener("beforeprint", () => Plotly.relayout(plot, { width: Math.min(680, plot.offsetWidth) }));
  addEventListener("afterprint", () => Plotly.relayout(plot, { width: null, autosize: true }));
}
// A click on a column's title sorts: numbers from the largest, heads and words from the first, what is missing last.
const value = (text) => Number(text.replace("−", "-"));
const compare = (a, b) =>
  isNaN(value(a)) || isNaN(value(b)) ? a.localeCompare(b, "en", { numeric: true }) : value(a) - value(b);
for (const title of document.querySelectorAll("#table-atlas thead th")) {
  const sort = () => {
    const table = title.closest("table"), rows = [...table.tBodies[0].rows];
    const text = (row) => row.cells[title.cellIndex].textContent, missing = (row) => text(row) === "–";
    const numbers = rows.every((row) => missing(row) || !isNaN(value(text(row)))), before = title.ariaSort;
    const down = before ? before === "ascending" : numbers;
    table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    title.ariaSort = down ? "descending" : "ascending";
    rows.sort((a, b) => missing(a) - missing(b) || (down ? -1 : 1) * compare(text(a), text(b)));
    table.tBodies[0].append(...rows);
  };
  title.tabIndex = 0;
  title.style.cursor = "pointer";
  title.addEventListener("click", sort);
  title.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
}
"""


def page(title: str, sections: Sequence[str], contents: Mapping[str, str], widgets: Sequence[str]) -> str:
    """The whole HTML document: sections in HTML, titles in ``contents`` by id, scripts of the widgets."""
    body = "".join(sections)
    scripts = [get_plotlyjs(), _DRAW] if '<div class="plot"' in body else []
    scripts += [library(), *widgets] if widgets else []
    links = "".join(f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text in contents.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(scripts)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n"
        f'<body><header><h1>{escape(title)}</h1><nav aria-label="Sections"><ul>{links}</ul></nav>'
        f"{_WITHOUT_SCRIPTS if scripts else ''}</header>\n"
        f"<main>{body}</main>\n<footer>Made by tl_posdisent. This file needs no network.</footer>"
        + "".join(f"\n<script>{script}</script>" for script in scripts)
        + "\n</body></html>\n"
    )
