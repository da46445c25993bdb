"use strict";
// The ledger: every edge that was not fused, with its cost, its reason, and what it would take.

const ledger = { query: "", grouped: true };

const COLUMNS = [
  { title: "cost", number: true, text: (row) => formatTime(row.microseconds), by: (row) => row.microseconds },
  { title: "bytes", number: true, text: (row) => formatBytes(row.bytes), by: (row) => row.bytes },
  { title: "×", number: true, text: (row) => row.count, by: (row) => row.count },
  { title: "edge", text: (row) => `${row.producer} → ${row.consumer}`, by: (row) => row.producer },
  { title: "between", text: (row) => row.ends.join(" → "), by: (row) => row.ends.join() },
  { title: "why", text: (row) => row.reason, by: (row) => row.reason },
  {
    title: "what it would take",
    text: (row) => element("span", { class: "take" }, row.remedy),
    by: (row) => row.remedy,
  },
  { title: "line", kind: "place", text: (row) => row.place.text, by: (row) => row.place.text },
];

/** Shows the ledger, and below it the alternatives that were weighed. */
function showRefusals() {
  const holder = element("div");
  const total = element("span", { class: "dim", role: "status" });
  function fill() {
    const all = rowsOfRefusals(report.graphs, ledger.grouped);
    const rows = all.filter((row) => matches(ledger.query, textOfRefusal(row)));
    const cost = formatTime(sumKnown(rows.map((row) => row.microseconds)) ?? 0);
    total.textContent = `${formatCount(rows.length, "row")}, ${cost} in all`;
    const open = (row) => {
      const step = row.to_step ?? row.from_step;
      if (step !== null) openStep(row.graph, step);
    };
    const nothing = element("p", { class: "empty" }, "Nothing was refused, or nothing fits.");
    refill(holder, rows.length ? table(COLUMNS, rows, { open }) : nothing);
  }
  const search = element("input", {
    type: "search",
    placeholder: "search reasons, tensors, lines, kernels",
    value: ledger.query,
    "aria-label": "search",
    input: (event) => {
      ledger.query = event.target.value;
      fill();
    },
  });
  const group = element("input", {
    type: "checkbox",
    checked: ledger.grouped,
    change: (event) => {
      ledger.grouped = event.target.checked;
      fill();
    },
  });
  fill();
  const grouping = element("label", {}, group, " equal ones as one row");
  const bar = element("div", { class: "bar" }, search, grouping, total);
  return element("div", {}, bar, holder, alternatives(), breaks());
}

/** Shows the alternatives for products and forms, with their times. */
function alternatives() {
  const tunings = report.graphs.flatMap((graph) => graph.tunings);
  const rows = [...new Map(tunings.map((each) => [JSON.stringify(each), each])).values()];
  if (!rows.length) return null;
  const line = (tuning) =>
    tuning.trials.map((trial, k) => {
      const time =
        trial.measured === null
          ? `${formatTime(trial.predicted)} predicted`
          : `${formatTime(trial.measured)} measured`;
      return element(
        "p",
        { class: k === tuning.chosen ? "" : "dim" },
        `${k === tuning.chosen ? "→ " : ""}${trial.name}: ${trial.refused ? `refused, ${trial.refused}` : time}`,
      );
    });
  return element(
    "section",
    {},
    element("h3", {}, "Alternatives that were weighed"),
    rows.map((tuning) =>
      element(
        "div",
        { class: "card" },
        element("b", {}, tuning.subject),
        tuning.reason ? element("span", { class: "dim" }, ` not timed: ${tuning.reason}`) : null,
        line(tuning),
      ),
    ),
  );
}

/** Shows where the program leaves its graphs, and what runs eagerly. */
function breaks() {
  const places = [...report.graphs.map((graph) => graph.graph_break).filter(Boolean), ...report.other_breaks];
  const failed = report.graphs.filter((graph) => graph.failure);
  if (!places.length && !failed.length) return null;
  return element(
    "section",
    {},
    element("h3", {}, "Where the program leaves its graphs"),
    failed.map((graph) =>
      element("p", { class: "card bad" }, `${graph.label} runs eagerly: ${graph.failure}`),
    ),
    places.map((each) =>
      element(
        "p",
        { class: "card" },
        `${each.whole ? "left to eager" : "graph break"} at ${each.place.text} (${each.place.operation}): ${each.reason}`,
      ),
    ),
  );
}
