// The graph as SVG.

import type { Norm } from "../data";
import { svg } from "../dom";
import { short, visible } from "../format";
import { labelOf, pathThrough, type Placed } from "./layout";

const THINNEST = 1.2;
const THICKEST = 8;

/** Thickness on a logarithmic scale from the smallest to the largest norm. */
function thickness(placed: Placed): (norm: Norm) => number {
  const logs = placed.lines.map((line) => line.norm).filter((norm): norm is number => typeof norm === "number" && norm > 0).map(Math.log);
  const low = Math.min(...logs);
  const spread = Math.max(...logs) - low;
  return (norm) => {
    if (typeof norm === "string") return 4;
    if (norm === null || norm <= 0) return THINNEST;
    return spread > 0 ? THINNEST + (THICKEST - THINNEST) * ((Math.log(norm) - low) / spread) : 3;
  };
}

export function draw(placed: Placed, bad: number[]): SVGSVGElement {
  const inBadPath = new Set(bad);
  const thick = thickness(placed);
  const frames = placed.frames.slice().sort((a, b) => b.width * b.height - a.width * a.height);
  return svg(
    "svg",
    { viewBox: `0 0 ${placed.width} ${placed.height}`, class: "graph", role: "group", "aria-label": "Modules and the gradient between them" },
    definitions(),
    svg("g", {}, ...frames.map(({ x, y, width, height }) => svg("rect", { x: x - width / 2, y: y - height / 2, width, height, rx: 10, class: "frame" }))),
    svg("g", {}, ...placed.lines.map((line) => drawLine(line, thick))),
    svg("g", {}, ...frames.map(frameTitle)),
    svg("g", {}, ...placed.boxes.map((box) => drawBox(box, inBadPath.has(box.id), bad[0] === box.id))),
  );
}

function definitions(): SVGDefsElement {
  const arrow = (id: string, name: string): SVGMarkerElement =>
    svg("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" }, svg("path", { d: "M0,0.6L7.4,4L0,7.4Z", class: name }));
  return svg(
    "defs",
    {},
    svg("pattern", { id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, svg("rect", { width: 7, height: 7, class: "hatch-ground" }), svg("line", { x1: 0, y1: 0, x2: 0, y2: 7, class: "hatch-line" })),
    arrow("arrow", "arrow"),
    arrow("arrow-bad", "arrow bad"),
    arrow("arrow-cut", "arrow cut"),
  );
}

function frameTitle(one: Placed["frames"][number]): SVGTextElement {
  const { x, y, width, height } = one;
  const label = `${clip(one.title, Math.max(6, (width - 30) / 7))} −`;
  return svg("text", { x: x - width / 2 + 9, y: y - height / 2 + 15, class: "frame-title", role: "button", "data-frame": one.id, "aria-label": `Close ${visible(one.title)}` }, label);
}

function drawLine(line: Placed["lines"][number], thick: (norm: Norm) => number): SVGGElement {
  const kind = line.nonfinite ? "bad" : line.cuts.length ? "cut" : line.norm === null ? "without" : "";
  const label = labelOf(line);
  const marker = line.nonfinite ? "arrow-bad" : line.cuts.length ? "arrow-cut" : "arrow";
  const path = svg("path", { d: pathThrough(line.points), class: `line ${kind}`, "marker-end": `url(#${marker})`, "stroke-width": thick(line.norm).toFixed(2) });
  const texts = line.cuts.map((cut) => `${cut.code} ${cut.where ?? ""}\n${cut.source ?? ""}`).join("\n");
  const words = [line.norm === null ? "no gradient comes back here" : `gradient norm ${short(line.norm)}`, texts].filter(Boolean).join("\n");
  const group = svg("g", { class: "edge" }, svg("title", {}, visible(words)), path);
  if (label) group.append(cutSign(line.label.x, line.label.y, label));
  return group;
}

function cutSign(x: number, y: number, label: string): SVGGElement {
  const width = label.length * 7.3 + 30;
  return svg(
    "g",
    { class: "cut-sign", transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` },
    svg("rect", { x: -width / 2, y: -11, width, height: 22, rx: 11 }),
    svg("path", { d: `M${-width / 2 + 9},5L${-width / 2 + 13},-5M${-width / 2 + 14},5L${-width / 2 + 18},-5`, class: "cut-strokes" }),
    svg("text", { x: 10, y: 4, "text-anchor": "middle" }, visible(label)),
  );
}

function drawBox(box: Placed["boxes"][number], bad: boolean, born: boolean): SVGGElement {
  const { x, y, width, height } = box;
  const left = -width / 2;
  const top = -height / 2;
  const state = bad ? "nonfinite" : box.state;
  const words = [box.path || box.title, box.kind, box.inside ? `${box.inside} modules inside, Enter opens` : "", stateWords[state] ?? "", box.parameters ? `gradient norm ${short(box.norm)}` : ""];
  const group = svg("g", {
    class: `box ${state}${box.inside ? " closed" : ""}${box.id < 0 ? " end" : ""}${box.partly ? " partly" : ""}`,
    transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`,
    tabindex: -1,
    role: box.inside ? "button" : "img",
    "data-box": box.id,
    "aria-label": visible(words.filter(Boolean).join(", ")),
    "aria-expanded": box.inside ? "false" : null,
  });
  if (box.inside) group.append(svg("rect", { x: left + 4, y: top + 4, width, height, rx: 8, class: "behind" }));
  group.append(svg("rect", { x: left, y: top, width, height, rx: box.id < 0 ? height / 2 : 8, class: "body" }));
  if (box.id < 0) {
    group.append(svg("text", { y: 4.5, "text-anchor": "middle", class: "title" }, box.title));
    return group;
  }
  const room = (width - 24) / 7.2;
  group.append(svg("text", { x: left + 12, y: -4, class: "title" }, clip(box.title, room - (box.inside ? 3 : 0))));
  group.append(svg("text", { x: left + 12, y: 14, class: "kind" }, clip(box.kind, room * 1.1 - 7)));
  if (box.inside) group.append(svg("text", { x: -left - 12, y: -4, "text-anchor": "end", class: "plus" }, `+${box.inside}`));
  if (box.parameters) group.append(svg("text", { x: -left - 12, y: 14, "text-anchor": "end", class: "norm" }, state === "frozen" ? "frozen" : short(box.norm)));
  if (born) group.append(svg("text", { y: top - 6, "text-anchor": "middle", class: "born" }, "born here"));
  return group;
}

export const stateWords: Record<string, string> = {
  frozen: "frozen: it does not learn",
  no_gradient: "no gradient reaches it",
  nonfinite: "NaN or Inf went through it",
};

function clip(text: string, room: number): string {
  const seen = visible(text);
  return seen.length > room ? `${seen.slice(0, Math.max(1, Math.floor(room) - 1))}…` : seen;
}
