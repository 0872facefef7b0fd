// The section with the module graph: depth, zoom, and what is known about the module under the hand.

import type { Diagnosis, Graph } from "../data";
import { h, section } from "../dom";
import { count, plural, short, visible } from "../format";
import { draw, stateWords } from "./drawing";
import { Grouping, INPUT, LOSS, type Box } from "./grouping";
import { place, scaleFor, type Placed } from "./layout";

const AT_FIRST = 12;
const MOST = 400;

export class GraphSection {
  readonly element: HTMLElement;
  private readonly grouping: Grouping;
  private readonly canvas = h("div", { class: "canvas", role: "region", tabindex: "0", "aria-label": "Module graph; arrow keys move between modules, Enter opens one, minus closes the part around it" });
  private readonly about = h("div", { class: "about", "aria-live": "polite" });
  private readonly depth = h("output", { class: "number" });
  private readonly skips = h("button", { type: "button", class: "quiet" });
  private everyLine = false;
  private placed: Placed | null = null;
  private level: number;
  private zoom = 0;
  private current = INPUT;

  constructor(graph: Graph, private readonly diagnosis: Diagnosis) {
    this.grouping = new Grouping(graph);
    this.level = this.grouping.openFor(AT_FIRST);
    const lead = `${plural(graph.modules.length, "module")}; a line is as thick as the gradient that comes back along it`;
    this.element = section("graph", "Gradient flow", lead, this.controls(), legend(), this.canvas, this.about);
    this.canvas.addEventListener("click", (event) => this.click(event));
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    this.canvas.addEventListener("pointerover", (event) => this.point(event));
    this.canvas.addEventListener("focusin", (event) => this.point(event));
  }

  private controls(): HTMLElement {
    const button = (text: string, label: string, action: () => void): HTMLButtonElement => {
      const made = h("button", { type: "button", "aria-label": label, title: label }, text);
      made.addEventListener("click", action);
      return made;
    };
    const depths = this.grouping.deepest > 1
      ? h("div", { class: "segmented", role: "group", "aria-label": "Depth" }, button("−", "Show less detail", () => this.deepen(-1)), this.depth, button("+", "Show more detail", () => this.deepen(1)))
      : null;
    const zooms = h(
      "div",
      { class: "segmented", role: "group", "aria-label": "Size" },
      button("−", "Smaller", () => this.scale(1 / 1.25)),
      button("Fit", "Fit", () => this.scale(0)),
      button("+", "Larger", () => this.scale(1.25)),
    );
    this.skips.addEventListener("click", () => {
      this.everyLine = !this.everyLine;
      this.draw();
    });
    return h("div", { class: "controls" }, h("div", { class: "control" }, depths && h("span", { class: "note" }, "Depth"), depths, this.skips), h("div", { class: "control" }, h("span", { class: "note" }, "Size"), zooms));
  }

  draw(): void {
    const inside = this.canvas.contains(document.activeElement);
    const { lines, skipped } = this.grouping.drawn(this.everyLine);
    this.placed = place(this.grouping, lines, this.room());
    this.skips.hidden = skipped === 0 && !this.everyLine;
    this.skips.textContent = this.everyLine ? "Without the lines that skip modules" : `Also the ${plural(skipped, "line")} that ${skipped === 1 ? "skips" : "skip"} modules`;
    const picture = draw(this.placed, this.grouping.badPath());
    this.canvas.replaceChildren(picture);
    this.level = this.grouping.depthShown(this.placed.boxes);
    this.depth.textContent = `${this.level} of ${this.grouping.deepest}`;
    this.size();
    const start = this.canvas.querySelector(`[data-box="${this.current}"]`) ?? this.canvas.querySelector("[data-box]");
    start?.setAttribute("tabindex", "0");
    if (inside && start instanceof SVGElement) start.focus({ preventScroll: true });
  }

  private size(): void {
    const picture = this.canvas.querySelector("svg");
    if (!picture || !this.placed) return;
    const zoom = this.zoom || this.fit();
    picture.style.width = `${this.placed.width * zoom}px`;
    picture.style.height = `${this.placed.height * zoom}px`;
  }

  private scale(factor: number): void {
    this.zoom = factor === 0 ? 0 : Math.min(3, Math.max(0.15, (this.zoom || this.fit()) * factor));
    this.size();
  }

  private room(): { width: number; height: number } {
    return { width: this.canvas.clientWidth - 2, height: 650 };
  }

  /** As large as can be seen as a whole, but never so small that it cannot be read: letters have 12 pixels or more. */
  private fit(): number {
    return this.placed ? Math.max(1, scaleFor(this.placed, this.room())) : 1;
  }

  private deepen(step: number): void {
    const next = Math.min(this.grouping.deepest, Math.max(1, this.level + step));
    const before = [...this.grouping.opened];
    this.grouping.openTo(next);
    if (this.grouping.boxes().length > MOST) {
      this.grouping.opened.clear();
      for (const place of before) this.grouping.opened.add(place);
      this.about.replaceChildren(h("p", { class: "note" }, `Another level would be more than ${MOST} boxes: open the parts of interest one by one.`));
      return;
    }
    this.level = next;
    this.draw();
  }

  private click(event: MouseEvent): void {
    if (!(event.target instanceof Element)) return;
    const frame = event.target.closest("[data-frame]")?.getAttribute("data-frame");
    const box = event.target.closest("[data-box]")?.getAttribute("data-box");
    if (frame) this.toggle(Number(frame), Number(frame));
    else if (box) this.toggle(Number(box), Number(box));
  }

  private toggle(place: number, focus: number): void {
    const box = this.placed?.boxes.find((one) => one.id === place);
    this.current = focus;
    if (box && !box.inside) {
      this.tell(box);
      return;
    }
    this.grouping.toggle(place);
    const first = this.grouping.boxes().find((one) => one.id === focus) ?? this.grouping.boxes().find((one) => one.parent === focus);
    if (first) this.current = first.id;
    this.draw();
    if (first) this.tell(first);
  }

  private press(event: KeyboardEvent): void {
    const target = event.target instanceof Element ? event.target.closest("[data-box]") : null;
    if (!target) {
      if (event.target === this.canvas && event.key === "Enter") this.focus(this.current);
      return;
    }
    const place = Number(target.getAttribute("data-box"));
    if (event.key === "Enter" || event.key === " ") this.toggle(place, place);
    else if (event.key === "-" || event.key === "Backspace") {
      const parent = this.grouping.parents[place] ?? 0;
      if (parent > 0) this.toggle(parent, parent);
    } else if (event.key.startsWith("Arrow")) this.focus(this.next(place, event.key));
    else return;
    event.preventDefault();
  }

  /** Down and right follow the data, up and left the gradient. */
  private next(from: number, key: string): number {
    const order = (this.placed?.boxes ?? []).slice().sort((a, b) => a.y - b.y || a.x - b.x);
    const at = order.findIndex((box) => box.id === from);
    return order[at + (key === "ArrowDown" || key === "ArrowRight" ? 1 : -1)]?.id ?? from;
  }

  private focus(place: number): void {
    this.current = place;
    for (const one of this.canvas.querySelectorAll("[data-box]")) {
      const mine = one.getAttribute("data-box") === String(place);
      one.setAttribute("tabindex", mine ? "0" : "-1");
      if (mine && one instanceof SVGElement) one.focus();
    }
  }

  private point(event: Event): void {
    const target = event.target instanceof Element ? event.target.closest("[data-box]") : null;
    const box = target && this.placed?.boxes.find((one) => one.id === Number(target.getAttribute("data-box")));
    if (box) this.tell(box);
  }

  private tell(box: Box): void {
    if (box.id === INPUT || box.id === LOSS) {
      this.about.replaceChildren(h("p", {}, box.id === INPUT ? "What went into the model." : "The loss, where the gradient begins."));
      return;
    }
    const cuts = this.grouping.lines().filter((line) => line.from === box.id || line.to === box.id).flatMap((line) => line.cuts);
    const facts = [
      box.kind,
      box.calls > 1 ? `called ${count(box.calls)} times` : box.calls === 0 && !box.inside ? "not called" : "",
      box.parameters ? `${count(box.parameters)} parameters` : "no parameters",
      box.frozen ? (box.frozen === box.parameters ? "all frozen" : `${count(box.frozen)} frozen`) : "",
      box.parameters && box.frozen < box.parameters ? `gradient norm ${short(box.norm)}` : "",
      stateWords[box.state] ?? "",
      box.partly ? "a part of it gets no gradient" : "",
      box.inside ? `${plural(box.inside, "module")} inside` : "",
    ];
    const codes = new Set(cuts.map((cut) => cut.code));
    const links = this.diagnosis.findings.filter((finding) => codes.has(finding.code) || (finding.module !== null && finding.module !== "" && (finding.module === box.path || finding.module.startsWith(`${box.path}.`))));
    this.about.replaceChildren(
      h("p", {}, h("strong", { class: "mono" }, visible(box.path || "the model")), " ", facts.filter(Boolean).join(" · ")),
      ...cuts.slice(0, 4).map((cut) => h("p", { class: "cut-line" }, `cut at ${visible(cut.where ?? cut.code)}: `, h("code", {}, visible(cut.source ?? "")))),
      links.length ? h("p", { class: "note" }, "Findings: ", ...[...new Set(links.map((one) => one.code))].slice(0, 6).flatMap((code, at) => [at ? ", " : "", h("a", { href: `#finding-${code}` }, code)])) : "",
    );
  }
}

function legend(): HTMLElement {
  const entry = (name: string, text: string): HTMLElement => h("span", { class: "key" }, h("span", { class: `key-sign ${name}`, "aria-hidden": "true" }), text);
  return h("div", { class: "keys" }, entry("flow", "gradient flows"), entry("without", "no gradient comes back"), entry("cut", "cut by a line of code"), entry("frozen", "frozen"), entry("bad", "NaN or Inf"));
}
