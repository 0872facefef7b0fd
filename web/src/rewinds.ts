// What `Rewind` did: the steps whose loss ran away, and the step that the training went back to.

import type { LedgerData } from "./data";
import { h, section, svg } from "./dom";
import { count, plural, short, visible } from "./format";

interface RewindData {
  run: string;
  to: number;
  first: number;
  last: number;
  /** The largest loss of each suspect step that has one. */
  losses: Map<number, number>;
  message: string;
}

const WIDTH = 640;
const HEIGHT = 92;
const SHOWN = 8;

/** The rewinds of a ledger, in the order of time. */
export function rewindsOf(ledger: LedgerData): RewindData[] {
  const { text, numbers, loss } = ledger.incidents;
  const rewinds = new Map<string, RewindData>();
  for (let row = 0; row < ledger.incidents.count; row++) {
    const step = numbers.step[row]!;
    if (text.stage.at(row) !== "step" || text.cause.at(row) !== "loss spike" || Number.isNaN(step)) continue;
    const to = goal(text.details.at(row));
    if (to === null) continue;
    const key = `${text.run.at(row)} ${text.details.at(row)}`;
    const rewind = rewinds.get(key) ?? { run: text.run.at(row) ?? "", to, first: step, last: step, losses: new Map(), message: text.message.at(row) ?? "" };
    rewinds.set(key, rewind);
    rewind.first = Math.min(rewind.first, step);
    rewind.last = Math.max(rewind.last, step);
    const value = loss[row];
    if (typeof value === "number") rewind.losses.set(step, Math.max(value, rewind.losses.get(step) ?? -Infinity));
  }
  return [...rewinds.values()];
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
  const rewinds = rewindsOf(ledger);
  if (!rewinds.length) return null;
  const entries = rewinds.slice(-SHOWN).map((rewind) => h("li", {}, h("p", {}, h("strong", {}, `Back to step ${count(rewind.to)}`), ` without steps ${count(rewind.first)} to ${count(rewind.last)}`), h("p", { class: "note" }, visible(rewind.message)), picture(rewind)));
  const lead = rewinds.length > SHOWN ? `the newest ${SHOWN} of ${count(rewinds.length)}` : plural(rewinds.length, "time");
  return section("rewinds", "Rewinds", `the loss ran away, and the training went back: ${lead}`, h("ol", { class: "rewinds" }, ...entries));
}

/** Steps from left to right; the losses of the suspects as columns, and the arc back above them. */
function picture(rewind: RewindData): SVGSVGElement {
  const span = Math.max(1, rewind.last - rewind.to + 1);
  const x = (step: number): number => 40 + ((WIDTH - 80) * (step - rewind.to)) / span;
  const highest = Math.max(...rewind.losses.values(), 1e-12);
  const base = HEIGHT - 26;
  const columns = [...rewind.losses].map(([step, loss]) => {
    const height = Math.max(2, (base - 30) * (loss / highest));
    return svg("rect", { x: x(step) - 3, y: base - height, width: 6, height, class: "spike" }, svg("title", {}, `step ${count(step)}: loss ${short(loss)}`));
  });
  return svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "rewind-chart", role: "img", "aria-label": `From step ${rewind.last} back to step ${rewind.to}; largest loss ${short(highest)}` },
    svg("line", { x1: x(rewind.to), x2: x(rewind.last + 1), y1: base, y2: base, class: "steps" }),
    ...columns,
    svg("path", { d: `M${x(rewind.last).toFixed(1)},24 Q${((x(rewind.last) + x(rewind.to)) / 2).toFixed(1)},6 ${x(rewind.to).toFixed(1)},${base - 10}`, class: "back" }),
    svg("path", { d: `M${x(rewind.to).toFixed(1)},${base - 2}l-4,-9h8z`, class: "tip" }),
    svg("text", { x: x(rewind.to), y: HEIGHT - 4, "text-anchor": "middle" }, count(rewind.to)),
    svg("text", { x: x(rewind.last), y: HEIGHT - 4, "text-anchor": "middle" }, count(rewind.last)),
    rewind.losses.size ? svg("text", { x: x(rewind.last), y: 18, "text-anchor": "middle" }, short(highest)) : null,
  );
}
