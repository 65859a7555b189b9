// The map of the atlas and the panels of its heads: all numbers are in the page, as contract.py says; the menus choose
// which of them are drawn.
const atlas = document.querySelector("#atlas .plot");
const stored = JSON.parse(document.getElementById("atlas-data").textContent);
const { labels, colours, panels } = stored;
// Two numbers in a line: plotly drops what is higher than its figure.
const hover = stored.hover.map((lines) => lines.replace(/\n(.+)\n/g, "<br>$1; ").replaceAll("\n", "<br>"));
const [colour, across, up] = ["colour", "x", "y"].map((name) => document.getElementById(`atlas-${name}`));
const axes = Object.keys(colours).filter((name) => !colours[name].names.length);
const layers = Object.keys(stored.layers);
const columns = [...new Set(labels.map((label) => +label.split("H")[1]))].sort((a, b) => a - b).map(String);
const order = new Map(labels.map((label, n) => [label, n]));
const grid = (values) => layers.map((y) => columns.map((x) => values[order.get(`L${y}H${x}`)] ?? null));
const unknown = "#b9b9b9"; // of heads without a number; it is in none of the scales, but close to undecided heads
const marks = { undecided: "diamond-open", "not used": "line-ew" }; // verdicts that are not told by their colour alone
const mapHeight = parseInt(atlas.style.height);

const bar = ({ title, names }) => (names.length
  ? { tickvals: names.map((_, code) => code), ticktext: names }
  : { title: { text: title.replace(/(.{9,}?) /g, "$1<br>"), side: "top" } }); // in short lines, above the bar

function cells(chosen) {
  const { values, scale, low, high, names } = chosen;
  const heat = {
    type: "heatmap", x: columns, y: layers, z: grid(values), customdata: grid(hover), colorscale: scale, zmin: low,
    zmax: high, colorbar: bar(chosen), hovertemplate: "%{customdata}<extra></extra>", name: "",
  };
  const lines = Object.entries(marks).filter(([name]) => names.includes(name)).map(([name, symbol]) => {
    const heads = labels.filter((_, n) => values[n] === names.indexOf(name)).map((label) => label.slice(1).split("H"));
    const line = { color: "#000", width: 1.5 }, marker = { symbol, size: 10, color: "#000", line };
    return { type: "scatter", mode: "markers", x: heads.map((x) => x[1]), y: heads.map((x) => x[0]), name, marker,
      showlegend: true, hoverinfo: "skip" };
  });
  return [heat, ...lines];
}

// Heads with a number for both axes, those with and those without a colour, by their places in the table.
function kept(chosen, x, y) {
  const known = [...labels.keys()].filter((n) => x[n] !== null && y[n] !== null);
  return [true, false].map((has) => known.filter((n) => (chosen.values[n] !== null) === has));
}

function points(chosen, x, y) {
  const some = (heads, colouring) => ({
    type: "scatter", mode: "markers", showlegend: false, x: heads.map((n) => x[n]), y: heads.map((n) => y[n]),
    marker: { size: 9, line: { color: "#858585", width: 0.5 }, ...colouring },
    customdata: heads.map((n) => [labels[n], hover[n]]), hovertemplate: "%{customdata[1]}<extra></extra>",
  });
  const [coloured, grey] = kept(chosen, x, y), { scale, low, high, values, names } = chosen;
  const symbol = coloured.map((n) => (names[values[n]] === "undecided" ? "diamond" : "circle")); // as in the plane
  const colouring = { color: coloured.map((n) => values[n]), colorscale: scale, cmin: low, cmax: high, symbol };
  return [some(grey, { color: unknown }), some(coloured, { ...colouring, colorbar: bar(chosen), showscale: true })];
}

const base = {
  margin: { t: 20, r: 20, b: 50, l: 60 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, dragmode,
  hoverlabel: { bgcolor: "#fff", font: { color: "#000" } }, meta: "linked", colorway: ["#0342a7", "#d97d00"],
};
const titled = ({ title }) => // in two lines, for a phone
  ({ title: { text: title.replace(" (", "<br>("), standoff: 15 }, ticks: "outside", zeroline: false, automargin: true });
function layoutOf({ names: verdicts }, x, y) {
  if (x) return { ...base, height: 420, xaxis: titled(x), yaxis: titled(y), hovermode: "closest" };
  const some = layers.filter((_, n) => n % Math.ceil(layers.length / 40) === 0); // names that fit beside the map
  const names = { tickvals: some, ticktext: some.map((layer) => stored.layers[layer]), automargin: true };
  // The axes end at the edges of the cells; marks in cells would widen them.
  const axis = { type: "category", showgrid: false, autorange: false, ticks: "outside" };
  const xaxis = { ...axis, title: { text: "head", standoff: 8 }, range: [-0.5, columns.length - 0.5] };
  const yaxis = { ...axis, ...names, title: { text: "layer" }, range: [layers.length - 0.5, -0.5] };
  return { ...base, height: mapHeight, plot_bgcolor: verdicts.length ? "#fff" : unknown, xaxis, yaxis };
}

const counted = (n, more) => (n ? `; ${more.replace("#", `${n} head${n === 1 ? "" : "s"}`)}` : "");
function captionOf(chosen, x, y) {
  if (!x) return `${chosen.title}, by head` + counted(chosen.values.filter((v) => v === null).length,
    "grey: # without a number");
  const [coloured, grey] = kept(chosen, x.values, y.values);
  return `${y.title} against ${x.title}; colour: ${chosen.title}` + counted(grey.length, "grey: # without this number") +
    counted(labels.length - grey.length - coloured.length, "not shown: # without a number for an axis");
}

function drawAtlas(plot = Plotly.react) {
  const chosen = colours[colour.value], isMap = across.value === "map";
  const [x, y] = isMap ? [] : [colours[across.value], colours[up.value]];
  const layout = layoutOf(chosen, x, y), caption = captionOf(chosen, x, y);
  up.disabled = isMap;
  atlas.style.height = `${layout.height}px`;
  atlas.setAttribute("aria-label", caption);
  atlas.closest("figure").querySelector("figcaption").textContent = caption;
  plot(atlas, isMap ? cells(chosen) : points(chosen, x.values, y.values), layout);
}
drawAtlas(draw);
colour.addEventListener("change", () => drawAtlas());
// The axes show two measures: choosing that of the other axis exchanges them, or gives that axis the first other one.
let before = [across.value, up.value];
for (const [n, menu] of [across, up].entries()) menu.addEventListener("change", () => {
  const other = [up, across][n], free = [before[n], ...axes];
  if (across.value === up.value) other.value = free.find((name) => axes.includes(name) && name !== menu.value) ?? menu.value;
  before = [across.value, up.value];
  drawAtlas();
});

// The panel of one head.
const panel = document.getElementById("panel");
const shown = stored.words.length; // positions of the score maps
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const few = (x, digits = 3) => String(Number(x.toPrecision(digits))).replace("-", "−");
const rowOf = (label) => document.getElementById(label)?.closest("#table-atlas tr");

// Scores by query and key, null where they are masked.
function decoded([low, high, text]) {
  const all = bytes(text), n = shown;
  return [...Array(n).keys()].map((i) => [...Array(n).keys()].map((j) => {
    const byte = stored.causal ? (j > i ? 255 : all[(i * (i + 1)) / 2 + j]) : all[i * n + j];
    return byte === 255 ? null : low + (byte / 254) * (high - low);
  }));
}

const margin = 74; // for the tokens at the left and at the bottom
const cut = (word) => (word.length > 11 ? `${word.slice(0, 10)}…` : word);
const cell = (canvas) => (canvas.width - margin) / shown;
function drawScores(canvas, scores) {
  const context = canvas.getContext("2d"), size = cell(canvas), side = canvas.width - margin;
  const known = scores.flat().filter((x) => x !== null), low = Math.min(...known), high = Math.max(...known);
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  scores.forEach((row, i) => row.forEach((x, j) => {
    if (x === null) return;
    const share = (x - low) / (high - low || 1); // pale grey to dark blue
    context.fillStyle = `rgb(${[235 - 227 * share, 238 - 209 * share, 240 - 152 * share].map(Math.round)})`;
    context.fillRect(margin + j * size, i * size, size + 0.5, size + 0.5);
  }));
  context.fillStyle = "#222";
  context.font = `${Math.min(11, size - 1)}px sans-serif`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  stored.words.forEach((word, n) => {
    context.fillText(cut(word), margin - 4, (n + 0.5) * size);
    context.save();
    context.translate(margin + (n + 0.5) * size, side + 4);
    context.rotate(-Math.PI / 2);
    context.fillText(cut(word), 0, 0);
    context.restore();
  });
}

// Choose a cell of the score map: frame it, and write its tokens and its score.
function sayCell(canvas, query, key) {
  const score = canvas.scores[query]?.[key], size = cell(canvas) * canvas.clientWidth / canvas.width;
  if (score === undefined) return;
  canvas.at = [query, key];
  const token = (n) => `“${stored.words[n]}” (${n})`, says = score === null ? "masked" : `score ${few(score)}`;
  panel.querySelector(".scores output").textContent = `query ${token(query)}, key ${token(key)}: ${says}`;
  const left = canvas.offsetLeft + canvas.clientLeft + margin * canvas.clientWidth / canvas.width + key * size;
  const top = canvas.offsetTop + canvas.clientTop + query * size, ring = panel.querySelector(".scores .ring");
  ring.hidden = false;
  Object.assign(ring.style, { left: `${left}px`, top: `${top}px`, width: `${size}px`, height: `${size}px` });
}

function pointAt(event) {
  const canvas = event.currentTarget, box = canvas.getBoundingClientRect(), scale = canvas.width / box.width;
  const key = Math.floor(((event.clientX - box.left) * scale - margin) / cell(canvas));
  sayCell(canvas, Math.floor(((event.clientY - box.top) * scale) / cell(canvas)), key);
}

function moveCell(event) {
  const canvas = event.currentTarget, move = steps[event.key], [query, key] = canvas.at ?? [0, -1];
  const side = { Home: 0, End: shown - 1 }[event.key];
  if (move) sayCell(canvas, query + move[1], key + move[0]);
  else if (side !== undefined) sayCell(canvas, query, side);
  else return;
  event.preventDefault();
}

function showLines(drawn, distances, lines, name) {
  drawn.closest("figure").hidden = !lines;
  if (!lines) return;
  const axis = { title: { text: "distance" }, type: "category" }, height = { title: { text: name } };
  const traces = Object.entries(lines).map(([name, y]) => (
    { x: distances.map(String), y, name, mode: "lines+markers", hovertemplate: "distance %{x}: %{y}<extra></extra>" }));
  const layout = { ...base, meta: null, margin: { t: 10, r: 10, b: 45, l: 55 }, height: 260, showlegend: traces.length > 1 };
  Plotly.react(drawn, traces, { ...layout, xaxis: axis, yaxis: height }, { responsive: true, displayModeBar: false });
  if (!drawn.said) listen(drawn);
}

let opener; // where Escape leads back to
function openHead(label) {
  if (!panel.contains(document.activeElement)) opener = document.activeElement;
  if (location.hash !== `#${label}`) location.hash = label; // which shows it
  else showHead(label);
}

function showHead(label) {
  const row = rowOf(label), one = panels[label];
  if (!row) return;
  if (!one) return;
  panel.hidden = false;
  panel.querySelector("h3").textContent = label;
  panel.querySelector(".says").replaceChildren(...one.says.map((sentence) => {
    const paragraph = document.createElement("p");
    paragraph.textContent = sentence;
    return paragraph;
  }));
  const titles = [...row.closest("table").tHead.rows[0].cells].map((title) => title.textContent);
  const items = titles.slice(1).flatMap((title, n) => {
    const [name, number] = ["dt", "dd"].map((tag) => document.createElement(tag));
    [name.textContent, number.textContent] = [title, row.cells[n + 1].textContent];
    return [name, number];
  });
  panel.querySelector("dl").replaceChildren(...items);
  const canvas = panel.querySelector("canvas");
  canvas.scores = decoded(one.scores);
  canvas.setAttribute("aria-label", `Score map of ${label}`);
  drawScores(canvas, canvas.scores);
  canvas.onmousemove = canvas.onclick = pointAt;
  canvas.onkeydown = moveCell;
  if (canvas.at) sayCell(canvas, ...canvas.at);
  showLines(panel.querySelector(".attention .drawn"), stored.attended, one.attention, "mean attention");
  showLines(panel.querySelector(".profile .drawn"), stored.distances, one.profile && { score: one.profile }, "score");
  panel.scrollIntoView({ block: "start" });
  panel.focus({ preventScroll: true });
}
panel.addEventListener("keydown", (event) => { if (event.key === "Escape") opener?.focus(); });

const openFromHash = () => { if (/^#L\d+H\d+$/.test(location.hash)) showHead(location.hash.slice(1)); };
addEventListener("hashchange", openFromHash);
// Each row of a head, in the tables of other sections as well, leads to its panel.
document.querySelectorAll("tbody tr:has(th a)").forEach((row) => {
  row.style.cursor = "pointer";
  row.addEventListener("click", (event) => {
    event.preventDefault(); // the link leads to the row in the table of all heads
    openHead(row.querySelector("a").hash.slice(1));
  });
});
openFromHash();
