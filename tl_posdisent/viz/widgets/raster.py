"""Score matrices too large for charts, as images: a pixel for each cell, in the chart's colours.

The PNG is written here and not by Pillow, since the page's script reads numbers back from its one unfiltered chunk.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from einops import reduce
from jaxtyping import Float64, UInt8
from torch import Tensor

from tl_posdisent.viz.palette import diverging

from .layout import Layout, matrices_beside, menu
from .offline import Widget
from .selection import Choice

SIDE = 1024
"""Pixels of an image's side at most: beyond, a pixel is the mean of a square of cells."""

Levels = UInt8[Tensor, "row column"]
_GREY, _ZERO, _STEPS = 0, 128, 127  # palette: grey, then -127 … 127 steps of scale / 127

_DRAW = """(circuitsvis, root) => {
  const data = %s;
  const stage = root.querySelector("[data-stage]"), select = root.querySelector("select");
  const add = (parent, tag, style, text) => {
    const element = parent.appendChild(document.createElement(tag));
    element.style.cssText = style;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const last = data.positions.length - 1;
  const ticks = [0, 1, 2, 3, 4].map((n) => data.positions[Math.floor((last * n) / 4)]);
  // The image's own bytes say what its pixels are worth: the palette is the scale, no row is filtered.
  const levels = async (uri) => {
    const bytes = Uint8Array.from(atob(uri.split(",")[1]), (c) => c.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    for (let at = 8; at < bytes.length; at += 12 + view.getUint32(at))
      if (String.fromCharCode(...bytes.slice(at + 4, at + 8)) === "IDAT") {
        const packed = new Blob([bytes.slice(at + 8, at + 8 + view.getUint32(at))]);
        const plain = packed.stream().pipeThrough(new DecompressionStream("deflate"));
        return new Uint8Array(await new Response(plain).arrayBuffer());
      }
  };
  const place = (pixel) => {
    const from = pixel * data.factor, to = Math.min(from + data.factor - 1, last);
    const first = data.positions[from];
    return from === to ? `${first} ${data.tokens[from] || ""}`.trim() : `${first}–${data.positions[to]}`;
  };
  const draw = (n) => {
    stage.replaceChildren();
    data.choices[n].forEach((image, p) => {
      const figure = add(stage, "figure", `margin:0;min-width:0;max-width:${data.width}px`);
      if (data.captions[p])
        add(figure, "figcaption", "font-weight:600;text-align:center;padding:4px 0", data.captions[p]);
      const columns3 = "grid-template-columns:auto auto minmax(0,1fr)";
      const grid = add(figure, "div", `display:grid;font-size:12px;gap:2px 4px;${columns3}`);
      add(grid, "div", "writing-mode:vertical-rl;transform:rotate(180deg);text-align:center", "query position");
      const between = "display:flex;justify-content:space-between;";
      const rows = add(grid, "div", between + "flex-direction:column;text-align:right");
      const look = "width:100%%;display:block;border:1px solid #bbb;box-sizing:border-box;cursor:crosshair;";
      const picture = add(grid, "img", look + "image-rendering:pixelated");
      picture.alt = image.alt;
      picture.src = image.src;
      add(grid, "div", ""), add(grid, "div", "");
      const columns = add(grid, "div", between);
      ticks.forEach((tick) => { add(rows, "span", "", tick); add(columns, "span", "", tick); });
      add(grid, "div", ""), add(grid, "div", ""), add(grid, "div", "text-align:center", "key position");
      const readout = add(figure, "div", "font-size:13px;min-height:1.4em;overflow-wrap:anywhere", " ");
      readout.dataset.readout = "";
      let known;
      picture.addEventListener("pointermove", async (event) => {
        known = known || levels(image.src);
        const side = Math.ceil((last + 1) / data.factor), box = picture.getBoundingClientRect();
        const at = (x, size) => Math.max(0, Math.min(side - 1, Math.floor(((x - 1) / (size - 2)) * side)));
        const row = at(event.clientY - box.y, box.height), column = at(event.clientX - box.x, box.width);
        const level = (await known)[row * (side + 1) + 1 + column];
        const value = level === 0 ? "after the query" : Number((((level - 128) / 127) * data.scale).toPrecision(3));
        readout.textContent = `query ${place(row)}, key ${place(column)}: ${value}`;
      });
      picture.addEventListener("pointerleave", () => { readout.textContent = " "; });
    });
  };
  if (select) select.addEventListener("change", () => draw(select.selectedIndex));
  draw(select ? select.selectedIndex : 0);
}"""


def beside(matrices: Mapping[str, Float64[Tensor, "head query key"]], choice: Choice, layout: Layout) -> Widget:
    """Matrices of one head beside each other, as images or as charts."""
    if choice.options.raster:
        return images_beside(matrices, choice, layout)
    return matrices_beside(matrices, choice.names, choice.tokens, layout)


def images_beside(matrices: Mapping[str, Float64[Tensor, "head query key"]], choice: Choice, layout: Layout) -> Widget:
    """Matrices of one head beside each other, as images; a list of heads to choose from."""
    positions, scale = choice.positions, layout.scale
    factor = math.ceil(len(positions) / SIDE)

    def image(caption: str, n: int) -> dict[str, str]:
        x = matrices[caption][n]
        pixels = levels(x, scale, factor=factor, causal=layout.causal)
        return {"src": png(pixels), "alt": _alt(caption, choice.names[n], x, positions)}

    side = math.ceil(len(positions) / factor)
    data = {
        "choices": [[image(caption, n) for caption in matrices] for n in range(len(choice.heads))],
        "captions": list(matrices),
        "tokens": choice.tokens if factor == 1 else [],
        "positions": positions,
        "factor": factor,
        "scale": scale,
        "width": 100 + max(360, min(side, 720 if len(matrices) == 1 else 400)),  # several stand in rows
    }
    means = f" A pixel is the mean of {factor}×{factor} cells." if factor > 1 else ""
    note = f"{layout.note}{means} Point at a pixel for its number, to 1/{_STEPS} of the scale.".strip()
    stage = '<div data-stage="" style="display:flex;flex-wrap:wrap;gap:16px"></div>'
    body = replace(layout, note=note).header(matrices.values()) + menu({"": choice.names}) + stage
    return layout.widget(body, _DRAW, data)


def levels(x: Float64[Tensor, "query key"], scale: float, *, factor: int = 1, causal: bool) -> Levels:
    """Numbers of the palette: means of squares of ``factor`` cells, 0 where all of these lie after the query."""
    inside = torch.ones_like(x, dtype=torch.bool)
    inside = inside.tril() if causal else inside
    x = torch.where(inside, x, 0.0)
    total, count = (_block_sums(y, factor) for y in (x, inside.double()))
    steps = (total / count.clamp(min=1) / scale).clamp(-1, 1) * _STEPS
    found: Tensor = torch.where(count > 0, steps.round() + _ZERO, float(_GREY)).to(torch.uint8).cpu()
    return found


def _block_sums(x: Float64[Tensor, "query key"], factor: int) -> Float64[Tensor, "row column"]:
    rows, columns = (-n % factor for n in x.shape)
    padded = torch.nn.functional.pad(x, (0, columns, 0, rows))
    sums: Tensor = reduce(padded, "(row a) (column b) -> row column", "sum", a=factor, b=factor)
    return sums


def png(x: Levels) -> str:
    """A data URI of an image of these palette numbers."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    height, width = x.shape
    rows = torch.nn.functional.pad(x, (1, 0))  # before each row its filter, none
    content = b"\x89PNG\r\n\x1a\n"
    content += chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
    content += chunk(b"PLTE", b"".join(bytes(colour) for colour in palette()))
    content += chunk(b"IDAT", zlib.compress(rows.numpy().tobytes(), 6)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(content).decode("ascii")


def palette() -> list[tuple[int, ...]]:
    """Grey, then the colours of -1 … 1 in 255 steps."""
    return [(200, 200, 200), *(tuple(bytes.fromhex(diverging(n / _STEPS)[1:])) for n in range(-_STEPS, _STEPS + 1))]


def _alt(caption: str, name: str, x: Float64[Tensor, "query key"], positions: Sequence[int]) -> str:
    """What an image shows, in words: where its extremes are."""
    n = len(positions)
    extremes = ((word, int(at)) for word, at in (("lowest", x.argmin()), ("highest", x.argmax())))
    where = (
        f"{word} {x.flatten()[at].item():.3g} at query {positions[at // n]}, key {positions[at % n]}"
        for word, at in extremes
    )
    return f"{caption or 'Matrix'} of head {name}, {n} queries (rows) × {n} keys (columns): {', '.join(where)}"
