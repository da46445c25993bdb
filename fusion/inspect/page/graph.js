"use strict";
// The graph before and after fusion: boxes that open, edges that say why they are there; pan, zoom.

/** Shows a view of a graph; `chosen` is [graph, "before" or "after", key of the view, an item of it]. */
function showGraph(chosen) {
  const g = report.graphs[chosen[0]] ? Number(chosen[0]) : 0;
  const when = chosen[1] === "before" ? "before" : "after";
  if (!report.graphs.length) return element("p", { class: "empty" }, "Nothing was compiled.");
  const tree = views[g][when];
  const item = chosen[3] === undefined || chosen[3] === "" ? null : Number(chosen[3]);
  const key = tree[chosen[2]] ? chosen[2] : viewWith(tree, item);
  const view = tree[key];
  const side = element("div", {});
  const options = report.graphs.map((graph, k) => [k, `${k + 1}: ${graph.label}`]);
  const whens = [
    ["before", `before: ${formatCount(report.graphs[g].operations.length, "operation")}`],
    ["after", `after: ${formatCount(report.graphs[g].steps.length, "step")}`],
  ];
  const drawing = drawView(g, when, view, item, side);
  if (item === null) refill(side, element("p", { class: "dim" }, hintOf(when)));
  return element(
    "div",
    {},
    element(
      "div",
      { class: "bar" },
      choice(options, g, (value) => go("graph", value, when), "graph"),
      whens.map(([name, text]) =>
        element(
          "button",
          { type: "button", "aria-pressed": name === when, click: () => go("graph", g, name) },
          name === when ? `● ${text}` : text,
        ),
      ),
      trail(g, when, tree, key),
      element("span", { class: "dim" }, "drag to pan, wheel to zoom, double click for all"),
    ),
    element("div", { class: "graph" }, drawing, side),
  );
}

function hintOf(when) {
  return when === "before"
    ? "Click an operation: all that share a kernel with it are marked. A thick box is a module, which opens."
    : "Click a kernel or a call. A red edge was refused: click it for the reason, and what it would take.";
}

/** Returns the innermost view that has an item as a box of its own. */
function viewWith(tree, item) {
  const own = (view) => view.boxes.some((box) => box.item === item && box.count === 1);
  return Object.keys(tree).find((key) => own(tree[key])) ?? "0";
}

/** Links to the views around a view. */
function trail(g, when, tree, key) {
  const keys = [];
  for (let at = key; at !== null; at = tree[at].parent) keys.unshift(at);
  return keys
    .map((at) => [link(tree[at].title, () => go("graph", g, when, at)), " / "])
    .flat()
    .slice(0, -1);
}

/** Returns the hue of a step: equal kernels have equal ones. */
function hueOf(g, s) {
  const step = report.graphs[g].steps[s];
  return step.kernel === null ? null : (step.kernel * 137.5) % 360;
}

function drawView(g, when, view, item, side) {
  const graph = report.graphs[g];
  const canvas = drawn("svg", { role: "img", "aria-label": `the graph ${when} fusion` });
  const boxes = view.boxes.map((box) => drawBox(g, when, box));
  const lines = view.lines.map((line) => drawLine(g, when, view, line));
  const clear = () =>
    [canvas, ...boxes, ...lines].forEach((each) => each.classList.remove("chosen", "mate", "picking"));

  function choose(k) {
    const box = view.boxes[k];
    if (box.view !== null) return go("graph", g, when, box.view);
    if (box.count === 0) return go("graph", g, when, "", box.item);
    clear();
    boxes[k].classList.add("chosen");
    if (when === "before") {
      const own = graph.operations[box.item].steps;
      canvas.classList.toggle("picking", own.length > 0);
      view.boxes.forEach((other, m) => {
        const mates =
          other.item !== null && m !== k && graph.operations[other.item].steps.some((s) => own.includes(s));
        boxes[m].classList.toggle("mate", mates);
      });
    }
    return refill(side, when === "before" ? operationCard(g, box.item) : stepCard(g, box.item));
  }
  boxes.forEach((node, k) => {
    node.addEventListener("click", () => choose(k));
    node.addEventListener("keydown", (event) => {
      if (event.key === "Enter") choose(k);
    });
  });
  lines.forEach((node, k) =>
    node.addEventListener("click", () => {
      clear();
      node.classList.add("chosen");
      refill(side, edgeCard(g, when, view, view.lines[k]));
    }),
  );
  canvas.append(...lines, ...boxes);
  new Camera(canvas, view);
  const start = view.boxes.findIndex((box) => item !== null && box.item === item && box.count === 1);
  if (start >= 0) choose(start);
  return canvas;
}

function drawBox(g, when, box) {
  const steps =
    when === "before" && box.item !== null
      ? report.graphs[g].operations[box.item].steps
      : box.item === null
        ? []
        : [box.item];
  const hue = box.count === 1 && steps.length ? hueOf(g, steps[0]) : null;
  const frame = { x: -box.width / 2, y: -14, width: box.width, height: 28 };
  const tint = drawn("rect", frame);
  if (hue !== null) tint.style.stroke = `hsl(${hue} 65% 50%)`;
  if (hue !== null) tint.style.fill = `hsl(${hue} 65% 50% / 0.18)`;
  const label = box.count > 1 ? `${box.label} (${box.count})` : box.label;
  const kind = box.view !== null ? "part" : box.count === 0 ? "outside" : "";
  return drawn(
    "g",
    { class: `box ${kind}`, transform: `translate(${box.x} ${box.y})`, tabindex: 0 },
    drawn("rect", frame),
    tint,
    drawn("text", { "text-anchor": "middle", y: 4 }, label),
    drawn("title", {}, label),
  );
}

function drawLine(g, when, view, line) {
  const refused = when === "after" && refusalsOf(g, view, line).length > 0;
  const points = line.points.map(([x, y]) => [x, y]);
  const path = points.slice(1).reduce(
    (text, [x, y], k) => {
      const [px, py] = points[k];
      const middle = (py + y) / 2;
      return `${text} C ${px} ${middle} ${x} ${middle} ${x} ${y}`;
    },
    `M ${points[0].join(" ")}`,
  );
  return drawn(
    "path",
    { class: refused ? "edge refused" : "edge", d: path },
    drawn("title", {}, line.tensors.join(", ")),
  );
}

/** Returns the refusals between the steps of two boxes. */
function refusalsOf(g, view, line) {
  const [start, end] = [view.boxes[line.start].item, view.boxes[line.end].item];
  if (start === null || end === null) return [];
  return report.graphs[g].refusals.filter((each) => each.from_step === start && each.to_step === end);
}

function edgeCard(g, when, view, line) {
  const [start, end] = [view.boxes[line.start], view.boxes[line.end]];
  const refusals = when === "after" ? refusalsOf(g, view, line) : [];
  return element(
    "div",
    {},
    element("h2", {}, `${start.label} → ${end.label}`),
    element("p", {}, `Tensors: ${line.tensors.join(", ")}`),
    refusals.map((each) => refusalCard(g, each)),
  );
}

function operationCard(g, k) {
  const graph = report.graphs[g];
  const operation = graph.operations[k];
  const steps = operation.steps.map((s) =>
    element(
      "p",
      {},
      "Computed by ",
      link(graph.steps[s].name, () => openStep(g, s)),
    ),
  );
  return element(
    "div",
    {},
    element("h2", {}, operation.name),
    element("p", {}, operation.place.text, element("span", { class: "dim" }, ` ${operation.place.module}`)),
    steps.length ? steps : element("p", { class: "dim" }, "A view: nothing computes it."),
    element(
      "p",
      { class: "dim" },
      `alone: reads ${formatBytes(operation.bytes_read)}, writes ${formatBytes(operation.bytes_written)}`,
    ),
    element(
      "div",
      { class: "code plain" },
      operation.text.split("\n").map((text) => element("div", {}, text)),
    ),
  );
}

function stepCard(g, s) {
  const step = report.graphs[g].steps[s];
  return element(
    "div",
    {},
    element("h2", {}, step.name),
    element(
      "p",
      {},
      figure(formatTime(step.predicted), "predicted"),
      " ",
      step.measured === null ? null : figure(formatTime(step.measured), "measured"),
    ),
    element(
      "p",
      {},
      link("its source, and the lines of your program", () => openStep(g, s)),
    ),
    step.kind === "call" ? callOf(step) : null,
    element("h3", {}, "Why not one kernel with its neighbours?"),
    neighboursOf(g, s),
  );
}
