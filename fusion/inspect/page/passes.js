"use strict";
// The passes of the compilation: what each changed, and how long it took.

const passing = { changedOnly: false };

/** Shows the passes of each graph in their order. */
function showPasses() {
  const holder = element("div");
  function fill() {
    refill(
      holder,
      report.graphs.map((graph) => passesOf(graph)),
    );
  }
  const only = element("input", {
    type: "checkbox",
    checked: passing.changedOnly,
    change: (event) => {
      passing.changedOnly = event.target.checked;
      fill();
    },
  });
  fill();
  return element(
    "div",
    {},
    element("div", { class: "bar" }, element("label", {}, only, " only those that changed something")),
    holder,
  );
}

function passesOf(graph) {
  const passes = graph.passes.map((pass, order) => ({ ...pass, order }));
  if (!passes.length) {
    return element(
      "section",
      {},
      element("h3", {}, graph.label),
      element(
        "p",
        { class: "dim" },
        "No pass ran in this process: the graph comes from the cache, or from another process.",
      ),
    );
  }
  const total = sumKnown(passes.map((pass) => pass.milliseconds));
  const longest = Math.max(...passes.map((pass) => pass.milliseconds));
  const rows = passes.filter((pass) => pass.changed || !passing.changedOnly);
  const columns = [
    { title: "#", number: true, text: (pass) => pass.order + 1, by: (pass) => -pass.order },
    { title: "stage", text: (pass) => pass.stage, by: (pass) => pass.stage },
    { title: "pass", text: (pass) => pass.name, by: (pass) => pass.name },
    {
      title: "time",
      number: true,
      text: (pass) => `${pass.milliseconds.toFixed(1)} ms`,
      by: (pass) => pass.milliseconds,
    },
    { title: "", text: (pass) => bar(pass.milliseconds / longest) },
    {
      title: "changed",
      text: (pass) => changesOf(pass),
      by: (pass) => pass.added.count + pass.removed.count + pass.edited.count,
    },
  ];
  return element(
    "section",
    {},
    element("h3", {}, `${graph.label}: ${formatTime(total * 1e3)} in all`),
    table(columns, rows),
  );
}

/** Draws a share as a bar. */
function bar(share) {
  return drawn(
    "svg",
    { width: 80, height: 10, "aria-hidden": "true" },
    drawn("rect", { class: "read", width: Math.max(1, 80 * share), height: 10 }),
  );
}

function changesOf(pass) {
  const kinds = [
    ["+", "added", pass.added],
    ["−", "removed", pass.removed],
    ["~", "edited", pass.edited],
  ];
  const some = kinds.filter(([, , names]) => names.count);
  if (!some.length)
    return element(
      "span",
      { class: "dim" },
      pass.changed === null ? "" : pass.changed ? "changed" : "unchanged",
    );
  return element(
    "details",
    {},
    element("summary", {}, some.map(([sign, , names]) => `${sign}${names.count}`).join(" ")),
    some.map(([, word, names]) =>
      element(
        "p",
        {},
        element("span", { class: "dim" }, `${word}: `),
        names.names.join(", "),
        names.count > names.names.length ? ` and ${names.count - names.names.length} more` : "",
      ),
    ),
  );
}
