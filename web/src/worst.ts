// The samples with most incidents.

import { empty, h, section } from "./dom";
import { count, plural, visible } from "./format";
import type { Selection } from "./selection";

const SHOWN = 10;

export function worstSection(selection: Selection, show: () => void): HTMLElement {
  const { incidents, badSamples } = selection.ledger;
  const { words, index } = incidents.text.sample;
  const counts = new Int32Array(words.length);
  const causes = new Map<number, Set<string>>();
  for (const place of index) if (place >= 0) counts[place]!++;
  const order = [...counts.keys()].sort((a, b) => counts[b]! - counts[a]! || a - b);
  const worst = order.slice(0, SHOWN);
  const wanted = new Set(worst);
  index.forEach((place, row) => {
    if (!wanted.has(place)) return;
    const seen = causes.get(place) ?? new Set<string>();
    causes.set(place, seen.add(incidents.text.cause.at(row) ?? ""));
  });
  if (!worst.length) return section("worst", "Worst samples", "", empty("No sample has a name", "Give ids= to guard.backward, so that incidents say which sample it was."));
  const most = counts[worst[0]!]!;
  if (most === 1 && words.length > SHOWN) return section("worst", "Worst samples", `no sample has more than one incident, of ${count(words.length)}`);
  const entries = worst.map((place) => {
    const sample = words[place]!;
    const bar = h("span", { class: "bar", "aria-hidden": "true" });
    bar.style.setProperty("--part", `${(100 * counts[place]!) / most}%`);
    const button = h(
      "button",
      { type: "button", class: "worst-entry", title: `Show the incidents of ${visible(sample)}` },
      h("span", { class: "mono clip from-the-end" }, h("bdi", {}, visible(sample))),
      h("span", { class: "note clip" }, [...(causes.get(place) ?? [])].join(", "), badSamples.has(place) ? "" : " · released or transient"),
      bar,
      h("span", { class: "number" }, count(counts[place]!)),
    );
    button.addEventListener("click", () => {
      selection.narrow({ sample, query: "" });
      show();
    });
    return h("li", {}, button);
  });
  const least = counts[worst[worst.length - 1]!]!;
  const tied = order.slice(SHOWN).filter((place) => counts[place] === least).length;
  const ties = tied ? `; ${plural(tied, "more has", "more have")} ${plural(least, "incident")} too` : "";
  const rest = words.length > SHOWN ? `the ${SHOWN} with most incidents, of ${count(words.length)}${ties}` : plural(words.length, "sample");
  return section("worst", "Worst samples", rest, h("ol", { class: "worst" }, ...entries));
}
