// The map of the atlas: all numbers are in the page, the menus choose which of them are drawn.
const atlas = document.querySelector("#atlas .plot");
const shownFirst = JSON.parse(atlas.nextElementSibling.textContent);
const { colours, axes, labels, unknown } = shownFirst.choices;
const [colour, across, up] = ["colour", "x", "y"].map((name) => document.getElementById(`atlas-${name}`));
const hover = shownFirst.data[0].customdata; // by row and column of the map
const [layers, columns] = [shownFirst.data[0].y, shownFirst.data[0].x];
const mapHeight = parseInt(atlas.style.height);
const place = (label) => label.match(/\d+/g); // layer and head
const told = (label) => hover[layers.indexOf(place(label)[0])][columns.indexOf(place(label)[1])];

// Heads with a number for both axes, those with and those without a colour, by their places in the table.
function kept(chosen, x, y) {
  const known = [...labels.keys()].filter((n) => x[n] !== null && y[n] !== null);
  return [true, false].map((has) => known.filter((n) => (chosen.values[n] !== null) === has));
}
const counted = (n, more) => (n ? `; ${more.replace("#", `${n} head${n === 1 ? "" : "s"}`)}` : "");

function points(chosen, x, y) {
  const some = (heads, marker) => ({
    type: "scatter", mode: "markers", showlegend: false, marker, x: heads.map((n) => x[n]), y: heads.map((n) => y[n]),
    customdata: heads.map((n) => [labels[n], told(labels[n])]), hovertemplate: "%{customdata[1]}<extra></extra>",
  });
  const [coloured, grey] = kept(chosen, x, y);
  const marker = { ...chosen.marker, color: coloured.map((n) => chosen.values[n]) };
  return [some(grey, { ...chosen.marker, color: unknown, showscale: false }), some(coloured, marker)];
}

function drawAtlas() {
  const chosen = colours[colour.value], isMap = across.value === "map", { layout } = shownFirst;
  const [x, y] = [axes[across.value], axes[up.value]];
  const titled = ({ title }) => // in two lines, for a phone
    ({ title: { text: title.replace(" (", "<br>(") }, ticks: "outside", zeroline: false, automargin: true });
  up.disabled = isMap;
  layout.height = isMap ? mapHeight : 420; // the figure does not follow its element's height by itself
  atlas.style.height = `${layout.height}px`;
  const [coloured, grey] = isMap ? [[], []] : kept(chosen, x.values, y.values);
  const caption = isMap ? chosen.caption : `${y.title} against ${x.title}; colour: ${chosen.title}` +
    counted(grey.length, "grey: # without this number") +
    counted(labels.length - grey.length - coloured.length, "not shown: # without a number for an axis");
  atlas.setAttribute("aria-label", caption);
  atlas.closest("figure").querySelector("figcaption").textContent = caption;
  const map = () => chosen.map.map((trace) =>
    (trace.type === "heatmap" ? { ...trace, x: columns, y: layers, customdata: hover } : trace));
  const free = { ...layout, plot_bgcolor: "#fff", xaxis: x && titled(x), yaxis: titled(y), hovermode: "closest" };
  return isMap ? Plotly.react(atlas, map(), layout) : Plotly.react(atlas, points(chosen, x.values, y.values), free);
}
colour.addEventListener("change", drawAtlas);
// The axes show two measures: choosing that of the other axis exchanges them, or gives that axis the first other one.
let before = [across.value, up.value];
for (const [n, menu] of [across, up].entries()) menu.addEventListener("change", () => {
  const other = [up, across][n], free = [before[n], ...Object.keys(axes)];
  if (across.value === up.value) other.value = free.find((name) => name in axes && name !== menu.value) ?? menu.value;
  before = [across.value, up.value];
  drawAtlas();
});
atlas.on("plotly_click", ({ points: [{ x, y, customdata }] }) =>
  openHead(across.value === "map" ? `L${y}H${x}` : customdata[0]));

// By keyboard: arrows choose a head of the map (or the next one of the scatter plot), Enter opens its panel.
const chosenHead = document.getElementById("atlas-head");
let at = [0, 0];
const labelAt = ([row, column]) => `L${layers[row]}H${columns[column]}`;
function choose(row, column) {
  at = [Math.max(0, Math.min(layers.length - 1, row)), Math.max(0, Math.min(columns.length - 1, column))];
  const text = told(labelAt(at)) || `${labelAt(at)}: not measured`;
  chosenHead.textContent = text.replaceAll("<br>", "; ").replace(/<[^>]*>/g, "");
  const [y, x] = at, line = { color: "#d15eb4", width: 3 };
  const frame = { type: "rect", x0: x - 0.5, x1: x + 0.5, y0: y - 0.5, y1: y + 0.5, line };
  if (across.value === "map") Plotly.relayout(atlas, { shapes: [frame] });
}
const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [-1e9, -1e9] };
atlas.tabIndex = 0;
atlas.setAttribute("role", "application");
atlas.setAttribute("aria-describedby", "atlas-head");
atlas.addEventListener("focus", () => choose(...at));
atlas.addEventListener("keydown", (event) => {
  const step = steps[event.key];
  if (step) choose(at[0] + step[0], at[1] + step[1]);
  else if (event.key === "Enter") openHead(labelAt(at));
  else return;
  event.preventDefault();
});

// The panel of one head.
const panel = document.getElementById("panel");
const panels = panel && JSON.parse(document.getElementById("panels").textContent);
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const few = (x, digits = 3) => String(Number(x.toPrecision(digits))).replace("-", "−");
const rowOf = (label) => document.getElementById(label)?.closest("#table-atlas tr");

// Scores by query and key, null where they are masked.
function decoded([low, high, text]) {
  const all = bytes(text), n = panels.shown;
  return [...Array(n).keys()].map((i) => [...Array(n).keys()].map((j) => {
    const byte = panels.causal ? (j > i ? 255 : all[(i * (i + 1)) / 2 + j]) : all[i * n + j];
    return byte === 255 ? null : low + (byte / 254) * (high - low);
  }));
}

const margin = 74; // for the tokens at the left and at the bottom
const cut = (word) => (word.length > 11 ? `${word.slice(0, 10)}…` : word);
const cell = (canvas) => (canvas.width - margin) / panels.shown;
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
  panels.words.slice(0, panels.shown).forEach((word, n) => {
    context.fillText(cut(word), margin - 4, (n + 0.5) * size);
    context.save();
    context.translate(margin + (n + 0.5) * size, side + 4);
    context.rotate(-Math.PI / 2);
    context.fillText(cut(word), 0, 0);
    context.restore();
  });
}

function pointAt(event) {
  const canvas = event.currentTarget, box = canvas.getBoundingClientRect(), scale = canvas.width / box.width;
  const j = Math.floor(((event.clientX - box.left) * scale - margin) / cell(canvas));
  const i = Math.floor(((event.clientY - box.top) * scale) / cell(canvas)), score = canvas.scores[i]?.[j];
  if (score === undefined) return;
  const token = (n) => `“${panels.words[n]}” (${n})`, says = score === null ? "masked" : `score ${few(score)}`;
  panel.querySelector("output").textContent = `query ${token(i)}, key ${token(j)}: ${says}`;
}

function showLines(drawn, distances, lines, name) {
  drawn.closest("figure").hidden = !lines;
  if (!lines) return;
  const { template } = shownFirst.layout, margins = { t: 10, r: 10, b: 45, l: 55 };
  const axis = { title: { text: "distance" }, type: "category" }, height = { title: { text: name } };
  const traces = Object.entries(lines).map(([name, y]) => (
    { x: distances.map(String), y, name, mode: "lines+markers", hovertemplate: "distance %{x}: %{y}<extra></extra>" }));
  const legend = { orientation: "h", y: 1.02, yanchor: "bottom" }, layout = { template, margin: margins, height: 260 };
  Plotly.react(drawn, traces, { ...layout, legend, showlegend: traces.length > 1, xaxis: axis, yaxis: height },
    { responsive: true, displayModeBar: false });
}

function openHead(label) {
  const row = rowOf(label), one = panels?.heads[label];
  if (!row) return;
  if (location.hash !== `#${label}`) { location.hash = label; return; } // which opens it
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
  showLines(panel.querySelector(".attention .drawn"), panels.attended, one.attention, "mean attention");
  showLines(panel.querySelector(".profile .drawn"), panels.distances, one.profile && { score: one.profile }, "score");
  panel.scrollIntoView({ block: "start" });
}

const openFromHash = () => { if (/^#L\d+H\d+$/.test(location.hash)) openHead(location.hash.slice(1)); };
addEventListener("hashchange", openFromHash);
document.querySelectorAll("#table-atlas tbody tr").forEach((row) => {
  row.style.cursor = "pointer";
  row.addEventListener("click", () => openHead(row.querySelector("a").id));
});
openFromHash();
