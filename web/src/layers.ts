// The gradient norm of each parameter, as strips of heat.

import type { Layer, Norm } from "./data";
import { empty, h, roving, section } from "./dom";
import { plural, short, visible } from "./format";

const ROWS = 12;
const STEPS = 8;
const MOST = 6000;

/** One strip for each part of the model, as deep as few enough are left; all in one where the model has no parts. */
function groups(layers: Layer[]): Map<string, Layer[]> {
  let best = new Map([["", layers]]);
  for (let depth = 1; depth <= 12; depth++) {
    const found = new Map<string, Layer[]>();
    for (const layer of layers) {
      const parts = layer.name.split(".");
      const key = parts.slice(0, Math.max(1, Math.min(depth, parts.length - 1))).join(".");
      const group = found.get(key);
      if (group) group.push(layer);
      else found.set(key, [layer]);
    }
    if (found.size > ROWS) break;
    best = found;
  }
  return best;
}

export function layersSection(layers: Layer[]): HTMLElement {
  if (!layers.length) return section("layers", "Gradient norm per layer", "", empty("No parameters", "The step was diagnosed without a model: gg.diagnose(step, model=model) shows them here."));
  const shown = layers.slice(0, MOST);
  const finite = shown.map((layer) => layer.gradient_norm).filter((norm): norm is number => typeof norm === "number" && norm > 0);
  const low = finite.reduce((least, norm) => Math.min(least, norm), Infinity);
  const high = finite.reduce((most, norm) => Math.max(most, norm), 0);
  const reading = h("p", { class: "note reading", "aria-live": "polite" }, "Point at a cell, or move with the arrow keys.");
  const strips = h("div", { class: "strips", role: "group", "aria-label": "Gradient norms" });
  const byCell = new WeakMap<Element, Layer>();
  let first = true;
  for (const [name, members] of groups(shown)) {
    const cells = members.map((layer) => {
      const cell = h("span", { class: `heat ${heat(layer, low, high)}`, tabindex: first ? "0" : "-1", role: "img", "aria-label": visible(words(layer)) });
      first = false;
      byCell.set(cell, layer);
      return cell;
    });
    strips.append(h("div", { class: "strip" }, h("span", { class: "strip-name mono clip", title: visible(name) }, visible(name)), h("div", { class: "cells" }, ...cells)));
  }
  const read = (event: Event): void => {
    const layer = event.target instanceof Element ? byCell.get(event.target) : undefined;
    if (layer) reading.textContent = visible(words(layer));
  };
  strips.addEventListener("pointerover", read);
  strips.addEventListener("focusin", read);
  roving(strips, ".heat");
  const cut = layers.length > MOST ? `, the first ${MOST} shown` : "";
  return section("layers", "Gradient norm per layer", `${plural(layers.length, "parameter")}${cut}`, scale(low, high), strips, reading);
}

function heat(layer: Layer, low: number, high: number): string {
  const norm = layer.gradient_norm;
  const frozen = layer.learns === false;
  if (typeof norm === "string") return "nonfinite";
  if (frozen) return "frozen";
  if (norm === null) return "without";
  if (norm === 0) return "heat-zero";
  const spread = Math.log(high) - Math.log(low);
  const part = spread > 0 ? (Math.log(norm) - Math.log(low)) / spread : 0.5;
  return `heat-${Math.min(STEPS - 1, Math.floor(part * STEPS))}`;
}

function words(layer: Layer): string {
  const shape = layer.shape.length ? layer.shape.join("×") : "scalar";
  const grad: Norm = layer.gradient_norm;
  const ratio = typeof grad === "number" && typeof layer.weight_norm === "number" && layer.weight_norm > 0 ? ` · ratio ${short(grad / layer.weight_norm)}` : "";
  const state = layer.learns === false ? " · frozen" : layer.learns === "part" ? " · partly pinned" : "";
  return `${layer.name} ${shape} · gradient ${grad === null ? "none" : short(grad)} · weight ${short(layer.weight_norm)}${ratio}${state}`;
}

function scale(low: number, high: number): HTMLElement {
  const key = (name: string, text: string): HTMLElement => h("span", { class: "key" }, h("span", { class: `heat ${name}`, "aria-hidden": "true" }), text);
  const ramp = high > 0 ? h("span", { class: "key" }, short(low), h("span", { class: "ramp", "aria-hidden": "true" }, ...Array.from({ length: STEPS }, (_, step) => h("span", { class: `heat heat-${step}` }))), short(high)) : null;
  return h("div", { class: "keys" }, ramp, key("heat-zero", "exactly 0"), key("without", "no gradient"), key("frozen", "frozen"), key("nonfinite", "NaN or Inf"));
}
