// Text in cells is black or white, by what is seen behind it: in the dark the page inverts both (trace.meta has both).
const night = matchMedia("(prefers-color-scheme: dark)");
const inked = (traces, dark = night.matches) => traces.map((trace) =>
  trace.meta ? { ...trace, textfont: { ...trace.textfont, color: trace.meta[Number(dark)] } } : trace);
const ink = (plot, dark) => Plotly.react(plot, inked(plot.data, dark), plot.layout);
for (const plot of document.querySelectorAll(".plot")) {
  const { data, layout } = JSON.parse(plot.nextElementSibling.textContent);
  layout.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
  const modeBarButtons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
  Plotly.newPlot(plot, inked(data), layout, { responsive: true, displaylogo: false, modeBarButtons });
  if (layout.meta === "linked")
    plot.on("plotly_click", ({ points: [{ x, y }] }) => { location.hash = `L${y}H${x}`; });
  night.addEventListener("change", () => ink(plot));
  addEventListener("beforeprint", () => {
    ink(plot, false);
    Plotly.relayout(plot, { width: Math.min(680, plot.offsetWidth) });
  });
  addEventListener("afterprint", () => {
    ink(plot);
    Plotly.relayout(plot, { width: null, autosize: true });
  });
}
// A click on a column's title sorts: numbers from the largest, heads and words from the first, what is missing last.
const plain = (text) => text.replace(/^≈\s/, ""); // the mark of estimates
const value = (text) => Number(plain(text).replace("−", "-"));
const compare = (a, b) =>
  isNaN(value(a)) || isNaN(value(b)) ? plain(a).localeCompare(plain(b), "en", { numeric: true }) : value(a) - value(b);
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
