// Which modules are drawn: parts of the model are opened and closed, and a closed part stands for all that is in it.

import type { Cut, Graph, ModuleOfGraph, Norm } from "../data";

export const INPUT = -1;
export const LOSS = -2;
const ROOT = 0;

export interface Box {
  /** The place of the module in the graph, INPUT or LOSS. */
  id: number;
  title: string;
  kind: string;
  path: string;
  parent: number;
  /** How many modules it stands for besides itself. */
  inside: number;
  parameters: number;
  frozen: number;
  norm: Norm;
  state: ModuleOfGraph["state"];
  calls: number;
  /** Some parameters below get no gradient, though others do. */
  partly: boolean;
}

export interface Line {
  from: number;
  to: number;
  norm: Norm;
  cuts: Cut[];
  nonfinite: boolean;
}

/** The square root of the sum of squares; NaN and Inf win, and nothing is nothing. */
export function together(norms: Norm[]): Norm {
  let sum = 0;
  let any = false;
  let worst: Norm = null;
  for (const norm of norms) {
    if (norm === null || norm === undefined) continue;
    any = true;
    if (typeof norm === "string") worst = norm === "nan" || worst === null ? norm : worst;
    else sum += norm * norm;
  }
  return worst ?? (any ? Math.sqrt(sum) : null);
}

/** More lines than this for each box cannot be followed: sums of many modules, as in transformers, make them. */
const DENSE = 1.5;

/** Leave out a line if its start leads to the start of another one of its kind with the same end; if nothing comes back along it, of any kind. */
function withoutSkips(lines: Line[]): Line[] {
  const after = new Map<number, number[]>();
  for (const line of lines) after.set(line.from, [...(after.get(line.from) ?? []), line.to]);
  const reached = new Map<number, Set<number>>();
  const reach = (start: number): Set<number> => {
    let seen = reached.get(start);
    if (seen) return seen;
    reached.set(start, (seen = new Set()));
    const waiting = [...(after.get(start) ?? [])];
    for (let next = waiting.pop(); next !== undefined; next = waiting.pop()) {
      if (seen.has(next)) continue;
      seen.add(next);
      waiting.push(...(after.get(next) ?? []));
    }
    return seen;
  };
  const kind = (line: Line): string => `${line.nonfinite} ${line.norm === null} ${line.cuts.map((cut) => cut.where).join()}`;
  const silent = (line: Line): boolean => line.norm === null && !line.nonfinite && !line.cuts.length;
  const ends = new Map<number, Line[]>();
  for (const line of lines) ends.set(line.to, [...(ends.get(line.to) ?? []), line]);
  const skips = (line: Line, other: Line): boolean =>
    other.from !== line.from &&
    (silent(line) || kind(line) === kind(other)) &&
    reach(line.from).has(other.from) &&
    !reach(other.from).has(line.from); // In a loop two starts lead to each other; then both stay.
  return lines.filter((line) => !ends.get(line.to)!.some((other) => skips(line, other)));
}

export class Grouping {
  readonly opened = new Set<number>([ROOT]);
  readonly parents: number[];
  readonly children: number[][];
  readonly depths: number[];
  private readonly below: number[][];

  constructor(readonly graph: Graph) {
    const places = new Map(graph.modules.map((module, place) => [module.name, place]));
    this.parents = graph.modules.map((module, place) => (place === ROOT ? -1 : this.parentOf(module.name, places)));
    this.children = graph.modules.map(() => []);
    this.parents.forEach((parent, place) => {
      if (parent >= 0) this.children[parent]!.push(place);
    });
    this.depths = graph.modules.map(() => 0);
    this.below = graph.modules.map((_, place) => [place]);
    for (let place = 1; place < graph.modules.length; place++) this.depths[place] = this.depths[this.parents[place]!]! + 1;
    for (let place = graph.modules.length - 1; place > 0; place--) this.below[this.parents[place]!]!.push(...this.below[place]!);
  }

  private parentOf(name: string, places: Map<string, number>): number {
    for (let end = name.lastIndexOf("."); end > 0; end = name.lastIndexOf(".", end - 1)) {
      const place = places.get(name.slice(0, end));
      if (place !== undefined) return place;
    }
    return ROOT;
  }

  get deepest(): number {
    return Math.max(0, ...this.depths);
  }

  /** The depth of the deepest box that is drawn. */
  depthShown(boxes: Box[]): number {
    return Math.max(1, ...boxes.map((box) => this.depths[box.id] ?? 0));
  }

  /** Open everything that is less deep than this. */
  openTo(depth: number): void {
    this.opened.clear();
    this.opened.add(ROOT);
    this.children.forEach((inner, place) => {
      if (inner.length && this.depths[place]! < depth) this.opened.add(place);
    });
  }

  /** Open as many levels as leave no more boxes than this. */
  openFor(most: number): number {
    let depth = 1;
    for (let next = 1; next <= this.deepest; next++) {
      this.openTo(next);
      if (this.visible().length > most && next > 1) break;
      depth = next;
    }
    this.openTo(depth);
    return depth;
  }

  toggle(place: number): void {
    if (place === ROOT || !this.children[place]?.length) return;
    if (!this.opened.delete(place)) this.opened.add(place);
  }

  /** The box that a module is seen in: itself, or the outermost closed part around it. */
  seenAs(place: number): number {
    if (place < 0) return place;
    let seen = place;
    for (let at = place; at >= 0; at = this.parents[at]!) if (!this.opened.has(at)) seen = at;
    return seen;
  }

  private visible(): number[] {
    const ends = new Set(this.graph.edges.flatMap((edge) => [edge.from, edge.to]));
    const seen = new Set<number>();
    this.graph.modules.forEach((module, place) => {
      const works = !this.children[place]!.length || ends.has(place) || module.parameters > 0;
      if (works) seen.add(this.seenAs(place));
    });
    return [...seen];
  }

  boxes(): Box[] {
    const boxes = this.visible().map((place) => this.box(place));
    const ends = new Set(this.graph.edges.flatMap((edge) => [edge.from, edge.to]));
    const plain = { kind: "", path: "", parent: -1, inside: 0, parameters: 0, frozen: 0, norm: null, state: "ok" as const, calls: 0, partly: false };
    if (ends.has(INPUT)) boxes.unshift({ ...plain, id: INPUT, title: "input" });
    if (ends.has(LOSS)) boxes.push({ ...plain, id: LOSS, title: "loss" });
    return boxes;
  }

  private box(place: number): Box {
    const module = this.graph.modules[place]!;
    const closed = !this.opened.has(place);
    const members = (closed ? this.below[place]! : [place]).map((one) => this.graph.modules[one]!);
    const owning = members.filter((one) => one.parameters > 0);
    const learning = owning.filter((one) => one.frozen < one.parameters);
    const without = learning.filter((one) => one.gradient_norm === null);
    const parameters = members.reduce((sum, one) => sum + one.parameters, 0);
    const frozen = members.reduce((sum, one) => sum + one.frozen, 0);
    let state: ModuleOfGraph["state"] = "ok";
    if (members.some((one) => one.state === "nonfinite")) state = "nonfinite";
    else if (parameters > 0 && frozen === parameters) state = "frozen";
    else if (learning.length > 0 && without.length === learning.length) state = "no_gradient";
    return {
      id: place,
      title: this.titleOf(place),
      kind: module.kind,
      path: module.name,
      parent: this.parents[place]!,
      inside: closed ? this.below[place]!.length - 1 : 0,
      parameters,
      frozen,
      norm: together(members.map((one) => one.gradient_norm)),
      state,
      calls: module.calls,
      partly: without.length > 0 && without.length < learning.length,
    };
  }

  /** The name within the part around it: blocks.0, mlp. */
  titleOf(place: number): string {
    const name = this.graph.modules[place]!.name;
    const outer = place === ROOT ? "" : this.graph.modules[this.parents[place]!]!.name;
    return (outer && name.startsWith(`${outer}.`) ? name.slice(outer.length + 1) : name) || "model";
  }

  /** The lines to draw, and how many are left out: those that only skip over what the others go through. */
  drawn(all: boolean): { lines: Line[]; skipped: number } {
    const lines = this.lines();
    const boxes = new Set(lines.flatMap((line) => [line.from, line.to])).size;
    if (all || lines.length <= DENSE * boxes) return { lines, skipped: 0 };
    const kept = withoutSkips(lines);
    return { lines: kept, skipped: lines.length - kept.length };
  }

  lines(): Line[] {
    const found = new Map<string, Line>();
    const bad = new Set<string>();
    const path = this.graph.nonfinite_path.map((place) => this.seenAs(place));
    // Forward it goes along the lines, backward against them.
    path.slice(1).forEach((to, at) => bad.add(`${path[at]} ${to}`).add(`${to} ${path[at]}`));
    for (const edge of this.graph.edges) {
      const from = this.seenAs(edge.from);
      const to = this.seenAs(edge.to);
      if (from === to) continue;
      const key = `${from} ${to}`;
      const line = found.get(key) ?? { from, to, norm: null, cuts: [], nonfinite: bad.has(key) };
      line.norm = together([line.norm, edge.gradient_norm]);
      line.nonfinite ||= edge.nonfinite;
      if (edge.cut && !line.cuts.some((cut) => cut.where === edge.cut!.where && cut.source === edge.cut!.source)) line.cuts.push(edge.cut);
      found.set(key, line);
    }
    return [...found.values()];
  }

  /** The boxes that a NaN or Inf went through, from its birth on. */
  badPath(): number[] {
    return [...new Set(this.graph.nonfinite_path.map((place) => this.seenAs(place)))];
  }
}
