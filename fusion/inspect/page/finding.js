"use strict";
// What a command found: the text that it printed.

/** Returns the tab of what a command found, if one wrote the page. */
function findingTabs() {
  const { finding } = report;
  if (finding === null) return [];
  const title = `${finding.command[0].toUpperCase()}${finding.command.slice(1)}`;
  return [["finding", title, showFinding]];
}

/** Shows what a command found. */
function showFinding() {
  const { command, good, text } = report.finding;
  return element(
    "div",
    {},
    element("p", { class: good ? "good" : "bad" }, `fusion ${command}: exit code ${good ? 0 : 1}`),
    element("pre", { class: "finding" }, text),
  );
}
