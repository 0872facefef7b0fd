// What the doctor says: each finding with its place, its reason, and a fix to copy.

import type { Diagnosis, Finding } from "./data";
import { copyButton, empty, h, section } from "./dom";
import { plural, visible } from "./format";

const WORST = ["error", "warning", "info"] as const;
const SHOWN = 200;

export function findingsSection(diagnosis: Diagnosis): HTMLElement {
  const { findings, exception } = diagnosis;
  const raised = exception && h("p", { class: "raised" }, "The step raised ", h("code", {}, visible(`${exception.type}: ${exception.message}`)));
  const body =
    findings.length > 0
      ? h("div", { class: "findings" }, ...findings.slice(0, SHOWN).map(card))
      : exception
        ? null
        : empty("Healthy", "Every parameter that should learn gets a finite gradient; no problems found.");
  const rest = findings.length > SHOWN ? h("p", { class: "note" }, `and ${plural(findings.length - SHOWN, "more finding")}, in the JSON`) : null;
  return section("findings", "Findings", tally(diagnosis), raised, body, rest);
}

/** "2 errors, 1 warning": how many there are of each kind. */
export function tally(diagnosis: Diagnosis): string {
  const words = { error: "error", warning: "warning", info: "note" };
  const texts = WORST.map((severity) => [severity, diagnosis.findings.filter((one) => one.severity === severity).length] as const)
    .filter(([, number]) => number > 0)
    .map(([severity, number]) => plural(number, words[severity]));
  return texts.join(", ") || (diagnosis.exception ? "" : "no problems found");
}

function card(finding: Finding): HTMLElement {
  const place = [finding.where, finding.module && `in ${finding.module}`].filter(Boolean).join("  ");
  const consequences = finding.consequences ?? [];
  const samples = finding.samples.slice(0, 30).join(", ") + (finding.samples.length > 30 ? ", …" : "");
  return h(
    "article",
    { class: `finding ${finding.severity}`, id: `finding-${finding.code}` },
    h(
      "header",
      {},
      h("span", { class: "badge" }, finding.severity === "info" ? "note" : finding.severity),
      h("span", { class: "code" }, finding.code),
      h("h3", {}, visible(finding.title)),
    ),
    place ? h("p", { class: "place" }, visible(place)) : null,
    finding.source ? h("pre", { class: "source" }, h("code", {}, visible(finding.source))) : null,
    finding.reason ? h("p", {}, visible(finding.reason)) : null,
    finding.also.length ? h("p", { class: "note" }, "See also ", ...finding.also.slice(0, 20).flatMap((one, at) => [at ? ", " : "", h("code", {}, visible(one))])) : null,
    consequences.length
      ? h("details", { class: "note" }, h("summary", {}, plural(consequences.length, "consequence")), h("ul", {}, ...consequences.slice(0, 50).map((one) => h("li", {}, visible(one)))))
      : null,
    samples ? h("p", { class: "note" }, `Rows of the batch: ${samples}`) : null,
    finding.fix
      ? h("div", { class: "fix" }, h("div", { class: "fix-head" }, h("span", {}, "Fix"), copyButton(finding.fix, `Copy the fix of ${finding.code}`)), h("pre", {}, h("code", {}, visible(finding.fix))))
      : null,
  );
}
