// The run in a few numbers, and the runs themselves.

import type { Diagnosis, LedgerData, PageData, Run } from "./data";
import { h, section } from "./dom";
import { tally } from "./findings";
import { count, duration, moment, plural, visible, zone } from "./format";

export function summarySection(data: PageData): HTMLElement {
  const { ledger, diagnosis } = data;
  const tiles = [
    ...(ledger ? ledgerTiles(ledger) : []),
    ...(diagnosis ? [diagnosisTile(diagnosis)] : []),
  ];
  return section("summary", "Summary", sentence(data), h("dl", { class: "tiles" }, ...tiles), ledger && ledger.runs.length ? runsTable(ledger.runs) : null);
}

function tile(name: string, value: string, mood = "", note = ""): HTMLElement {
  return h("div", { class: `tile ${mood}` }, h("dt", {}, name), h("dd", {}, value), note ? h("dd", { class: "tile-note" }, note) : null);
}

function diagnosisTile(diagnosis: Diagnosis): HTMLElement {
  const [worst, ...rest] = tally(diagnosis).split(", ");
  const value = diagnosis.healthy ? "healthy" : worst || "raised";
  return tile("Diagnosis", value, diagnosis.healthy ? "good" : "bad", diagnosis.healthy ? "" : rest.join(", "));
}

function ledgerTiles(ledger: LedgerData): HTMLElement[] {
  const { incidents } = ledger;
  const samples = new Set(incidents.text.sample.index);
  samples.delete(-1);
  const transient = incidents.numbers.transient.reduce((sum, one) => sum + one, 0);
  const newest = ledger.total > incidents.count ? `the newest ${count(incidents.count)} are on this page` : "";
  return [
    tile("Incidents", count(ledger.total), "", newest),
    tile("Samples affected", count(samples.size)),
    tile("Known to be bad", count(ledger.bad), "", ledger.bad ? "left out by gg.without" : ""),
    tile("Transient", count(transient), "", transient ? "did not come again" : ""),
    tile("Runs", count(ledger.runs.length), "", ledger.ranks.length > 1 ? `incidents on ${count(ledger.ranks.length)} ranks` : ""),
  ];
}

function sentence(data: PageData): string {
  const { ledger } = data;
  if (!ledger) return `made ${moment(data.made * 1000, false)} ${zone(data.made * 1000)}`;
  const times = ledger.incidents.numbers.time.filter((time) => !Number.isNaN(time));
  const first = times[0];
  const last = times[times.length - 1];
  if (first === undefined || last === undefined) return "no incident";
  if (last - first < 60_000) return `incidents at ${moment(first)} ${zone(first)}${first === last ? "" : ` · within ${duration(last - first)}`}`;
  const [day, end] = [moment(first, false).slice(0, 10), moment(last, false)];
  return `incidents from ${moment(first, false)} to ${end.startsWith(day) ? end.slice(11) : end} ${zone(last)} · over ${duration(last - first)}`;
}

const SHOWN = 12;

function runsTable(runs: Run[]): HTMLElement {
  const newest = runs.slice(-SHOWN).reverse();
  const row = (run: Run): HTMLElement => {
    const args = Object.keys(run.arguments).length ? JSON.stringify(run.arguments) : "";
    const versions = [run.torch && `torch ${run.torch}`, run.python && `Python ${run.python}`].filter(Boolean).join(", ");
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, visible(run.name)),
      h("td", { class: "number" }, count(run.incidents)),
      h("td", {}, moment(run.started * 1000)),
      h("td", {}, run.ended === null ? "not ended" : duration((run.ended - run.started) * 1000)),
      h("td", {}, visible(versions)),
      h("td", { class: "mono clip", title: visible(args) }, visible([run.git_commit?.slice(0, 10), args].filter(Boolean).join("  "))),
    );
  };
  const heads = ["Run", "Incidents", `Started, ${zone()}`, "Took", "Versions", "Commit and arguments"];
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" },
    h(
      "table",
      { class: "plain" },
      h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col", class: head === "Incidents" ? "number" : "" }, head)))),
      h("tbody", {}, ...newest.map(row)),
    ),
    runs.length > SHOWN ? h("p", { class: "note" }, `and ${plural(runs.length - SHOWN, "earlier run")}`) : null,
  );
}
