"use strict";
// Lines of the program, of a kernel's source and of an artefact, side by side; a click on one shows the others.

/** Unpacks an artefact, which the page holds compressed. */
async function unpacked(artefact) {
  const bytes = Uint8Array.from(atob(artefact.packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** Creates a pane with numbered lines; `lines` are objects with a number, a text, and classes. */
function pane(head, lines, click) {
  const code = element(
    "div",
    { class: "code", tabindex: 0 },
    lines.map((line, k) =>
      element(
        "div",
        {
          "data-number": line.number ?? "",
          "data-line": line.gap ? null : k,
          class: line.classes ?? null,
          click: line.gap ? null : () => click(k),
        },
        line.text || " ",
      ),
    ),
  );
  return { node: element("div", { class: "pane" }, element("div", { class: "head" }, head), code), code };
}

/** Marks the lines of a pane for which `test` holds, and brings the first of them into view. */
function mark(code, test, scroll) {
  let first = null;
  for (const line of code.children) {
    const hit = line.dataset.line !== undefined && test(Number(line.dataset.line));
    line.classList.toggle("hit", hit);
    if (hit && first === null) first = line;
  }
  if (first !== null && scroll) code.scrollTop = first.offsetTop - code.offsetTop - code.clientHeight / 3;
}

const NEAR = 6;

const PROGRAM = "block program";

const STAGES = {
  s: "assembly",
  ttir: "Triton IR",
  ttgir: "Triton GPU IR",
  llir: "LLVM IR",
  ptx: "PTX",
  sass: "SASS",
  amdgcn: "AMD assembly",
};

/** Returns the lines of the program near those of a launch, as lines of a pane, with the place of each. */
function programLines(places) {
  const lines = [];
  for (const number of [...new Set(places.map((place) => place.file))]) {
    const file = report.files[number];
    const named = new Set(places.filter((place) => place.file === number).map((place) => place.line));
    lines.push({ gap: true, text: file.path || file.name, classes: "gap dim" });
    let last = null;
    const all = file.excerpts.flatMap((part) =>
      part.lines.map((text, k) => ({ number: part.first + k, text })),
    );
    for (const line of all.length
      ? all
      : [...named].map((line) => ({ number: line, text: "(not readable)" }))) {
      if (![...named].some((each) => Math.abs(each - line.number) <= NEAR)) continue;
      if (last !== null && line.number > last + 1) lines.push({ gap: true, text: "", classes: "gap dim" });
      lines.push({ ...line, file: number, classes: named.has(line.number) ? "kernel" : null });
      last = line.number;
    }
  }
  return lines.length ? lines : [{ gap: true, text: "no line of the program is known", classes: "dim" }];
}

/** The three panes of a launch: lines of the program, the source of its kernel, and an artefact of that. */
class Panes {
  constructor(graph, step, kernel) {
    Object.assign(this, { graph, step, kernel, artefact: null, lines: [] });
    this.program = programLines(placesOf(graph, step.operations));
    const source = kernel.source.split("\n").map((text, k) => ({
      number: k + 1,
      text,
      classes: step.lines[k]?.length ? "known" : null,
    }));
    this.holder = element("div", { class: "panes" });
    this.own = pane("Your lines", this.program, (k) => this.showProgram(k));
    this.written = pane(`Kernel (${kernel.target})`, source, (k) => this.showSource(k + 1, "source"));
    this.showStage(kernel.artefacts.length ? kernel.artefacts[kernel.artefacts.length - 1].stage : PROGRAM);
  }

  /** Shows a line of the source in all panes, scrolling all but the one it comes from; 0 shows those of the kernel. */
  showSource(number, from) {
    const { graph, step, program } = this;
    const places = placesOf(graph, step.lines[number - 1]?.length ? step.lines[number - 1] : step.operations);
    const isPlace = (k) => places.some((at) => at.file === program[k].file && at.line === program[k].number);
    mark(this.own.code, isPlace, true);
    mark(this.written.code, (k) => k + 1 === number, from !== "source");
    mark(this.artefact, (k) => number > 0 && this.lines[k] === number, from !== "artefact");
  }

  /** Shows the lines of the source that may compute the operations that come from a line of the program. */
  showProgram(k) {
    const { file, number } = this.program[k];
    const places = this.graph.operations.map((operation) => operation.place);
    const isOf = (operation) => places[operation].file === file && places[operation].line === number;
    const hits = new Set(this.step.lines.flatMap((own, line) => (own.some(isOf) ? [line + 1] : [])));
    mark(this.own.code, (line) => line === k, false);
    mark(this.written.code, (line) => hits.has(line + 1), true);
    mark(this.artefact, (line) => hits.has(this.lines[line]), true);
  }

  /** Shows an artefact, or the block program, in the third pane. */
  async showStage(stage) {
    const { kernel } = this;
    const artefact = kernel.artefacts.find((each) => each.stage === stage);
    const { text, lines } = artefact ? await unpacked(artefact) : { text: kernel.program, lines: [] };
    const stages = kernel.artefacts.map((each) => [each.stage, STAGES[each.stage] ?? each.stage]);
    const change = (value) => this.showStage(value);
    const head = ["Stage ", choice([[PROGRAM, PROGRAM], ...stages], stage, change, "stage")];
    const shown = text
      .split("\n")
      .map((line, k) => ({ number: k + 1, text: line, classes: lines[k] ? "known" : null }));
    const column = pane(head, shown, (k) => this.showSource(lines[k] ?? 0, "artefact"));
    Object.assign(this, { artefact: column.code, lines });
    refill(this.holder, this.own.node, this.written.node, column.node);
  }
}
