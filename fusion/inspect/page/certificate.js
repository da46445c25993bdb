"use strict";
// The certificate: the errors of launches on the user's inputs, and the rewrites on hostile ones.

/** Shows what was checked of the compiled program. */
function showCertificate() {
  const { certificate } = report;
  if (certificate === null)
    return element("p", { class: "empty" }, "Nothing was checked: fusion.explain(…, verify=True) certifies.");
  const broken = certificate.checks.filter((check) => check.faults.length).length;
  return element(
    "div",
    {},
    element(
      "p",
      { class: certificate.holds ? "good" : "bad" },
      certificate.holds ? "The certificate holds." : "The certificate does not hold.",
    ),
    certificate.note ? element("p", { class: "dim" }, certificate.note) : null,
    element(
      "details",
      { open: certificate.values.some((value) => !value.agrees) },
      element("summary", {}, `${formatCount(certificate.values.length, "result")} on the inputs of the program`),
      element(
        "ul",
        {},
        certificate.values.map((value) => element("li", { class: value.agrees ? null : "bad" }, value.text)),
      ),
    ),
    element("h3", {}, "What launches wrote, against float64 on their own operands"),
    table(launchColumns(), certificate.launches, { order: 4 }),
    element(
      "h3",
      {},
      `Rewrites and kernels on hostile inputs: ${formatCount(certificate.checks.length, "check")}, ${broken} broken`,
    ),
    table(checkColumns(), certificate.checks, { order: 3 }),
  );
}

/** Formats a relative error; what is not finite has none. */
function formatError(error) {
  return error === null ? "∞" : error === 0 ? "0" : error.toExponential(1);
}

function launchColumns() {
  const size = (key) => (row) => row[key] ?? Infinity;
  const error = (title, key) => ({
    title,
    number: true,
    text: (row) => formatError(row[key]),
    by: size(key),
  });
  return [
    { title: "kernel", text: (row) => breakable(row.kernel), by: (row) => row.kernel },
    { title: "tensor", text: (row) => row.tensor, by: (row) => row.tensor },
    error("error", "error"),
    error("by its dtypes", "rounding"),
    error("contributes", "contribution"),
    { title: "to", text: (row) => row.result, by: (row) => row.result },
    {
      title: "is",
      text: (row) => element("span", { class: row.right ? "good" : "bad" }, row.right ? "right" : "wrong"),
      by: (row) => Number(!row.right),
    },
    { title: "operations", text: (row) => row.origins.join("; "), by: (row) => row.origins.join("; ") },
  ];
}

function checkColumns() {
  return [
    { title: "pass", text: (row) => row.name, by: (row) => row.name },
    { title: "operations", text: (row) => row.origins.join("; "), by: (row) => row.origins.join("; ") },
    {
      title: "inputs",
      number: true,
      text: (row) => element("span", { title: row.tried.join("\n") }, row.tried.length),
      by: (row) => row.tried.length,
    },
    {
      title: "finding",
      text: (row) => findingOf(row),
      by: (row) => row.faults.length * 2 + Number(row.reason !== ""),
    },
  ];
}

function findingOf(row) {
  if (row.reason) return element("span", { class: "dim" }, `not checked: ${row.reason}`);
  if (!row.faults.length) return element("span", { class: "good" }, "holds");
  return element("ul", { class: "bad" }, row.faults.map((fault) => element("li", {}, fault)));
}
