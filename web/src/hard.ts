// The samples with the largest losses, and those whose loss is high and does not fall: often wrong labels.

import type { HardSample } from "./data";
import { h, section, svg } from "./dom";
import { count, plural, short, visible } from "./format";
import type { Selection } from "./selection";

const WIDTH = 300;
const HEIGHT = 30;

export function hardSection(selection: Selection, show: () => void): HTMLElement | null {
  const { hard, incidents } = selection.ledger;
  if (!hard) return null;
  const known = new Set(incidents.text.sample.words);
  const highest = Math.max(hard.median, ...hard.listed.flatMap((one) => one.losses), 1e-12);
  const lowest = Math.min(0, hard.median, ...hard.listed.flatMap((one) => one.losses));
  const row = (one: HardSample): HTMLElement =>
    h(
      "tr",
      {},
      h("th", { scope: "row", class: "mono clip from-the-end", title: visible(one.sample) }, known.has(one.sample) ? link(one.sample, selection, show) : h("bdi", {}, visible(one.sample))),
      h("td", { class: "number" }, short(one.recent)),
      h("td", { class: "losses" }, chart(one, hard.median, lowest, highest)),
      h("td", { class: "number seen" }, count(one.losses.length)),
      h("td", {}, one.suspicious ? h("span", { class: "suspicious" }, "not falling") : ""),
    );
  const heads: [string, string][] = [["Sample", ""], ["Loss", "number"], ["Last losses", "losses"], ["Kept", "number seen"], ["", ""]];
  const suspicious = hard.suspicious ? `; ${plural(hard.suspicious, "sample has", "samples have")} a loss that is high and does not fall, often a wrong label` : "";
  const lead = `the largest losses of ${plural(hard.samples, "sample")}, by the median of the last three${suspicious}`;
  return section(
    "hard",
    "Hard samples",
    lead,
    h("table", { class: "plain hard" }, h("thead", {}, h("tr", {}, ...heads.map(([head, name]) => h("th", { scope: "col", class: name }, head)))), h("tbody", {}, ...hard.listed.map(row))),
    h("p", { class: "note" }, `All charts have one scale. The dashed line is the median loss of all samples, ${short(hard.median)}.`),
  );
}

function link(sample: string, selection: Selection, show: () => void): HTMLElement {
  const button = h("button", { type: "button", class: "link", title: `Show the incidents of ${visible(sample)}` }, h("bdi", {}, visible(sample)));
  button.addEventListener("click", () => {
    selection.narrow({ sample, query: "" });
    show();
  });
  return button;
}

/** The losses from left to right as a line, a single one as a point. */
function chart(one: HardSample, median: number, lowest: number, highest: number): SVGSVGElement {
  const last = one.losses.length - 1;
  const x = (at: number): string => (4 + ((WIDTH - 8) * at) / Math.max(1, last)).toFixed(1);
  const y = (loss: number): string => (HEIGHT - 4 - ((HEIGHT - 8) * (loss - lowest)) / (highest - lowest)).toFixed(1);
  return svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: one.suspicious ? "curve suspicious" : "curve", preserveAspectRatio: "none", role: "img", "aria-label": `Losses: ${one.losses.map(short).join(", ")}` },
    svg("title", {}, one.losses.map(short).join(", ")),
    svg("line", { x1: 0, x2: WIDTH, y1: y(median), y2: y(median), class: "median" }),
    svg("polyline", { points: one.losses.map((loss, at) => `${x(at)},${y(loss)}`).join(" ") }),
    svg("path", { d: `M${x(last)},${y(one.losses[last] ?? 0)}h0`, class: "end" }),
  );
}
