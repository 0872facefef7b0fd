// The page: built once from its data, and brought up to date while a training runs.

import { embedded, type Diagnosis, type PageData } from "./data";
import { empty, h, section } from "./dom";
import { findingsSection } from "./findings";
import { moment, visible, zone } from "./format";
import { GraphSection } from "./graph/graph";
import { hardSection } from "./hard";
import { layersSection } from "./layers";
import { Live } from "./live";
import { rewindsSection } from "./rewinds";
import { Selection } from "./selection";
import { summarySection } from "./summary";
import { IncidentTable } from "./table";
import { themeButton } from "./theme";
import { Timeline } from "./timeline";
import { worstSection } from "./worst";

const page = document.getElementById("page")!;

class Page {
  private selection: Selection | null = null;
  private table: IncidentTable | null = null;
  private timeline: Timeline | null = null;
  private summary: HTMLElement | null = null;
  private worst: HTMLElement | null = null;
  private rewinds: HTMLElement | null = null;
  private hard: HTMLElement | null = null;

  constructor(private readonly live: Live | null) {}

  show(data: PageData): void {
    if (this.selection && data.ledger) this.update(data, this.selection);
    else this.build(data);
    document.documentElement.dataset.ready = "yes";
  }

  private build(data: PageData): void {
    const sections: HTMLElement[] = [(this.summary = summarySection(data))];
    const after: (() => void)[] = [];
    if (data.diagnosis) sections.push(...diagnosisSections(data.diagnosis, after));
    if (data.ledger) {
      this.selection = new Selection(data.ledger);
      this.table = new IncidentTable(this.selection);
      this.timeline = new Timeline(this.selection);
      this.worst = worstSection(this.selection, this.toTable);
      this.rewinds = rewindsSection(data.ledger);
      this.hard = hardSection(this.selection, this.toTable);
      const parts = [this.timeline.element, this.rewinds, this.worst, this.hard, this.table.element];
      sections.push(...parts.filter((part) => part !== null));
      this.hideEmpty(data);
      after.push(() => this.timeline?.draw());
    }
    page.replaceChildren(this.head(data, sections), ...sections, foot(data));
    for (const step of after) step();
  }

  private update(data: PageData, selection: Selection): void {
    if (!data.ledger) return;
    const summary = summarySection(data);
    this.summary?.replaceWith(summary);
    this.summary = summary;
    selection.replace(data.ledger);
    this.timeline?.draw();
    const rewinds = rewindsSection(data.ledger);
    this.rewinds?.remove();
    if (rewinds) this.timeline?.element.after(rewinds);
    this.rewinds = rewinds;
    const worst = worstSection(selection, this.toTable);
    this.worst?.replaceWith(worst);
    this.worst = worst;
    const hard = hardSection(selection, this.toTable);
    this.hard?.remove();
    if (hard) worst.after(hard);
    this.hard = hard;
    this.hideEmpty(data);
  }

  private readonly toTable = (): void => document.getElementById("incidents")?.scrollIntoView({ behavior: "smooth" });

  /** Where nothing was dropped, the table says so, and the rest would only repeat it. */
  private hideEmpty(data: PageData): void {
    const none = data.ledger?.incidents.count === 0;
    if (this.timeline) this.timeline.element.hidden = none;
    if (this.worst) this.worst.hidden = none;
  }

  private head(data: PageData, sections: HTMLElement[]): HTMLElement {
    const links = sections.filter((one) => !one.hidden).map((one) => h("a", { href: `#${one.id}` }, one.querySelector("h2")?.textContent ?? ""));
    return h(
      "header",
      { class: "page-head" },
      h("div", { class: "brand" }, h("h1", {}, visible(data.name)), h("span", { class: "maker" }, "gradgate report")),
      h("nav", { "aria-label": "Sections" }, ...links),
      h("div", { class: "head-side" }, this.live?.element, themeButton()),
    );
  }
}

/** The parts about a step; one that cannot be drawn, from a file that was changed by hand, does not cost the others. */
function diagnosisSections(diagnosis: Diagnosis, after: (() => void)[]): HTMLElement[] {
  const made: HTMLElement[] = [];
  const instead = (title: string, error: unknown): HTMLElement => section("odd", title, "", empty("This part cannot be shown", String(error)));
  const attempt = (title: string, make: () => HTMLElement | null): void => {
    try {
      const part = make();
      if (part) made.push(part);
    } catch (error) {
      made.push(instead(title, error));
    }
  };
  attempt("Findings", () => findingsSection(diagnosis));
  attempt("Gradient flow", () => {
    if (!diagnosis.graph?.modules.length) return null;
    const graph = new GraphSection(diagnosis.graph, diagnosis);
    after.push(() => {
      try {
        graph.draw();
      } catch (error) {
        graph.element.replaceWith(instead("Gradient flow", error));
      }
    });
    return graph.element;
  });
  attempt("Gradient norm per layer", () => (diagnosis.layers ? layersSection(diagnosis.layers) : null));
  return made;
}

function foot(data: PageData): HTMLElement {
  return h("footer", {}, `gradgate ${data.gradgate} · made ${moment(data.made * 1000)} ${zone(data.made * 1000)} · this page is complete in itself and asks nothing of any network`);
}

function fail(error: unknown): void {
  page.replaceChildren(h("div", { class: "empty" }, h("p", { class: "empty-title" }, "This page cannot be shown"), h("p", {}, visible(String(error)))));
}

const holder = document.getElementById("data")!;
if (holder.dataset.live === "yes") {
  const made: Page = new Page(new Live((data) => made.show(data)));
  void made["live"]!.run();
} else {
  embedded(holder.textContent ?? "")
    .then((data) => new Page(null).show(data))
    .catch(fail);
}
