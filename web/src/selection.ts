// Which incidents are shown, and in which order: search, filters and sorting over whole columns.

import type { LedgerData, Words } from "./data";

export type Axis = "time" | "step";
export type Column = "time" | "step" | "rank" | "sample" | "stage" | "cause" | "what" | "where";

export interface Filter {
  query: string;
  cause: string | null;
  stage: string | null;
  run: string | null;
  sample: string | null;
  rank: number | null;
  persistence: "transient" | "persistent" | null;
  range: { axis: Axis; low: number; high: number } | null;
}

const NOTHING: Filter = { query: "", cause: null, stage: null, run: null, sample: null, rank: null, persistence: null, range: null };
const SEARCHED = ["sample", "message", "cause", "exception", "where", "module", "run", "stage"] as const;
const collator = new Intl.Collator("en", { numeric: true });

export class Selection {
  filter: Filter = { ...NOTHING };
  sort: { column: Column; descending: boolean } = { column: "time", descending: true };
  rows = new Uint32Array(0);
  private readonly listeners: (() => void)[] = [];
  private lowered = new WeakMap<Words, string[]>();
  private ranks = new WeakMap<Words, Int32Array>();

  constructor(public ledger: LedgerData) {
    this.choose();
  }

  onChange(listener: () => void): void {
    this.listeners.push(listener);
  }

  /** Go on with newer data and the same filter. */
  replace(ledger: LedgerData): void {
    this.ledger = ledger;
    this.lowered = new WeakMap();
    this.ranks = new WeakMap();
    this.refresh();
  }

  narrow(change: Partial<Filter>): void {
    this.filter = { ...this.filter, ...change };
    this.refresh();
  }

  clear(): void {
    this.narrow(NOTHING);
  }

  get narrowed(): boolean {
    return JSON.stringify(this.filter) !== JSON.stringify(NOTHING);
  }

  sortBy(column: Column): void {
    const descending = this.sort.column === column ? !this.sort.descending : column === "time" || column === "step";
    this.sort = { column, descending };
    this.refresh();
  }

  private refresh(): void {
    this.choose();
    for (const listener of this.listeners) listener();
  }

  private choose(): void {
    const { incidents } = this.ledger;
    const tests = this.tests();
    const found = new Uint32Array(incidents.count);
    let length = 0;
    for (let row = 0; row < incidents.count; row++) {
      if (tests.every((test) => test(row))) found[length++] = row;
    }
    this.rows = this.ordered(found.subarray(0, length));
  }

  private tests(): ((row: number) => boolean)[] {
    const { text, numbers } = this.ledger.incidents;
    const tests: ((row: number) => boolean)[] = [];
    for (const name of ["cause", "stage", "run", "sample"] as const) {
      const wanted = this.filter[name];
      if (wanted === null) continue;
      const place = text[name].words.indexOf(wanted);
      tests.push((row) => place >= 0 && text[name].index[row] === place);
    }
    const { rank, persistence, range } = this.filter;
    if (rank !== null) tests.push((row) => numbers.rank[row] === rank);
    if (persistence) tests.push((row) => (numbers.transient[row] === 1) === (persistence === "transient"));
    if (range) {
      const values = numbers[range.axis];
      tests.push((row) => values[row]! >= range.low && values[row]! <= range.high);
    }
    const query = this.filter.query.trim().toLowerCase();
    if (query) tests.push(this.search(query));
    return tests;
  }

  /** Look the query up once in each different word, then only in the ids. */
  private search(query: string): (row: number) => boolean {
    const { text, ids } = this.ledger.incidents;
    const hits = SEARCHED.map((name) => {
      const column = text[name];
      let lowered = this.lowered.get(column);
      if (!lowered) this.lowered.set(column, (lowered = column.words.map((word) => word.toLowerCase())));
      return [column.index, Uint8Array.from(lowered, (word) => Number(word.includes(query)))] as const;
    });
    return (row) => hits.some(([index, hit]) => hit[index[row]!] === 1) || ids[row]!.toLowerCase().startsWith(query);
  }

  private ordered(rows: Uint32Array<ArrayBuffer>): Uint32Array<ArrayBuffer> {
    const { column, descending } = this.sort;
    if (column !== "time") {
      const key = this.key(column);
      rows = rows.slice().sort((a, b) => key[a]! - key[b]! || a - b);
    }
    return descending ? rows.slice().reverse() : rows;
  }

  private key(column: Exclude<Column, "time">): Float64Array | Int32Array {
    const { text, numbers } = this.ledger.incidents;
    if (column === "step" || column === "rank") return numbers[column].map((value) => (Number.isNaN(value) ? -1 : value));
    return this.rank(column === "what" ? text.message : text[column]);
  }

  private rank(words: Words): Int32Array {
    let key = this.ranks.get(words);
    if (!key) {
      const order = words.words.map((_, place) => place).sort((a, b) => collator.compare(words.words[a]!, words.words[b]!));
      const rankOf = new Int32Array(order.length);
      order.forEach((place, rank) => (rankOf[place] = rank));
      key = words.index.map((place) => (place < 0 ? -1 : rankOf[place]!));
      this.ranks.set(words, key);
    }
    return key;
  }
}
