// Where the boxes go, and the way of each line.

import * as dagre from "@dagrejs/dagre";
import type { Box, Grouping, Line } from "./grouping";

export interface Point {
  x: number;
  y: number;
}

export interface Placed {
  width: number;
  height: number;
  boxes: (Box & Point & { width: number; height: number })[];
  frames: (Point & { id: number; title: string; width: number; height: number })[];
  lines: (Line & { points: Point[]; label: Point })[];
}

const CHARACTER = 7.2;
const BOX_HEIGHT = 44;
/** Room above the boxes of a frame, for its name. */
const FRAME_HEAD = 10;

/** How wide a box is for its words. */
function widthOf(box: Box): number {
  const longest = Math.max(box.title.length + (box.inside ? 4 : 0), box.kind.length * 0.86 + 7);
  return Math.min(240, Math.max(96, longest * CHARACTER + 30));
}

export function labelOf(line: Line): string {
  const first = line.cuts[0];
  if (!first) return "";
  return (first.where ?? first.code) + (line.cuts.length > 1 ? ` +${line.cuts.length - 1}` : "");
}

/** Down or across the screen: whichever can be seen larger; across, if both can be read, because screens are wide. */
export function place(grouping: Grouping, lines: Line[], room: { width: number; height: number }): Placed {
  const down = arrange(grouping, lines, "TB");
  const across = arrange(grouping, lines, "LR");
  return scaleFor(across, room) >= Math.min(1, scaleFor(down, room)) ? across : down;
}

/** How large it can be drawn to be seen as a whole; larger than this looks coarse. */
export function scaleFor(placed: Placed, room: { width: number; height: number }): number {
  return Math.min(1.4, room.width / placed.width, room.height / placed.height);
}

function arrange(grouping: Grouping, lines: Line[], direction: "TB" | "LR"): Placed {
  const boxes = grouping.boxes();
  const shown = new Set(boxes.map((box) => box.id));
  const framed = framesOf(grouping, boxes);
  const graph = new dagre.graphlib.Graph({ compound: framed.size > 0, multigraph: false, directed: true });
  graph.setGraph({ rankdir: direction, nodesep: 26, ranksep: 28, marginx: 16, marginy: 16, edgesep: 14 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const id of framed) graph.setNode(`frame ${id}`, {});
  for (const id of framed) {
    const outer = frameAbove(grouping, id, framed);
    if (outer !== null) graph.setParent(`frame ${id}`, `frame ${outer}`);
  }
  for (const box of boxes) {
    graph.setNode(String(box.id), { width: widthOf(box), height: box.id < 0 ? 28 : BOX_HEIGHT });
    const outer = box.id < 0 ? null : frameAbove(grouping, box.id, framed);
    if (outer !== null) graph.setParent(String(box.id), `frame ${outer}`);
  }
  for (const line of lines) {
    if (!shown.has(line.from) || !shown.has(line.to)) continue;
    const label = labelOf(line);
    graph.setEdge(String(line.from), String(line.to), label ? { width: label.length * 7.3 + 42, height: 30, labelpos: "c" } : { width: 0, height: 0 });
  }
  dagre.layout(graph);
  return collect(graph, boxes, lines, grouping, framed);
}

function collect(graph: any, boxes: Box[], lines: Line[], grouping: Grouping, framed: Set<number>): Placed {
  const at = (name: string): any => graph.node(name);
  const size = graph.graph();
  return {
    width: Math.ceil(size.width ?? 100),
    height: Math.ceil(size.height ?? 100),
    boxes: boxes.map((box) => {
      const { x, y, width, height } = at(String(box.id));
      return { ...box, x, y, width, height };
    }),
    frames: [...framed].map((id) => {
      const { x, y, width, height } = at(`frame ${id}`);
      return { id, title: grouping.titleOf(id), x, y: y - FRAME_HEAD / 2, width, height: height + FRAME_HEAD };
    }),
    lines: lines
      .filter((line) => graph.hasEdge(String(line.from), String(line.to)))
      .map((line) => {
        const edge = graph.edge(String(line.from), String(line.to));
        const points: Point[] = edge.points;
        const label = edge.x === undefined ? points[Math.floor(points.length / 2)]! : { x: edge.x, y: edge.y };
        return { ...line, points, label };
      }),
  };
}

/** The opened parts that hold more than one visible box; the model itself needs no frame. */
function framesOf(grouping: Grouping, boxes: Box[]): Set<number> {
  const counts = new Map<number, number>();
  for (const box of boxes) {
    for (let above = box.id < 0 ? -1 : grouping.parents[box.id]!; above > 0; above = grouping.parents[above]!) {
      counts.set(above, (counts.get(above) ?? 0) + 1);
    }
  }
  return new Set([...counts].filter(([, count]) => count > 0).map(([id]) => id));
}

function frameAbove(grouping: Grouping, id: number, framed: Set<number>): number | null {
  for (let above = grouping.parents[id]!; above > 0; above = grouping.parents[above]!) if (framed.has(above)) return above;
  return null;
}

/** A soft way through the points. */
export function pathThrough(points: Point[]): string {
  const [first, ...rest] = points;
  if (!first || !rest.length) return "";
  const last = rest[rest.length - 1]!;
  let path = `M${first.x.toFixed(1)},${first.y.toFixed(1)}`;
  for (let at = 0; at < rest.length - 1; at++) {
    const here = rest[at]!;
    const next = rest[at + 1]!;
    const end = at === rest.length - 2 ? last : { x: (here.x + next.x) / 2, y: (here.y + next.y) / 2 };
    path += `Q${here.x.toFixed(1)},${here.y.toFixed(1)} ${end.x.toFixed(1)},${end.y.toFixed(1)}`;
  }
  return rest.length === 1 ? `${path}L${last.x.toFixed(1)},${last.y.toFixed(1)}` : path;
}
