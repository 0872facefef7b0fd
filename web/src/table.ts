// The table of incidents: only the rows that can be seen are there, however many there are.

import { empty, h, section } from "./dom";
import { classOf, count, moment, plural, visible, zone } from "./format";
import { details } from "./details";
import type { Column, Filter, Selection } from "./selection";

const COLUMNS: [Column, string][] = [
  ["time", `Time, ${zone()}`],
  ["step", "Step"],
  ["rank", "Rank"],
  ["sample", "Sample"],
  ["stage", "Stage"],
  ["cause", "Cause"],
  ["what", "What"],
  ["where", "Where"],
];
/** Of these the end says most, so it is the beginning that is cut. */
const FROM_THE_END = new Set<Column>(["sample", "where"]);
const BEYOND = 6;
const ON_PAPER = 100;

export class IncidentTable {
  readonly element: HTMLElement;
  private readonly search = h("input", { type: "search", id: "search", placeholder: "Search samples, messages, places", "aria-label": "Search incidents", spellcheck: "false", autocomplete: "off" });
  private readonly choices = h("div", { class: "choices" });
  private readonly tools = h("div", { class: "tools" }, this.search, this.choices);
  private readonly chips = h("div", { class: "chips" });
  private readonly tally = h("p", { class: "note", role: "status" });
  private readonly heads = h("div", { class: "row head", role: "row" });
  private readonly space = h("div", { class: "space" });
  private readonly viewport = h("div", { class: "viewport", tabindex: "0", role: "rowgroup", "aria-label": "Incidents; arrow keys move, Enter opens" }, this.space);
  private readonly grid = h("div", { class: "grid", role: "table", "aria-label": "Incidents" }, h("div", { role: "rowgroup" }, this.heads), this.viewport);
  private readonly nothing = h("div", { hidden: true });
  private readonly aside = h("aside", { class: "details", "aria-label": "Incident", hidden: true });
  private current = 0;
  private opened: string | null = null;
  private printing = false;
  private typing = 0;

  constructor(private readonly selection: Selection) {
    this.element = section("incidents", "Incidents", "", this.tools, this.chips, this.tally, h("div", { class: "table-and-details" }, h("div", { class: "table-side" }, this.grid, this.nothing), this.aside));
    this.search.addEventListener("input", () => {
      clearTimeout(this.typing);
      this.typing = window.setTimeout(() => {
        this.typing = 0;
        selection.narrow({ query: this.search.value });
      }, 60);
    });
    for (const [column, title] of COLUMNS) this.heads.append(this.head(column, title));
    this.viewport.addEventListener("scroll", () => this.paint(), { passive: true });
    this.viewport.addEventListener("keydown", (event) => this.press(event));
    this.viewport.addEventListener("click", (event) => this.click(event));
    this.aside.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
    new ResizeObserver(() => this.paint()).observe(this.viewport);
    selection.onChange(() => this.refresh(true));
    addEventListener("beforeprint", () => this.print(true));
    addEventListener("afterprint", () => this.print(false));
    this.refresh(false);
  }

  /** Show what the selection holds now; newer data keeps the place, another filter goes to the top. */
  refresh(toTop: boolean): void {
    const { rows, ledger, filter, narrowed, sort } = this.selection;
    if (!this.typing && this.search.value.trim() !== filter.query.trim()) this.search.value = filter.query;
    this.drawChoices();
    this.drawChips(filter, narrowed);
    for (const head of this.heads.children) {
      const mine = (head as HTMLElement).dataset.column === sort.column;
      head.setAttribute("aria-sort", mine ? (sort.descending ? "descending" : "ascending") : "none");
    }
    const all = ledger.incidents.count;
    this.tally.textContent = narrowed ? `${count(rows.length)} of ${plural(all, "incident")}` : plural(all, "incident");
    this.tools.hidden = all === 0;
    this.grid.hidden = rows.length === 0;
    this.grid.classList.toggle("with-ranks", ledger.ranks.length > 1);
    this.nothing.hidden = rows.length > 0;
    if (rows.length === 0) {
      this.nothing.replaceChildren(
        all === 0 ? empty("Nothing was dropped", "Every sample took part in its step. This is what a good run looks like.") : empty("No incident fits", "Another word, or fewer filters, may find it."),
      );
    }
    this.grid.setAttribute("aria-rowcount", String(rows.length + 1));
    this.current = Math.min(toTop ? 0 : this.current, Math.max(0, rows.length - 1));
    if (toTop) this.viewport.scrollTop = 0;
    this.paint();
    this.drawDetails();
  }

  private head(column: Column, title: string): HTMLElement {
    const button = h("button", { type: "button" }, title);
    button.addEventListener("click", () => this.selection.sortBy(column));
    return h("div", { class: `cell ${column}`, role: "columnheader", "data-column": column }, button);
  }

  private rowHeight(): number {
    return parseFloat(getComputedStyle(this.viewport).getPropertyValue("--row")) || 34;
  }

  private paint(): void {
    const { rows } = this.selection;
    const height = this.rowHeight();
    const first = this.printing ? 0 : Math.max(0, Math.floor(this.viewport.scrollTop / height) - BEYOND);
    const seen = Math.ceil(this.viewport.clientHeight / height) + 2 * BEYOND;
    const last = Math.min(rows.length, this.printing ? ON_PAPER : first + seen);
    this.space.style.height = this.printing ? "auto" : `${rows.length * height}px`;
    const painted: HTMLElement[] = [];
    for (let at = first; at < last; at++) painted.push(this.row(at, this.printing ? null : at * height));
    this.space.replaceChildren(...painted);
    if (this.printing && rows.length > last) this.space.append(h("p", { class: "note" }, `and ${count(rows.length - last)} more`));
  }

  private row(at: number, top: number | null): HTMLElement {
    const row = this.selection.rows[at]!;
    const { incidents } = this.selection.ledger;
    const { text, numbers } = incidents;
    const exception = classOf(text.exception.at(row));
    const message = text.message.at(row) ?? "";
    const step = numbers.step[row]!;
    const cells: Record<Column, string> = {
      time: moment(numbers.time[row]!),
      step: Number.isNaN(step) ? "" : count(step),
      rank: String(numbers.rank[row]!),
      sample: text.sample.at(row) ?? "–",
      stage: text.stage.at(row) ?? "",
      cause: text.cause.at(row) ?? "",
      what: exception ? `${exception}: ${message}` : message,
      where: text.where.at(row) ?? "",
    };
    const id = incidents.ids[row]!;
    const element = h(
      "div",
      { class: `row${at === this.current ? " current" : ""}${id === this.opened ? " opened" : ""}`, role: "row", "aria-rowindex": at + 2, "data-at": at },
      ...COLUMNS.map(([column]) => h("div", { class: `cell ${column}`, role: "cell" }, FROM_THE_END.has(column) ? h("bdi", {}, visible(cells[column])) : visible(cells[column].slice(0, 300)))),
    );
    if (top !== null) element.style.top = `${top}px`;
    return element;
  }

  private press(event: KeyboardEvent): void {
    const page = Math.max(1, Math.floor(this.viewport.clientHeight / this.rowHeight()) - 1);
    const last = this.selection.rows.length - 1;
    const moves: Record<string, number> = {
      ArrowDown: this.current + 1,
      ArrowUp: this.current - 1,
      PageDown: this.current + page,
      PageUp: this.current - page,
      Home: 0,
      End: last,
    };
    if (event.key === "Enter" || event.key === " ") this.open(this.current);
    else if (event.key === "Escape") this.close();
    else if (event.key in moves) this.move(Math.max(0, Math.min(last, moves[event.key]!)));
    else return;
    event.preventDefault();
  }

  private move(at: number): void {
    const height = this.rowHeight();
    this.current = at;
    const top = at * height;
    const { scrollTop, clientHeight } = this.viewport;
    if (top < scrollTop) this.viewport.scrollTop = top;
    else if (top + height > scrollTop + clientHeight) this.viewport.scrollTop = top + height - clientHeight;
    this.paint();
    if (this.opened !== null) this.open(at);
  }

  private click(event: MouseEvent): void {
    const row = event.target instanceof Element ? event.target.closest<HTMLElement>("[data-at]") : null;
    if (!row) return;
    this.open(Number(row.dataset.at));
    // On narrow screens the details are below the table.
    if (this.aside.getBoundingClientRect().top > innerHeight * 0.8) this.aside.scrollIntoView({ behavior: "smooth", block: "start" });
  }

  private open(at: number): void {
    const row = this.selection.rows[at];
    if (row === undefined) return;
    this.current = at;
    this.opened = this.selection.ledger.incidents.ids[row]!;
    this.paint();
    this.drawDetails();
  }

  private close(): void {
    this.opened = null;
    this.paint();
    this.drawDetails();
    this.viewport.focus({ preventScroll: true });
  }

  private drawDetails(): void {
    const row = this.opened === null ? -1 : this.selection.ledger.incidents.ids.indexOf(this.opened);
    this.aside.hidden = row < 0;
    this.element.classList.toggle("with-details", row >= 0);
    if (row < 0) return;
    const close = h("button", { type: "button", class: "quiet", "aria-label": "Close the details" }, "Close");
    close.addEventListener("click", () => this.close());
    const title = h("h3", {}, "Incident ", h("span", { class: "mono" }, visible(this.opened ?? "")));
    this.aside.replaceChildren(h("header", {}, title, close), details(this.selection.ledger, row));
  }

  private drawChoices(): void {
    if (this.choices.contains(document.activeElement) && document.activeElement instanceof HTMLSelectElement) {
      if (this.choices.childElementCount) return; // Not under somebody's hand.
    }
    const { text, numbers } = this.selection.ledger.incidents;
    const { filter } = this.selection;
    const choice = (label: string, words: string[], value: string | null, chosen: (value: string | null) => void): HTMLElement | null => {
      if (words.length < 2 && value === null) return null;
      const select = h("select", { "aria-label": label }, h("option", { value: "" }, label), ...words.slice(0, 500).map((word, at) => h("option", { value: at + 1 }, visible(word))));
      select.selectedIndex = value === null ? 0 : words.indexOf(value) + 1;
      select.addEventListener("change", () => {
        chosen(select.selectedIndex ? words[select.selectedIndex - 1]! : null);
      });
      return select;
    };
    const ranks = this.selection.ledger.ranks.map((rank) => `rank ${rank}`);
    const kinds = numbers.transient.includes(1) ? ["persistent", "transient"] : [];
    const made = [
      choice("All causes", text.cause.words, filter.cause, (cause) => this.selection.narrow({ cause })),
      choice("All stages", text.stage.words, filter.stage, (stage) => this.selection.narrow({ stage })),
      choice("All runs", text.run.words, filter.run, (run) => this.selection.narrow({ run })),
      choice("All ranks", ranks, filter.rank === null ? null : `rank ${filter.rank}`, (value) => this.selection.narrow({ rank: value === null ? null : Number(value.slice(5)) })),
      choice("Transient or not", kinds, filter.persistence, (value) => this.selection.narrow({ persistence: value as Filter["persistence"] })),
    ];
    this.choices.replaceChildren(...made.filter((one) => one !== null));
  }

  private drawChips(filter: Filter, narrowed: boolean): void {
    const chips: HTMLElement[] = [];
    const chip = (label: string, clear: Partial<Filter>): void => {
      const button = h("button", { type: "button", class: "chip", "aria-label": `Remove the filter ${label}` }, label, h("span", { "aria-hidden": "true" }, "×"));
      button.addEventListener("click", () => this.selection.narrow(clear));
      chips.push(button);
    };
    if (filter.sample !== null) chip(`sample ${visible(filter.sample.slice(0, 80))}`, { sample: null });
    if (filter.range) {
      const { axis, low, high } = filter.range;
      chip(axis === "time" ? `${moment(low)} to ${moment(high)}` : `steps ${count(Math.ceil(low))} to ${count(Math.floor(high))}`, { range: null });
    }
    if (narrowed) {
      const clear = h("button", { type: "button", class: "chip plain" }, "Clear all");
      clear.addEventListener("click", () => this.selection.clear());
      chips.push(clear);
    }
    this.chips.replaceChildren(...chips);
  }

  private print(printing: boolean): void {
    this.printing = printing;
    this.paint();
  }
}
