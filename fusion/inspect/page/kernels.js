"use strict";
// The list of launches and calls, equal ones as one row, and what is known of one of them.

const MOST_CARDS = 20;

/** Shows all rows, and the launch that `chosen` names as [row's key, number of its launch]. */
function showKernels(chosen) {
  const rows = sorted(rowsOfSteps(report.graphs), costOf, false);
  if (!rows.length) return element("p", { class: "empty" }, "Nothing was launched.");
  const [key, number] = [chosen[0] ?? rows[0].key, Number(chosen[1] ?? 0)];
  const row = rows.find((each) => each.key === key) ?? rows[0];
  const columns = [
    {
      title: "kernel or call",
      text: (each) => element("span", { class: each.kind === "call" ? "dim" : null }, breakable(each.name)),
      by: (each) => each.name,
    },
    { title: "×", number: true, text: (each) => each.launches.length, by: (each) => each.launches.length },
    { title: "predicted", number: true, text: (each) => formatTime(each.predicted), by: costOf },
    ...(rows.some((each) => each.measured !== null)
      ? [
          {
            title: "measured",
            number: true,
            text: (each) => formatTime(each.measured),
            by: (each) => each.measured,
          },
        ]
      : []),
    {
      title: "bytes",
      number: true,
      text: (each) => formatBytes(each.read + each.written),
      by: (each) => each.read + each.written,
    },
  ];
  const list = table(columns, rows, {
    open: (each) => go("kernels", each.key, 0),
    order: 2,
    chosen: (each) => each.key === row.key,
  });
  return element("div", { class: "columns" }, element("div", { class: "list" }, list), detailOf(row, number));
}

/** Shows one launch of a row. */
function detailOf(row, number) {
  const [g, s] = row.launches[number] ?? row.launches[0];
  const [graph, step] = [report.graphs[g], report.graphs[g].steps[s]];
  const kernel = step.kernel === null ? null : report.kernels[step.kernel];
  const lines = () => pane("Your lines", programLines(placesOf(graph, step.operations)), () => {}).node;
  const operations = step.operations.map((k) => [
    link(graph.operations[k].name, () => go("graph", g, "before", "", k)),
    " ",
  ]);
  return element(
    "div",
    { class: "detail" },
    element("h2", {}, breakable(row.name)),
    element(
      "div",
      { class: "bar" },
      launchChoice(row, number),
      figuresOf(step),
      link("in the graph", () => go("graph", g, "after", "", s)),
    ),
    step.price ? priceOf(step.price) : null,
    step.kind === "call" ? callOf(step) : null,
    kernel && kernel.failed ? element("p", { class: "card bad" }, kernel.failed) : null,
    kernel ? new Panes(graph, step, kernel).holder : lines(),
    element("h3", {}, "Operations"),
    element("p", {}, operations.flat()),
    element("h3", {}, "Why is this not one kernel with its neighbours, and what would it take?"),
    neighboursOf(g, s),
  );
}

/** Creates the choice between the launches of a row. */
function launchChoice(row, number) {
  const options = row.launches.map(([g, s], k) => {
    const { label, steps } = report.graphs[g];
    const parts = [`${k + 1} of ${row.launches.length}`, label, steps[s].place.module, steps[s].place.text];
    return [k, parts.filter(Boolean).join(", ")];
  });
  return choice(options, number, (value) => go("kernels", row.key, value), "launch");
}

/** Shows times and bytes of a step. */
function figuresOf(step) {
  const { predicted, measured } = step;
  return [
    figure(formatTime(predicted), "predicted"),
    measured === null ? null : figure(formatTime(measured), "measured"),
    measured && predicted ? figure((measured / predicted).toFixed(2), "measured ÷ predicted") : null,
    figure(formatBytes(step.bytes_read), "read"),
    figure(formatBytes(step.bytes_written), "written"),
    step.runs > 1 ? figure(step.runs, "runs") : null,
  ];
}

/** Shows the predicted time of a launch by part, as a bar. */
function priceOf(price) {
  const parts = ["launch", "memory", "products", "scalars", "epilogue"].filter((part) => price[part] > 0);
  const texts = parts.map((part) => `${part} ${formatTime(price[part])}`);
  if (price.hidden > 0) texts.push(`overlapping ${formatTime(price.hidden)}`);
  return element(
    "p",
    { class: "dim" },
    `Predicted of one launch: ${texts.join(", ")}; most of it ${price.bound}.`,
  );
}

function callOf(step) {
  return element(
    "div",
    { class: "card" },
    element("p", {}, `A call of the library: ${step.reason}.`),
    element("p", { class: "take" }, `To generate it: ${step.remedy}`),
  );
}

/** Shows the refused edges of a step. */
function neighboursOf(g, s) {
  const graph = report.graphs[g];
  const refusals = graph.refusals.filter((each) => each.from_step === s || each.to_step === s);
  if (!refusals.length) {
    return element(
      "p",
      { class: "dim" },
      "No edge between this step and another one is in the ledger of refusals.",
    );
  }
  const rest = refusals.length - MOST_CARDS;
  const more = () => {
    ledger.query = graph.steps[s].name;
    go("refusals");
  };
  return element(
    "div",
    {},
    refusals.slice(0, MOST_CARDS).map((refusal) => refusalCard(g, refusal, s)),
    rest > 0 ? link(`${rest} more in the ledger`, more) : null,
  );
}

/** Shows one refusal, with links to the steps at its ends, but to that at which the reader is. */
function refusalCard(g, refusal, here = null) {
  const graph = report.graphs[g];
  const end = (s) =>
    s === null ? "a value that no kernel computes" : s === here ? "this one" : link(graph.steps[s].name, () => openStep(g, s));
  return element(
    "div",
    { class: "card" },
    element(
      "p",
      {},
      element("b", {}, formatTime(refusal.microseconds)),
      ` (${formatBytes(refusal.bytes)}) `,
      `${refusal.producer} → ${refusal.consumer}, from `,
      end(refusal.from_step),
      " to ",
      end(refusal.to_step),
      element("span", { class: "dim" }, ` ${refusal.place.text}`),
    ),
    element("p", {}, `Why: ${refusal.reason}.`),
    element("p", { class: "take" }, `What it would take: ${refusal.remedy}`),
  );
}

/** Opens a step of a graph in the list of kernels. */
function openStep(g, s) {
  const row = rowsOfSteps(report.graphs).find((each) =>
    each.launches.some(([og, os]) => og === g && os === s),
  );
  go(
    "kernels",
    row.key,
    row.launches.findIndex(([og, os]) => og === g && os === s),
  );
}
