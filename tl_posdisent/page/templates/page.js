// A link to a closed section opens it, and so does paper.
const section = () => document.getElementById(location.hash.slice(1))?.querySelector(":scope > .more");
const openLinked = () => section()?.setAttribute("open", "");
addEventListener("hashchange", openLinked);
addEventListener("click", (event) => { if (event.target.hash === location.hash) openLinked(); }); // for the second time
openLinked();
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach((one) => { one.open = true; });
});
addEventListener("afterprint", () => closed.forEach((one) => { one.open = false; }));

// Figures are data in the page, which plotly draws here.
const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
function draw(plot, data, layout) {
  const modeBarButtons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
  const doubleClick = "reset"; // plotly takes a touch and the click that follows it for one
  Plotly.newPlot(plot, data, layout, { responsive: true, displaylogo: false, modeBarButtons, doubleClick });
  listen(plot);
  plot.closest(".more")?.addEventListener("toggle", () => Plotly.Plots.resize(plot));
  addEventListener("beforeprint", () => Plotly.relayout(plot, { width: Math.min(680, plot.offsetWidth) }));
  addEventListener("afterprint", () => Plotly.relayout(plot, { width: null, autosize: true }));
}

// The marks of a figure that have numbers, markers, bars and cells: their middles and half their sizes in pixels, what
// plotly calls them, and the label of a head.
function marksOf(plot) {
  const { xaxis, yaxis } = plot._fullLayout;
  const across = (x) => xaxis._offset + xaxis.c2p(x), down = (y) => yaxis._offset + yaxis.c2p(y);
  const between = ([left, right], [top, bottom]) =>
    ({ x: (left + right) / 2, y: (top + bottom) / 2, w: Math.abs(right - left) / 2, h: Math.abs(bottom - top) / 2 });
  const all = plot.calcdata.flatMap((points, curveNumber) => {
    const { trace, x, y, z } = points[0];
    if (trace.hoverinfo === "skip" || trace.visible !== true) return [];
    if (trace.type === "heatmap") return z.flatMap((row, i) => row.map((_, j) => {
      const place = between([x[j], x[j + 1]].map(across), [y[i], y[i + 1]].map(down));
      const isThere = (trace.customdata ?? z)[i][j] != null, label = `L${trace.y[i]}H${trace.x[j]}`;
      return { curveNumber, pointNumber: [i, j], label, cell: true, ...(isThere ? place : {}) };
    }));
    return points.map((point, pointNumber) => {
      const label = trace.customdata?.[pointNumber]?.[0], size = (point.ms ?? trace.marker?.size ?? 6) / 2;
      const place = trace.type === "bar"
        ? between([point.x - point.w / 2, point.x + point.w / 2].map(across), [point.b, point.y].map(down))
        : { x: across(point.x), y: down(point.y), w: size, h: size };
      return { curveNumber, pointNumber, label, ...place };
    });
  });
  const within = (z, { _offset, _length }) => z > _offset - 1 && z < _offset + _length + 1; // not so where one zoomed
  return all.filter(({ x, y }) => within(x, xaxis) && within(y, yaxis));
}

// By keyboard a figure is one stop of Tab. Arrow keys choose a mark, whose numbers are below the figure.
const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const isHead = (plot) => plot.layout.meta === "linked"; // each mark is a head, and has a panel if there is an atlas
const sameMark = (one, other) =>
  one.curveNumber === other.curveNumber && String(one.pointNumber) === String(other.pointNumber);
const chosenOf = (plot, all) => // of a head that is drawn in another way, such as in the map and then as a point, as well
  all.find((mark) => plot.chosen && (isHead(plot) ? mark.label === plot.chosen.label : sameMark(mark, plot.chosen)));

// The nearest in a direction, of those within 45° if there are any; marks in one place come one after the other.
function nearest(all, from, [right, down]) {
  const start = all.indexOf(from);
  const ahead = all.map((mark, n) => {
    const [x, y] = [mark.x - from.x, mark.y - from.y], along = x * right + y * down, aside = Math.abs(x * down + y * right);
    if (Math.hypot(x, y) < 0.5) return { mark, cost: n !== start && n > start === right + down > 0 ? 0 : Infinity };
    return { mark, cost: along < 0.5 ? Infinity : Math.hypot(x, y) + (aside > along ? 1e6 : 0) };
  });
  const best = ahead.reduce((one, other) => (other.cost < one.cost ? other : one));
  return best.cost < Infinity ? best.mark : from;
}

function step(plot, key) {
  const all = marksOf(plot);
  if (!all.length) return;
  const at = chosenOf(plot, all);
  if (!at) choose(plot, all.reduce((one, other) => (other.w > one.w + 0.5 ? other : one))); // the largest
  else if (steps[key]) choose(plot, nearest(all, at, steps[key]));
  else if (key) { // Home and End: of the row, in a map
    const row = all.filter((mark) => !at.cell || mark.y === at.y), side = key === "Home" ? -1 : 1;
    choose(plot, row.reduce((one, other) => (side * (other.x - one.x) > 0 ? other : one)));
  } else choose(plot, at);
}

// What plotly writes beside a mark when one points at it, unless there is no room: its template with its numbers.
function textOf(plot, { curveNumber, pointNumber }) {
  const { trace } = plot.calcdata[curveNumber][0], [i, j] = [pointNumber].flat(), { x, y, z, customdata } = trace;
  const values = j === undefined ? { x: x[i], y: y[i], customdata: customdata?.[i] }
    : { x: x[j], y: y[i], z: z[i][j], customdata: customdata?.[i][j] };
  const filled = (_, name, place, digits, kind) => {
    const value = place === undefined ? values[name] : values[name][place];
    if (typeof value !== "number" || !kind) return value ?? "–";
    const rounded = kind === "%" ? `${(100 * value).toFixed(digits)}%` : kind === "f" ? value.toFixed(digits)
      : value.toPrecision(digits);
    return rounded.replace("-", "−");
  };
  const [text, more] = trace.hovertemplate.split("<extra>");
  const lines = text.replace(/%\{(\w+)(?:\[(\d+)\])?(?::\.(\d)([%fg]))?\}/g, filled).split("<br>");
  return [...(more === undefined && trace.name ? [trace.name] : []), ...lines].join("; ");
}

// Frame a mark, and write its numbers below the figure.
function choose(plot, mark) {
  plot.chosen = mark;
  plot.said.textContent = textOf(plot, mark);
  frame(plot);
  plot.ring.scrollIntoView({ block: "nearest" });
}

function frame(plot) {
  const mark = chosenOf(plot, marksOf(plot)), more = mark?.cell ? 0 : 4;
  plot.ring.hidden = !mark;
  if (!mark) { plot.said.textContent = ""; return; }
  const left = plot.offsetLeft + plot.clientLeft + mark.x - mark.w - more;
  const top = plot.offsetTop + plot.clientTop + mark.y - mark.h - more;
  const [width, height] = [mark.w, mark.h].map((half) => 2 * (half + more));
  Object.assign(plot.ring.style, { left: `${left}px`, top: `${top}px`, width: `${width}px`, height: `${height}px` });
}

function listen(plot) {
  const caption = plot.closest("figure").querySelector("figcaption");
  plot.said = document.createElement("output");
  plot.ring = Object.assign(document.createElement("div"), { className: "ring", hidden: true });
  caption.before(plot.said, plot.ring);
  plot.tabIndex = 0;
  plot.setAttribute("role", "application");
  if (!plot.ariaLabel) plot.ariaLabel = caption.textContent;
  const drawn = () => {
    plot.querySelectorAll(".modebar button").forEach((button) => { button.tabIndex = -1; }); // for the mouse
    frame(plot);
  };
  drawn();
  plot.on("plotly_afterplot", drawn);
  plot.addEventListener("focus", () => { if (plot.matches(":focus-visible")) step(plot); });
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && plot.chosen && isHead(plot)) window.openHead?.(plot.chosen.label);
    else if (steps[event.key] || ["Home", "End"].includes(event.key)) step(plot, event.key);
    else return;
    event.preventDefault();
  });
  if (isHead(plot)) plot.on("plotly_click", (click) => clicked(plot, click));
}

// A click opens the panel of a head. A finger cannot point, so the first touch of a head only chooses it.
function clicked(plot, { event, points: [point] }) {
  const mark = marksOf(plot).find((one) => sameMark(one, point)), again = plot.chosen?.label === mark.label;
  const touch = event.type === "touchstart";
  if (touch) plot.touched = event.timeStamp;
  else if (event.timeStamp - plot.touched < 1000) return; // the click that follows a touch
  choose(plot, mark);
  if (!touch || again) window.openHead?.(mark.label);
}

for (const plot of document.querySelectorAll(".plot:has(+ script)")) {
  const { data, layout } = JSON.parse(plot.nextElementSibling.textContent);
  draw(plot, data, { ...layout, dragmode });
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
