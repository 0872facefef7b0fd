// A stored sample as a picture or as numbers.

import type { Part } from "./data";
import { h } from "./dom";
import { count, short, visible } from "./format";

export function preview(parts: Part[]): HTMLElement {
  return h("div", { class: "preview" }, ...parts.map(part));
}

function part(one: Part): HTMLElement {
  const shape = one.shape ? ` ${one.dtype} ${one.shape.length ? one.shape.join("×") : "scalar"}` : "";
  const head = h("p", { class: "part-head" }, h("code", {}, visible(one.path || "sample")), h("span", { class: "note" }, shape));
  if (one.kind === "picture") return h("figure", { class: "part" }, head, picture(one), h("figcaption", { class: "note" }, range(one)));
  if (one.kind === "numbers") return h("div", { class: "part" }, head, numbers(one), (one.values ?? []).length > 1 ? h("p", { class: "note" }, range(one)) : null);
  return h("div", { class: "part" }, head, h("p", { class: "mono" }, visible(one.text ?? "")));
}

function range(one: Part): string {
  const bad = one.bad ? `, ${count(one.bad)} NaN or Inf` : "";
  const spread = one.part ? " (of evenly spread values)" : "";
  const mean = one.mean === undefined || one.mean === null ? "" : `, mean ${short(one.mean)}`;
  const ends = one.black === undefined || (one.black === one.low && one.white === one.high) ? "" : ` (black is ${short(one.black)}, white ${short(one.white)})`;
  return one.low === null || one.low === undefined ? `no finite value${bad}` : `${short(one.low)} to ${short(one.high)}${ends}${mean}${bad}${spread}`;
}

function numbers(one: Part): HTMLElement {
  const values = one.values ?? [];
  const total = (one.shape ?? []).reduce((product, size) => product * size, 1);
  if (total === 1 && values.length === 1) return h("p", { class: typeof values[0] === "string" ? "mono nonfinite" : "mono" }, short(values[0]));
  const cells = values.map((value) => h("span", { class: typeof value === "string" ? "value nonfinite" : "value" }, short(value)));
  return h("div", { class: "values" }, ...cells, total > values.length ? h("span", { class: "note" }, `… ${count(total - values.length)} more`) : null);
}

function picture(one: Part): HTMLElement {
  const { height = 0, width = 0, channels = 1 } = one;
  const bytes = Uint8Array.from(atob(one.pixels ?? ""), (character) => character.charCodeAt(0));
  const canvas = h("canvas", { width, height, role: "img", "aria-label": `${visible(one.path || "sample")} as a picture; NaN and Inf are magenta` });
  const context = canvas.getContext("2d");
  if (!context || !width || !height) return canvas;
  const image = context.createImageData(width, height);
  for (let pixel = 0; pixel < width * height; pixel++) {
    const cell = bytes.subarray(pixel * channels, (pixel + 1) * channels);
    const bad = cell.includes(255);
    const [red, green, blue] = channels >= 3 ? [cell[0]!, cell[1]!, cell[2]!] : [cell[0]!, cell[0]!, cell[0]!];
    image.data.set(bad ? [226, 0, 122, 255] : [red, green, blue, 255], pixel * 4);
  }
  context.putImageData(image, 0, 0);
  const scale = Math.max(1, Math.min(24, Math.floor(192 / Math.max(width, height))));
  canvas.style.width = `${width * scale}px`;
  canvas.style.aspectRatio = `${width} / ${height}`;
  return canvas;
}
