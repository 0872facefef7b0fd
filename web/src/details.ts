// Everything that is known about one incident.

import type { LedgerData } from "./data";
import { copyButton, h } from "./dom";
import { count, moment, quoted, short, visible, zone } from "./format";
import { preview } from "./preview";

export function details(ledger: LedgerData, row: number): HTMLElement {
  const { incidents } = ledger;
  const { text, numbers } = incidents;
  const id = incidents.ids[row]!;
  const whole = (value: number | undefined): string | null => (value === undefined || Number.isNaN(value) ? null : count(value));
  const exception = text.exception.at(row);
  const message = text.message.at(row);
  const facts: [string, string | null][] = [
    ["Sample", text.sample.at(row)],
    ["Cause", text.cause.at(row)],
    ["Stage", text.stage.at(row)],
    ["Where", text.where.at(row)],
    ["Module", text.module.at(row)],
    ["Time", `${moment(numbers.time[row]!)} ${zone(numbers.time[row]!)}`],
    ["Run", text.run.at(row)],
    ["Epoch", whole(numbers.epoch[row])],
    ["Step", whole(numbers.step[row])],
    ["Row of the batch", whole(numbers.row[row])],
    ["Rank", ledger.ranks.length > 1 || numbers.rank[row] ? whole(numbers.rank[row]) : null],
    ["Loss", incidents.loss[row] === null ? null : short(incidents.loss[row])],
    ["Gradient norm", incidents.norm[row] === null ? null : short(incidents.norm[row])],
    ["Transient", numbers.transient[row] === 1 ? "yes: it did not come again" : null],
  ];
  const known = facts.filter((fact): fact is [string, string] => fact[1] !== null && fact[1] !== "");
  const extra = text.details.at(row);
  const stored = ledger.previewOf.get(row);
  const command = `gradgate ledger show ${quoted(ledger.name)} ${quoted(visible(id))}`;
  return h(
    "div",
    { class: "details-body" },
    message || exception ? h("pre", { class: "message" }, h("code", {}, visible(exception ? `${exception}: ${message ?? ""}` : (message ?? "")))) : null,
    h("dl", { class: "facts" }, ...known.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, visible(value))])),
    stored ? preview(stored) : null,
    extra ? h("details", {}, h("summary", {}, "Details"), h("pre", {}, h("code", {}, visible(pretty(extra))))) : null,
    h("div", { class: "fix" }, h("div", { class: "fix-head" }, h("span", {}, "On the command line"), copyButton(command, "Copy the command")), h("pre", {}, h("code", {}, visible(command)))),
    ledger.cut ? h("p", { class: "note" }, "Long texts are cut on this page; the command shows them whole.") : null,
  );
}

function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
