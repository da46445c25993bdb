"use strict";
// Memory over time: the bytes that a graph holds while each operation, or each launch and call, runs.

const [TALL, EDGE] = [220, 70];

/** Draws the memory of each graph before and after fusion, each over its own steps. */
function memoryOverTime() {
  return report.graphs
    .filter((graph) => graph.memory_after.length)
    .map((graph) =>
      element(
        "section",
        {},
        element(
          "p",
          {},
          `${graph.label}: at most ${formatBytes(peak(graph.memory_before))} before fusion, `,
          `${formatBytes(peak(graph.memory_after))} after`,
        ),
        memoryPlot(graph),
      ),
    );
}

function peak(held) {
  return held.reduce((most, bytes) => Math.max(most, bytes), 0);
}

function memoryPlot(graph) {
  const most = Math.max(1, peak(graph.memory_before), peak(graph.memory_after));
  const y = (bytes) => TALL - 20 - (TALL - 40) * (bytes / most);
  const line = (held, kind) => {
    const step = (WIDE - EDGE - 10) / held.length;
    const points = held.map((bytes, k) => `${k ? "V" : `M ${EDGE}`} ${y(bytes)} H ${EDGE + step * (k + 1)}`);
    return drawn("path", { class: kind, d: points.join(" ") });
  };
  return drawn(
    "svg",
    { class: "plot", viewBox: `0 0 ${WIDE} ${TALL}`, role: "img", "aria-label": "memory over time" },
    [0, most / 2, most].map((bytes) => drawn("path", { class: "grid", d: `M ${EDGE} ${y(bytes)} H ${WIDE - 10}` })),
    [0, most / 2, most].map((bytes) =>
      drawn("text", { x: EDGE - 6, y: y(bytes) + 4, "text-anchor": "end" }, formatBytes(Math.round(bytes))),
    ),
    line(graph.memory_before, "held-before"),
    line(graph.memory_after, "held-after"),
    drawn("text", { x: WIDE / 2, y: TALL - 4, "text-anchor": "middle" }, "from the first step to the last"),
  );
}
