"use strict";
// Figures of a report, without the page: formats, sums, groups and searches.

/** Formats microseconds. */
function formatTime(microseconds) {
  if (microseconds === null || microseconds === undefined) return "–";
  if (microseconds >= 1e6) return `${(microseconds / 1e6).toFixed(2)} s`;
  if (microseconds >= 1e3) return `${(microseconds / 1e3).toFixed(2)} ms`;
  return `${microseconds.toFixed(microseconds < 10 ? 2 : 1)} µs`;
}

/** Formats a number of bytes. */
function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return unit === 0 ? `${bytes} B` : `${bytes.toFixed(1)} ${units[unit]}`;
}

/** Formats a count with its noun. */
function formatCount(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

/** Adds numbers of which some may be unknown: unknown if all are. */
function sumKnown(numbers) {
  const known = numbers.filter((number) => number !== null && number !== undefined);
  return known.length ? known.reduce((sum, number) => sum + number, 0) : null;
}

/** Returns launches and calls, equal ones as one row with all of its places. */
function rowsOfSteps(graphs) {
  const rows = new Map();
  graphs.forEach((graph, g) =>
    graph.steps.forEach((step, s) => {
      const key = step.kind === "kernel" ? `kernel ${step.kernel}` : `call ${step.name} ${step.reason}`;
      if (!rows.has(key))
        rows.set(key, { key, kind: step.kind, kernel: step.kernel, name: step.name, launches: [] });
      rows.get(key).launches.push([g, s]);
    }),
  );
  const steps = (row) => row.launches.map(([g, s]) => graphs[g].steps[s]);
  return [...rows.values()].map((row) => ({
    ...row,
    predicted: sumKnown(steps(row).map((step) => step.predicted)),
    measured: sumKnown(steps(row).map((step) => step.measured)),
    read: sumKnown(steps(row).map((step) => step.bytes_read)),
    written: sumKnown(steps(row).map((step) => step.bytes_written)),
    flops: sumKnown(steps(row).map((step) => step.flops)),
  }));
}

/** Returns the cost by which a row of steps is sorted: measured, predicted, or else its bytes as a fraction. */
function costOf(row) {
  return row.measured ?? row.predicted ?? (row.read + row.written) * 1e-12;
}

/** Returns whether all words of a query are in a text, in any case. */
function matches(query, text) {
  const folded = text.toLowerCase();
  return query
    .toLowerCase()
    .split(/\s+/)
    .every((word) => folded.includes(word));
}

/** Returns refusals of all graphs, with the places of their graphs; equal ones are one row if `grouped`. */
function rowsOfRefusals(graphs, grouped) {
  const rows = new Map();
  graphs.forEach((graph, g) =>
    graph.refusals.forEach((refusal, r) => {
      const ends = [refusal.from_step, refusal.to_step].map((s) => (s === null ? "–" : graph.steps[s].name));
      const plain = refusal.reason.replace(/[\d.]+/g, "#");
      const key = grouped ? [plain, ...ends, refusal.place.text].join("\n") : `${g} ${r}`;
      if (!rows.has(key))
        rows.set(key, { ...refusal, graph: g, ends, count: 0, bytes: 0, microseconds: 0, worst: -1 });
      const row = rows.get(key);
      row.count += 1;
      row.bytes += refusal.bytes;
      row.microseconds += refusal.microseconds;
    }),
  );
  return [...rows.values()];
}

/** Returns the text of a refusal that a search looks in. */
function textOfRefusal(row) {
  return [
    row.producer,
    row.consumer,
    row.reason,
    row.remedy,
    row.place.text,
    row.place.module,
    ...row.ends,
  ].join(" ");
}

/** Sorts rows by a function, numbers descending and texts ascending, or the other way round if `reversed`. */
function sorted(rows, by, reversed) {
  const sign = reversed ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [x, y] = [by(a), by(b)];
    if (typeof x === "string") return sign * x.localeCompare(y);
    return sign * ((y ?? -Infinity) === (x ?? -Infinity) ? 0 : (y ?? -Infinity) - (x ?? -Infinity));
  });
}

/** Returns bytes per microsecond of a device for a launch that touches some bytes: between points on log scales. */
function bandwidthAt(curve, bytes) {
  if (bytes <= curve[0][0]) return curve[0][1];
  for (let k = 1; k < curve.length; k += 1) {
    const [[least, fast], [most, slow]] = [curve[k - 1], curve[k]];
    if (bytes <= most) {
      const part = Math.log(bytes / least) / Math.log(most / least);
      return Math.exp((1 - part) * Math.log(fast) + part * Math.log(slow));
    }
  }
  return curve[curve.length - 1][1];
}

/** Returns, of the operations that a line of a kernel's source may compute, the lines of the program. */
function placesOf(graph, operations) {
  const places = operations.map((k) => graph.operations[k].place).filter((place) => place.line !== null);
  return [...new Map(places.map((place) => [`${place.file}:${place.line}`, place])).values()];
}
