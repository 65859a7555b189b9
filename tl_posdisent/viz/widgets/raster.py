"""Score matrices too large for charts, as images: a pixel for each cell, in the chart's colours.

The PNG is written here and not by Pillow, since the page's script reads numbers back from its one unfiltered chunk.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float64, UInt8
from torch import Tensor

from tl_posdisent.viz.palette import diverging, rgb

from .layout import Choice, Layout, matrices_beside
from .offline import Widget

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
  const place = (pixel) => `${data.positions[pixel]} ${data.tokens[pixel]}`;
  const draw = (n) => {
    stage.replaceChildren();
    data.choices[n].forEach((image, p) => {
      const figure = add(stage, "figure", `flex:1 1 240px;margin:0;min-width:0;max-width:${data.width}px`);
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
        const side = last + 1, box = picture.getBoundingClientRect();
        const at = (x, size) => Math.max(0, Math.min(side - 1, Math.floor(((x - 1) / (size - 2)) * side)));
        const row = at(event.clientY - box.y, box.height), column = at(event.clientX - box.x, box.width);
        const level = (await known)[row * (side + 1) + 1 + column];
        const end = !data.beyond ? "" : level === 255 ? "at least " : level === 1 ? "at most " : "";
        const number = Number((((level - 128) / 127) * data.scale).toPrecision(3));
        const value = level === 0 ? "after the query" : end + number;
        readout.textContent = `query ${place(row)}, key ${place(column)}: ${value}`;
      });
      picture.addEventListener("pointerleave", () => { readout.textContent = " "; });
    });
  };
  if (select) select.addEventListener("change", () => draw(select.selectedIndex));
  draw(select ? select.selectedIndex : 0);
}"""


def beside(matrices: Mapping[str, Float64[Tensor, "head query key"]], choice: Choice, layout: Layout) -> Widget:
    """Matrices of one head beside each other, as images or as charts; a list of heads to choose from."""
    if not choice.options.raster:
        return matrices_beside(matrices, choice.names, choice.tokens, layout)
    side = len(choice.positions)
    data = {
        "choices": [
            [
                {
                    "src": png(levels(x[n], layout.scale, causal=layout.causal)),
                    "alt": f"{caption or 'Matrix'} of head {name}, {side} queries (rows) × {side} keys (columns)",
                }
                for caption, x in matrices.items()
            ]
            for n, name in enumerate(choice.names)
        ],
        "captions": list(matrices),
        "tokens": choice.tokens,
        "positions": choice.positions,
        "scale": layout.scale,
        "beyond": layout.beyond(matrices.values()),
        "width": 100 + max(360, min(side, 720 if len(matrices) == 1 else 400)),  # several stand in rows
    }
    note = f"{layout.note} Point at a pixel for its number, to 1/{_STEPS} of the scale.".strip()
    style = "display:flex;flex-wrap:wrap;gap:16px"
    return replace(layout, note=note).widget({"": choice.names}, matrices.values(), _DRAW, data, style)


def levels(x: Float64[Tensor, "query key"], scale: float, *, causal: bool) -> UInt8[Tensor, "query key"]:
    """Numbers of the palette; grey after the query."""
    steps = (x / scale).clamp(-1, 1).mul(_STEPS).round() + _ZERO
    return (steps.tril() if causal else steps).to(torch.uint8).cpu()


def png(x: UInt8[Tensor, "row column"]) -> str:
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
    return [(200, 200, 200), *(rgb(diverging(n / _STEPS)) for n in range(-_STEPS, _STEPS + 1))]
