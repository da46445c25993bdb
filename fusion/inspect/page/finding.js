"use strict";
// The outcome of a command: the text that it printed.

/** Returns the tab of the outcome of a command, if one wrote the page. */
function findingTabs() {
  const { finding } = report;
  if (finding === null) return [];
  const title = `${finding.command[0].toUpperCase()}${finding.command.slice(1)}`;
  return [["finding", title, showFinding]];
}

/** Shows the outcome of a command. */
function showFinding() {
  const { command, good, text } = report.finding;
  return element(
    "div",
    {},
    element("p", { class: good ? "good" : "bad" }, `fusion ${command}: exit code ${good ? 0 : 1}`),
    element("pre", { class: "finding" }, text),
  );
}
