"use strict";
// Traffic and the roofline, predicted beside measured times.

const [WIDE, HIGH, LEFT, BOTTOM] = [900, 380, 70, 40];

/** Shows the traffic before and after fusion, that of each kernel, memory over time, and the plots. */
function showTraffic() {
  const rows = sorted(rowsOfSteps(report.graphs), (row) => row.read + row.written, false);
  const graphs = report.graphs.filter((graph) => graph.device !== null);
  return element(
    "div",
    {},
    element("h3", {}, "Bytes that a call moves, if each launch reads and writes its tensors once"),
    element(
      "div",
      { class: "legend" },
      element("span", {}, element("i", { class: "read-colour" }), "read"),
      element("span", {}, element("i", { class: "written-colour" }), "written"),
    ),
    bars(
      report.graphs.flatMap((graph) => [
        { label: `${graph.label}, before fusion`, ...graph.traffic_before },
        { label: `${graph.label}, after`, ...graph.traffic_after },
      ]),
    ),
    element("h3", {}, "Kernels and calls, by bytes"),
    bars(
      rows.slice(0, 25).map((row) => ({
        label: row.launches.length > 1 ? `${row.name} ×${row.launches.length}` : row.name,
        read: row.read,
        written: row.written,
        click: () => go("kernels", row.key, 0),
      })),
    ),
    element("h3", {}, "Memory over time: results, and what is between; inputs do not count"),
    element(
      "div",
      { class: "legend" },
      element("span", {}, element("i", { class: "written-colour" }), "operations, each by itself"),
      element("span", {}, element("i", { class: "read-colour" }), "launches and calls"),
    ),
    memoryOverTime(),
    graphs.length
      ? element("h3", {}, `Roofline: ${graphs[0].device.name}, as predicted times assume it`)
      : null,
    graphs.length ? roofline(graphs[0].device) : null,
    rows.some((row) => row.measured !== null)
      ? element("h3", {}, "Predicted and measured times of kernels")
      : null,
    rows.some((row) => row.measured !== null) ? againstClock(rows) : null,
  );
}

/** Draws bars of bytes read and written. */
function bars(entries) {
  const most = Math.max(1, ...entries.map((entry) => entry.read + entry.written));
  const [row, from] = [22, 320];
  const length = (bytes) => (WIDE - from - 110) * (bytes / most);
  return drawn(
    "svg",
    { class: "plot", viewBox: `0 0 ${WIDE} ${row * entries.length + 4}` },
    entries.map((entry, k) => {
      const label = entry.label.length > 44 ? `${entry.label.slice(0, 43)}…` : entry.label;
      const group = drawn(
        "g",
        { transform: `translate(0 ${row * k})`, class: entry.click ? "box" : null },
        drawn("text", { x: from - 8, y: 15, "text-anchor": "end" }, label),
        drawn("path", {
          class: "read",
          d: `M ${from} 3 h ${length(entry.read)} v 15 h ${-length(entry.read)} z`,
        }),
        drawn("path", {
          class: "written",
          d: `M ${from + length(entry.read)} 3 h ${length(entry.written)} v 15 h ${-length(entry.written)} z`,
        }),
        drawn(
          "text",
          { x: from + length(entry.read + entry.written) + 6, y: 15 },
          formatBytes(entry.read + entry.written),
        ),
        drawn(
          "title",
          {},
          `${entry.label}: reads ${formatBytes(entry.read)}, writes ${formatBytes(entry.written)}`,
        ),
      );
      if (entry.click) group.addEventListener("click", entry.click);
      return group;
    }),
  );
}

/** Returns a scale from numbers to pixels, logarithmic, with its powers of ten. */
function logarithmic(numbers, from, to) {
  const [low, high] = [
    Math.floor(Math.log10(Math.min(...numbers))),
    Math.ceil(Math.log10(Math.max(...numbers))),
  ];
  const span = Math.max(1, high - low);
  const at = (number) => from + ((to - from) * (Math.log10(number) - low)) / span;
  return { at, ticks: Array.from({ length: span + 1 }, (_, k) => 10 ** (low + k)) };
}

function axes(x, y, horizontal, vertical) {
  const short = (tick) =>
    tick >= 1e4 || tick < 1e-2 ? `1e${Math.round(Math.log10(tick))}` : String(Number(tick.toPrecision(1)));
  return [
    x.ticks.map((tick) => drawn("path", { class: "grid", d: `M ${x.at(tick)} 10 V ${HIGH - BOTTOM}` })),
    y.ticks.map((tick) => drawn("path", { class: "grid", d: `M ${LEFT} ${y.at(tick)} H ${WIDE - 10}` })),
    x.ticks.map((tick) =>
      drawn("text", { x: x.at(tick), y: HIGH - BOTTOM + 16, "text-anchor": "middle" }, short(tick)),
    ),
    y.ticks.map((tick) =>
      drawn("text", { x: LEFT - 6, y: y.at(tick) + 4, "text-anchor": "end" }, short(tick)),
    ),
    drawn("text", { x: WIDE / 2, y: HIGH - 6, "text-anchor": "middle" }, horizontal),
    drawn("text", { transform: `translate(14 ${HIGH / 2}) rotate(-90)`, "text-anchor": "middle" }, vertical),
  ].flat();
}

/**
 * Draws kernels by their arithmetic per byte and the rate that they reach, below what memory and arithmetic allow.
 * The rate is that of the measured time, else of the predicted one.
 */
function roofline(device) {
  const points = pointsOf(report.graphs);
  if (!points.length) return element("p", { class: "empty" }, "No kernel has both arithmetic and a time.");
  const slow = bandwidthAt(device.bandwidth, 1e12);
  const fast = Math.max(...device.bandwidth.map(([, speed]) => speed));
  const x = logarithmic([...points.map((point) => point.x), device.matrix_flops / slow], LEFT, WIDE - 10);
  const y = logarithmic([...points.map((point) => point.y), device.matrix_flops], HIGH - BOTTOM, 10);
  return drawn(
    "svg",
    { class: "plot", viewBox: `0 0 ${WIDE} ${HIGH}` },
    axes(x, y, "additions per byte", "additions per µs"),
    slope("memory", slow, device.matrix_flops, x, y),
    fast === slow ? null : slope("the fastest cache", fast, device.matrix_flops, x, y),
    ceiling("additions", device.flops, fast, x, y),
    ceiling("products, 16 bits", device.matrix_flops, fast, x, y),
    points.map((point) => dot(point, x, y)),
  );
}

/** Returns the launches that have arithmetic, bytes and a time: additions per byte, and per microsecond. */
function pointsOf(graphs) {
  const point = (step, g, s) => {
    const [bytes, time] = [step.bytes_read + step.bytes_written, step.measured ?? step.predicted];
    return { g, s, step, time, x: step.flops / bytes, y: step.flops / time };
  };
  const points = graphs.flatMap((graph, g) => graph.steps.map((step, s) => point(step, g, s)));
  return points.filter(({ x, y }) => x > 0 && y > 0 && Number.isFinite(x) && Number.isFinite(y));
}

/** Draws the rate that a bandwidth allows, up to the fastest arithmetic. */
function slope(name, bandwidth, top, x, y) {
  const start = Math.max(x.ticks[0], y.ticks[0] / bandwidth);
  const end = top / bandwidth;
  if (end <= start) return null;
  const d = `M ${x.at(start)} ${y.at(start * bandwidth)} L ${x.at(end)} ${y.at(top)}`;
  const speed = `${name}: ${formatBytes(Math.round(bandwidth * 1e6))}/s`;
  return drawn("path", { class: "roof", d }, drawn("title", {}, speed));
}

/** Draws the rate of some arithmetic, from where memory allows it. */
function ceiling(name, rate, bandwidth, x, y) {
  const [left, right] = [x.ticks[0], x.ticks[x.ticks.length - 1]];
  const start = Math.max(left, Math.min(right, rate / bandwidth));
  const label = `${name}: ${(rate / 1e6).toPrecision(3)} T/s`;
  return drawn(
    "g",
    {},
    drawn("path", { class: "roof", d: `M ${x.at(start)} ${y.at(rate)} H ${x.at(right)}` }),
    drawn("text", { x: x.at(right), y: y.at(rate) - 5, "text-anchor": "end" }, label),
  );
}

function dot(point, x, y) {
  const { g, s, step, time } = point;
  const label = `${step.name}: ${point.x.toPrecision(3)} additions per byte, ${formatTime(time)}`;
  return drawn(
    "circle",
    {
      class: step.measured === null ? "dot" : "dot measured",
      cx: x.at(point.x),
      cy: y.at(point.y),
      r: 5,
      click: () => openStep(g, s),
    },
    drawn("title", {}, label),
  );
}

/** Draws the predicted time of each kernel against its measured one. */
function againstClock(rows) {
  const points = rows.filter((row) => row.predicted && row.measured);
  if (!points.length) return element("p", { class: "empty" }, "No kernel has both times.");
  const all = points.flatMap((row) => [row.predicted, row.measured]);
  const [x, y] = [logarithmic(all, LEFT, WIDE - 10), logarithmic(all, HIGH - BOTTOM, 10)];
  const [low, high] = [x.ticks[0], x.ticks[x.ticks.length - 1]];
  const dots = points.map((row) =>
    drawn(
      "circle",
      {
        class: "dot measured",
        cx: x.at(row.predicted),
        cy: y.at(row.measured),
        r: 5,
        click: () => go("kernels", row.key, 0),
      },
      drawn(
        "title",
        {},
        `${row.name}: predicted ${formatTime(row.predicted)}, measured ${formatTime(row.measured)}`,
      ),
    ),
  );
  return drawn(
    "svg",
    { class: "plot", viewBox: `0 0 ${WIDE} ${HIGH}` },
    axes(x, y, "predicted µs", "measured µs"),
    drawn("path", { class: "roof", d: `M ${x.at(low)} ${y.at(low)} L ${x.at(high)} ${y.at(high)}` }),
    dots,
  );
}
