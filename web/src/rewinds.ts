// What `Rewind` did: the steps whose loss ran away, and the step that the training went back to.

import type { LedgerData } from "./data";
import { h, section, svg } from "./dom";
import { count, plural, short, visible } from "./format";

interface Way {
  run: string;
  to: number;
  first: number;
  last: number;
  /** The largest loss of each suspect step that has one. */
  losses: Map<number, number>;
  message: string;
}

const WIDTH = 640;
const HEIGHT = 84;
const SHOWN = 8;

/** The rewinds of a ledger, in the order of time. */
export function rewindsOf(ledger: LedgerData): Way[] {
  const { text, numbers, loss } = ledger.incidents;
  const ways = new Map<string, Way>();
  for (let row = 0; row < ledger.incidents.count; row++) {
    const step = numbers.step[row]!;
    if (text.stage.at(row) !== "step" || text.cause.at(row) !== "loss spike" || Number.isNaN(step)) continue;
    const to = goal(text.details.at(row));
    if (to === null) continue;
    const key = `${text.run.at(row)} ${text.details.at(row)}`;
    const way = ways.get(key) ?? { run: text.run.at(row) ?? "", to, first: step, last: step, losses: new Map(), message: text.message.at(row) ?? "" };
    ways.set(key, way);
    way.first = Math.min(way.first, step);
    way.last = Math.max(way.last, step);
    const value = loss[row];
    if (typeof value === "number") way.losses.set(step, Math.max(value, way.losses.get(step) ?? -Infinity));
  }
  return [...ways.values()];
}

function goal(details: string | null): number | null {
  try {
    const to = JSON.parse(details ?? "")["rewound_to"];
    return typeof to === "number" ? to : null;
  } catch {
    return null;
  }
}

export function rewindsSection(ledger: LedgerData): HTMLElement | null {
  const ways = rewindsOf(ledger);
  if (!ways.length) return null;
  const entries = ways.slice(-SHOWN).map((way) => h("li", {}, h("p", {}, h("strong", {}, `Back to step ${count(way.to)}`), ` without steps ${count(way.first)} to ${count(way.last)}`), h("p", { class: "note" }, visible(way.message)), picture(way)));
  const lead = ways.length > SHOWN ? `the newest ${SHOWN} of ${count(ways.length)}` : plural(ways.length, "time");
  return section("rewinds", "Rewinds", `the loss ran away, and the training went back: ${lead}`, h("ol", { class: "rewinds" }, ...entries));
}

/** Steps from left to right; the losses of the suspects as columns, and the way back above them. */
function picture(way: Way): SVGSVGElement {
  const span = Math.max(1, way.last - way.to + 1);
  const x = (step: number): number => 40 + ((WIDTH - 80) * (step - way.to)) / span;
  const highest = Math.max(...way.losses.values(), 1e-12);
  const base = HEIGHT - 22;
  const columns = [...way.losses].map(([step, loss]) => {
    const height = Math.max(2, (base - 26) * (loss / highest));
    return svg("rect", { x: x(step) - 3, y: base - height, width: 6, height, class: "spike" }, svg("title", {}, `step ${count(step)}: loss ${short(loss)}`));
  });
  return svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "way", role: "img", "aria-label": `From step ${way.last} back to step ${way.to}; largest loss ${short(highest)}` },
    svg("line", { x1: x(way.to), x2: x(way.last + 1), y1: base, y2: base, class: "steps" }),
    ...columns,
    svg("path", { d: `M${x(way.last).toFixed(1)},18 Q${((x(way.last) + x(way.to)) / 2).toFixed(1)},2 ${x(way.to).toFixed(1)},${base - 10}`, class: "back" }),
    svg("path", { d: `M${x(way.to).toFixed(1)},${base - 2}l-4,-9h8z`, class: "tip" }),
    svg("text", { x: x(way.to), y: HEIGHT - 6, "text-anchor": "middle" }, count(way.to)),
    svg("text", { x: x(way.last), y: HEIGHT - 6, "text-anchor": "middle" }, count(way.last)),
    way.losses.size ? svg("text", { x: x(way.last) + 8, y: 14 }, short(highest)) : null,
  );
}
