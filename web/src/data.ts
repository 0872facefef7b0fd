// The data of the page, as gradgate.report packs it, and how it is unpacked.

export type Norm = number | "nan" | "inf" | "-inf" | null;

export interface Finding {
  code: string;
  severity: "error" | "warning" | "info";
  title: string;
  where: string | null;
  source: string | null;
  module: string | null;
  reason: string;
  fix: string;
  samples: number[];
  also: string[];
  consequences?: string[];
}

export interface ModuleOfGraph {
  name: string;
  kind: string;
  calls: number;
  parameters: number;
  frozen: number;
  gradient_norm: Norm;
  state: "ok" | "frozen" | "no_gradient" | "nonfinite";
}

export interface Cut {
  code: string;
  where: string | null;
  source: string | null;
}

export interface EdgeOfGraph {
  from: number;
  to: number;
  gradient_norm: Norm;
  cut: Cut | null;
  nonfinite: boolean;
}

export interface Graph {
  modules: ModuleOfGraph[];
  edges: EdgeOfGraph[];
  nonfinite_path: number[];
}

export interface Layer {
  name: string;
  module: number;
  shape: number[];
  gradient_norm: Norm;
  weight_norm: Norm;
  learns: boolean | "part";
}

export interface Diagnosis {
  healthy: boolean;
  exception: { type: string; message: string } | null;
  findings: Finding[];
  graph?: Graph | null;
  layers?: Layer[] | null;
}

export interface Run {
  name: string;
  started: number;
  ended: number | null;
  python: string | null;
  torch: string | null;
  gradgate: string | null;
  git_commit: string | null;
  arguments: Record<string, unknown>;
  incidents: number;
}

export interface Part {
  path: string;
  kind: "picture" | "numbers" | "text";
  text?: string;
  dtype?: string;
  shape?: number[];
  values?: Norm[];
  low?: Norm;
  high?: Norm;
  mean?: Norm;
  black?: Norm;
  white?: Norm;
  bad?: number;
  part?: boolean;
  height?: number;
  width?: number;
  channels?: number;
  pixels?: string;
}

/** A column of texts: the different ones, and which of them each row has; -1 is none. */
export class Words {
  readonly words: string[];
  readonly index: Int32Array;
  constructor(packed: { words: string[]; index: number[] }) {
    this.words = packed.words;
    this.index = Int32Array.from(packed.index);
  }
  at(row: number): string | null {
    return this.words[this.index[row] ?? -1] ?? null;
  }
}

type Deltas = { deltas: (number | null)[] };

/** Undo the steps from one number to the next; what is missing is NaN. */
function undelta(packed: Deltas): Float64Array {
  let last = 0;
  return Float64Array.from(packed.deltas, (step) => (step === null ? NaN : (last += step)));
}

const WORDS = ["run", "sample", "stage", "cause", "exception", "message", "where", "module", "details"] as const;
const NUMBERS = ["time", "step", "epoch", "rank", "row", "transient"] as const;

export interface Incidents {
  count: number;
  ids: string[];
  text: Record<(typeof WORDS)[number], Words>;
  numbers: Record<(typeof NUMBERS)[number], Float64Array>;
  loss: Norm[];
  norm: Norm[];
}

export interface HardSample {
  sample: string;
  losses: number[];
  recent: number;
  /** Its loss is high and does not fall. */
  suspicious: boolean;
}

/** The samples with the largest losses, where a history of losses was kept. */
export interface HardSamples {
  samples: number;
  suspicious: number;
  median: number;
  listed: HardSample[];
}

export interface LedgerData {
  name: string;
  total: number;
  bad: number;
  badSamples: Set<number>;
  runs: Run[];
  cut: boolean;
  incidents: Incidents;
  previewOf: Map<number, Part[]>;
  hard: HardSamples | null;
  /** The ranks that have incidents, in order. */
  ranks: number[];
}

export interface PageData {
  made: number;
  gradgate: string;
  name: string;
  ledger: LedgerData | null;
  diagnosis: Diagnosis | null;
}

/** Read what is in the page itself. */
export function embedded(text: string): Promise<PageData> {
  return unpack(Uint8Array.from(atob(text), (character) => character.charCodeAt(0)));
}

/** Read compressed data. */
export async function unpack(bytes: Uint8Array<ArrayBuffer>): Promise<PageData> {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = await new Response(stream).json();
  return { ...raw, ledger: raw.ledger && readLedger(raw.ledger) };
}

function readLedger(raw: any): LedgerData {
  const columns = raw.columns;
  const previewOf = new Map<number, Part[]>();
  const numbers = Object.fromEntries(NUMBERS.map((name) => [name, undelta(columns[name])])) as Incidents["numbers"];
  for (const [row, sample] of raw.previews.of) previewOf.set(row, raw.previews.samples[sample]);
  return {
    name: raw.name,
    total: raw.total,
    bad: raw.bad,
    badSamples: new Set(undelta(raw.bad_words)),
    runs: raw.runs,
    cut: raw.cut,
    previewOf,
    hard: raw.hard ?? null,
    ranks: [...new Set(numbers.rank)].filter((rank) => !Number.isNaN(rank)).sort((a, b) => a - b),
    incidents: {
      count: raw.id.length,
      ids: raw.id,
      text: Object.fromEntries(WORDS.map((name) => [name, new Words(columns[name])])) as Incidents["text"],
      numbers,
      loss: columns.loss.numbers,
      norm: columns.norm.numbers,
    },
  };
}
