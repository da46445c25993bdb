"use strict";
// The page: its data, its tabs, and the address of what is shown.

const { report, views } = JSON.parse(document.getElementById("data").textContent);

const TABS = [
  ...findingTabs(),
  ["kernels", "Kernels", showKernels],
  ["graph", "Graph", showGraph],
  ["refusals", "Not fused", showRefusals],
  ["passes", "Passes", showPasses],
  ["traffic", "Traffic, memory, roofline", showTraffic],
  ["certificate", "Certificate", showCertificate],
];

/** Goes to a tab, and to what the other arguments name in it. */
function go(tab, ...rest) {
  const address = `#${[tab, ...rest].map((part) => encodeURIComponent(part)).join("/")}`;
  if (location.hash === address) show();
  else location.hash = address;
}

/** Shows what the address names. */
function show() {
  const [tab, ...rest] = location.hash.slice(1).split("/").map(decodeURIComponent);
  const [name, , draw] = TABS.find(([key]) => key === tab) ?? TABS[0];
  const list = document.querySelector(".list");
  const before = list ? list.scrollTop : 0;
  refill(document.getElementById("main"), draw(rest));
  const after = document.querySelector(".list");
  if (after) after.scrollTop = before;
  for (const button of document.getElementById("tabs").children) {
    button.setAttribute("aria-selected", String(button.dataset.tab === name));
  }
}

/** Fills the head of the page. */
function summarize() {
  const rows = rowsOfSteps(report.graphs);
  const kernels = rows.filter((row) => row.kind === "kernel");
  const launches = sumKnown(kernels.map((row) => row.launches.length)) ?? 0;
  const calls = sumKnown(rows.filter((row) => row.kind === "call").map((row) => row.launches.length)) ?? 0;
  const operations = sumKnown(report.graphs.map((graph) => graph.operations.length)) ?? 0;
  const moved = (when) => sumKnown(report.graphs.map((graph) => graph[when].read + graph[when].written)) ?? 0;
  const [predicted, measured] = ["predicted", "measured"].map((key) =>
    sumKnown(kernels.map((row) => row[key])),
  );
  refill(
    document.getElementById("summary"),
    figure(report.graphs.length, report.graphs.length === 1 ? "graph" : "graphs"),
    figure(operations, "operations"),
    figure(launches, `launches of ${formatCount(kernels.length, "kernel")}`),
    figure(calls, "library calls"),
    figure(`${formatBytes(moved("traffic_before"))} → ${formatBytes(moved("traffic_after"))}`, "moved"),
    figure(formatTime(predicted), "predicted in kernels"),
    measured === null ? null : figure(formatTime(measured), "measured"),
  );
}

function switchTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const root = document.documentElement;
  const now = root.dataset.theme ?? (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
}

refill(
  document.getElementById("tabs"),
  TABS.map(([key, title]) =>
    element("button", { type: "button", role: "tab", "data-tab": key, click: () => go(key) }, title),
  ),
);
document.getElementById("theme").addEventListener("click", switchTheme);
addEventListener("hashchange", show);
summarize();
show();
