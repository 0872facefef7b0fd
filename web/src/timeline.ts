// Incidents over time, by cause: stacked bars; dragging over them narrows the table.

import uPlot from "uplot";
import type { Incidents } from "./data";
import { h, section } from "./dom";
import { count, moment, zone } from "./format";
import type { Axis, Selection } from "./selection";
import { onTheme, shade } from "./theme";

const BARS = 72;
const COLOURS = 8;

interface Bins {
  centres: number[];
  width: number;
  /** For each cause, how many fall into each bin. */
  counts: number[][];
}

/** The causes by how many incidents they have; those beyond the colours are one. */
export function rankCauses(incidents: Incidents): { names: string[]; totals: number[]; group: Int32Array } {
  const { words, index } = incidents.text.cause;
  const totals = new Array<number>(words.length).fill(0);
  for (const place of index) if (place >= 0) totals[place]!++;
  const order = totals.map((_, place) => place).sort((a, b) => totals[b]! - totals[a]!);
  const group = new Int32Array(words.length);
  order.forEach((place, rank) => (group[place] = order.length > COLOURS ? Math.min(rank, COLOURS - 1) : rank));
  const names = order.slice(0, order.length > COLOURS ? COLOURS - 1 : COLOURS).map((place) => words[place]!);
  if (order.length > COLOURS) names.push("other causes");
  const sums = new Array<number>(names.length).fill(0);
  totals.forEach((total, place) => (sums[group[place]!]! += total));
  return { names, totals: sums, group };
}

function binned(incidents: Incidents, axis: Axis, group: Int32Array, groups: number): Bins {
  const values = incidents.numbers[axis];
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return { centres: [], width: 1, counts: [] };
  const least = axis === "step" ? 1 : 1000;
  let width = Math.max(least, (high - low) / BARS);
  if (axis === "step") width = Math.ceil((high - low + 1) / BARS);
  const bins = Math.floor((high - low) / width) + 1;
  const counts = Array.from({ length: groups }, () => new Array<number>(bins).fill(0));
  values.forEach((value, row) => {
    const cause = incidents.text.cause.index[row]!;
    if (!Number.isNaN(value) && cause >= 0) counts[group[cause]!]![Math.min(bins - 1, Math.floor((value - low) / width))]!++;
  });
  const middle = axis === "step" ? (width - 1) / 2 : width / 2;
  return { centres: Array.from({ length: bins }, (_, bin) => low + bin * width + middle), width, counts };
}

/** Within two minutes the clock says little, and the number of the step more. */
function shortRun(incidents: Incidents): boolean {
  const times = incidents.numbers.time.filter((time) => !Number.isNaN(time));
  const span = (times[times.length - 1] ?? 0) - (times[0] ?? 0);
  return span < 120_000 && !incidents.numbers.step.every(Number.isNaN);
}

const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2592000, 31536000];

/** 09:30, with the date under the first one of a day. */
function clockTimes(_: uPlot, splits: number[], __: number, ___: number, step: number): string[] {
  let day = "";
  return splits.map((split) => {
    const [date, clock] = moment(split * 1000).split(" ") as [string, string];
    const label = step >= 86400 ? date.slice(5) : step < 60 ? clock : clock.slice(0, 5);
    const first = date !== day;
    day = date;
    return step < 86400 && first ? `${label}\n${date}` : label;
  });
}

export class Timeline {
  readonly element: HTMLElement;
  private readonly chart = h("div", { class: "chart", role: "img" });
  private readonly legend = h("div", { class: "legend", role: "group", "aria-label": "Causes" });
  private readonly axes = h("div", { class: "segmented", role: "group", "aria-label": "Horizontal axis" });
  private readonly reading = h("p", { class: "note reading", "aria-live": "polite" });
  private readonly hidden = new Set<string>();
  private axis: Axis = "time";
  private chosen = false;
  private plot: uPlot | null = null;

  constructor(private readonly selection: Selection) {
    const controls = h("div", { class: "controls" }, this.legend, this.axes);
    this.element = section("timeline", "Incidents over time", `drag over the bars to narrow the table; times are ${zone()}`, controls, this.chart, this.reading);
    for (const axis of ["time", "step"] as const) {
      const button = h("button", { type: "button", "data-axis": axis }, axis === "time" ? "Time" : "Step");
      button.addEventListener("click", () => {
        this.chosen = true;
        this.show(axis);
        this.draw();
      });
      this.axes.append(button);
    }
    onTheme(() => this.draw());
    selection.onChange(() => this.mark());
    new ResizeObserver(() => this.fit()).observe(this.chart);
  }

  draw(): void {
    const { incidents } = this.selection.ledger;
    if (!this.chosen) this.show(shortRun(incidents) ? "step" : "time");
    const { names, totals, group } = rankCauses(incidents);
    const bins = binned(incidents, this.axis, group, names.length);
    this.drawLegend(names, totals);
    this.plot?.destroy();
    this.plot = null;
    this.chart.replaceChildren();
    this.chart.setAttribute("aria-label", `Bars: ${names.map((name, at) => `${name} ${totals[at]}`).join(", ")}`);
    if (!bins.centres.length) {
      this.chart.append(h("p", { class: "note" }, `No incident has a ${this.axis}.`));
      return;
    }
    const shown = names.map((name, at) => ({ name, at })).filter(({ name }) => !this.hidden.has(name));
    const heights: number[][] = [];
    for (const { at } of shown) {
      const below = heights[heights.length - 1];
      heights.push(bins.counts[at]!.map((value, bin) => value + (below?.[bin] ?? 0)));
    }
    this.plot = new uPlot(this.options(bins, shown), [this.xs(bins), ...heights.reverse()], this.chart);
    this.mark();
  }

  /** Draw the range that the table is narrowed to. */
  private mark(): void {
    const { range } = this.selection.filter;
    const plot = this.plot;
    if (!plot) return;
    const scale = this.axis === "time" ? 1000 : 1;
    const place = (value: number): number => Math.min(plot.over.clientWidth, Math.max(0, plot.valToPos(value / scale, "x")));
    const [left, right] = range?.axis === this.axis ? [place(range.low), place(range.high)] : [0, 0];
    plot.setSelect({ left, top: 0, width: right - left, height: right > left ? plot.over.clientHeight : 0 }, false);
  }

  private show(axis: Axis): void {
    this.axis = axis;
    for (const one of this.axes.children) one.setAttribute("aria-pressed", String((one as HTMLElement).dataset.axis === axis));
  }

  private xs(bins: Bins): number[] {
    return this.axis === "time" ? bins.centres.map((value) => value / 1000) : bins.centres;
  }

  private options(bins: Bins, shown: { name: string; at: number }[]): uPlot.Options {
    const half = (this.axis === "time" ? bins.width / 1000 : bins.width) / 2;
    const xs = this.xs(bins);
    const axis = { stroke: shade("--muted"), ticks: { show: false }, font: `12px ${shade("--sans")}` };
    return {
      width: Math.max(240, this.chart.clientWidth),
      height: 200,
      legend: { show: false },
      cursor: { drag: { x: true, y: false, setScale: false }, points: { show: false }, y: false },
      scales: { x: { time: this.axis === "time", range: [xs[0]! - half, xs[xs.length - 1]! + half] }, y: { range: (_, __, high) => [0, Math.max(1, high * 1.05)] } },
      axes: [
        { ...axis, grid: { show: false }, space: 80, ...(this.axis === "time" ? { values: clockTimes, incrs: SECONDS } : {}) },
        { ...axis, grid: { stroke: shade("--line"), width: 1 }, size: 48, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5] },
      ],
      series: [
        {},
        ...shown
          .slice()
          .reverse()
          .map(({ name, at }) => ({
            label: name,
            fill: shade(`--cause-${at}`),
            width: 0,
            points: { show: false },
            paths: uPlot.paths.bars!({ size: [0.84, 56, 1], radius: 0 }),
          })),
      ],
      hooks: {
        setCursor: [(plot) => this.read(plot.cursor.idx ?? null, bins, shown)],
        setSelect: [(plot) => this.choose(plot)],
      },
    };
  }

  private read(bin: number | null, bins: Bins, shown: { name: string; at: number }[]): void {
    const centre = bin === null ? undefined : bins.centres[bin];
    if (bin === null || centre === undefined) {
      this.reading.textContent = "";
      return;
    }
    const start = centre - bins.width / 2;
    const when = this.axis === "time" ? moment(start) : `step ${count(Math.ceil(start))}`;
    const parts = shown.filter(({ at }) => bins.counts[at]![bin]! > 0).map(({ name, at }) => `${name} ${count(bins.counts[at]![bin]!)}`);
    this.reading.textContent = `${when}: ${parts.join(", ") || "none"}`;
  }

  private choose(plot: uPlot): void {
    if (plot.select.width < 4) return;
    const scale = this.axis === "time" ? 1000 : 1;
    const low = plot.posToVal(plot.select.left, "x") * scale;
    const high = plot.posToVal(plot.select.left + plot.select.width, "x") * scale;
    this.selection.narrow({ range: { axis: this.axis, low, high } });
  }

  private drawLegend(names: string[], totals: number[]): void {
    const focused = document.activeElement instanceof HTMLElement ? document.activeElement.dataset.cause : undefined;
    this.legend.replaceChildren(
      ...names.map((name, at) => {
        const button = h(
          "button",
          { type: "button", class: "legend-entry", "aria-pressed": String(!this.hidden.has(name)), "data-cause": name },
          h("span", { class: `swatch cause-${at}`, "aria-hidden": "true" }),
          name,
          h("span", { class: "number" }, count(totals[at]!)),
        );
        button.addEventListener("click", () => {
          if (!this.hidden.delete(name)) this.hidden.add(name);
          this.draw();
        });
        return button;
      }),
    );
    if (focused !== undefined) [...this.legend.querySelectorAll("button")].find((button) => button.dataset.cause === focused)?.focus();
  }

  private fit(): void {
    const width = Math.max(240, this.chart.clientWidth);
    if (this.plot && Math.abs(this.plot.width - width) > 1) {
      this.plot.setSize({ width, height: 200 });
      this.mark();
    }
  }
}
