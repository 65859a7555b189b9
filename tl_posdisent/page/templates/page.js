// Figures are data in the page, which plotly draws here.
const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
function draw(plot, data, layout) {
  const modeBarButtons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
  Plotly.newPlot(plot, data, layout, { responsive: true, displaylogo: false, modeBarButtons });
  if (layout.meta === "linked") // a cell of a map, or a point with its head's label; the atlas has the panels
    plot.on("plotly_click", ({ points: [{ x, y, customdata }] }) =>
      window.openHead?.(Array.isArray(customdata) ? customdata[0] : `L${y}H${x}`));
  addEventListener("beforeprint", () => Plotly.relayout(plot, { width: Math.min(680, plot.offsetWidth) }));
  addEventListener("afterprint", () => Plotly.relayout(plot, { width: null, autosize: true }));
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
