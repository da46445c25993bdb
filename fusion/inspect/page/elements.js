"use strict";
// Elements of the page.  All text is set as text, never as markup: names come from the program.

const SVG = "http://www.w3.org/2000/svg";

/** Creates an element.  Attributes whose values are functions are listeners; null and false leave one out. */
function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** Creates an element of a drawing. */
function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(key, value);
    else if (value !== null && value !== false) node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null));
  return node;
}

/** Replaces what a node holds. */
function refill(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null));
  return node;
}

/** Creates a button that looks like a link. */
function link(text, click) {
  return element("button", { type: "button", class: "link", click }, text);
}

/** Returns a name that may be broken into lines after `_` and `.`. */
function breakable(name) {
  return name.split(/(?<=[_.])/).flatMap((part, k) => (k ? [element("wbr"), part] : [part]));
}

/** Creates a figure of the summary: a number with its meaning. */
function figure(number, meaning) {
  return element("span", { class: "figure" }, element("b", {}, number), " ", element("span", {}, meaning));
}

const SHOWN = 300;

/**
 * Creates a table that is sorted by a click on a head, and shows more rows on request.
 * A column has a title, `text` (of a row, or a node), and for sorting `by`; `number` aligns it.
 */
function table(columns, rows, { open = null, order = 0, chosen = null } = {}) {
  const body = element("tbody");
  const state = { column: order, reversed: false, shown: SHOWN };
  const more = element("button", { type: "button" });
  function fill() {
    const by = columns[state.column]?.by;
    const all = by ? sorted(rows, by, state.reversed) : rows;
    refill(
      body,
      all.slice(0, state.shown).map((row) => tableRow(columns, row, open, chosen)),
    );
    more.textContent = `${all.length - state.shown} more rows`;
    more.hidden = all.length <= state.shown;
  }
  function sort(k) {
    state.reversed = state.column === k && !state.reversed;
    state.column = k;
    fill();
  }
  more.addEventListener("click", () => {
    state.shown += SHOWN;
    fill();
  });
  fill();
  const heads = columns.map((column, k) => tableHead(column, () => sort(k)));
  return element("div", {}, element("table", {}, element("thead", {}, element("tr", {}, heads)), body), more);
}

function tableRow(columns, row, open, chosen) {
  const cells = columns.map((column) =>
    element("td", { class: column.number ? "number" : (column.kind ?? null) }, column.text(row)),
  );
  const kind = chosen?.(row) ? "chosen" : "";
  if (!open) return element("tr", { class: kind }, cells);
  const keydown = (event) => {
    if (event.key === "Enter") open(row);
  };
  return element("tr", { class: `open ${kind}`, click: () => open(row), tabindex: 0, keydown }, cells);
}

function tableHead(column, click) {
  const title = column.by ? element("button", { type: "button", click }, column.title) : column.title;
  return element("th", { class: column.number ? "number" : null }, title);
}

/** Creates a choice; `options` are pairs of a value and a text. */
function choice(options, value, change, label) {
  return element(
    "select",
    { "aria-label": label, change: (event) => change(event.target.value) },
    options.map(([key, text]) =>
      element("option", { value: key, selected: String(key) === String(value) }, text),
    ),
  );
}
