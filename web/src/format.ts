// How numbers and times are written.

import type { Norm } from "./data";

export const count = (value: number): string => value.toLocaleString("en-US");

export function plural(value: number, word: string, many = `${word}s`): string {
  return `${count(value)} ${value === 1 ? word : many}`;
}

/** A number with three digits: 0.0123, 4.56, 1.2e-9. */
export function short(value: Norm | undefined): string {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value === "nan" ? "NaN" : value.replace("inf", "Inf");
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(3)));
}

const pad = (value: number, digits = 2): string => String(value).padStart(digits, "0");

/** Local date and time. */
export function moment(milliseconds: number, seconds = true): string {
  const date = new Date(milliseconds);
  if (Number.isNaN(date.getTime())) return "–";
  const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  return `${day} ${pad(date.getHours())}:${pad(date.getMinutes())}${seconds ? `:${pad(date.getSeconds())}` : ""}`;
}

/** The zone of `moment`: UTC, UTC+01:00. */
export function zone(milliseconds: number = Date.now()): string {
  const minutes = -new Date(milliseconds).getTimezoneOffset();
  if (!minutes) return "UTC";
  if (Number.isNaN(minutes)) return "";
  return `UTC${minutes > 0 ? "+" : "−"}${pad(Math.floor(Math.abs(minutes) / 60))}:${pad(Math.abs(minutes) % 60)}`;
}

/** How long something took, in the two largest units. */
export function duration(milliseconds: number): string {
  if (!Number.isFinite(milliseconds)) return "–";
  if (milliseconds < 1000) return `${Math.round(milliseconds)} ms`;
  const seconds = Math.round(milliseconds / 1000);
  const units: [number, string][] = [
    [Math.floor(seconds / 86400), "d"],
    [Math.floor(seconds / 3600) % 24, "h"],
    [Math.floor(seconds / 60) % 60, "min"],
    [seconds % 60, "s"],
  ];
  const first = units.findIndex(([value]) => value > 0);
  return units
    .slice(first, first + 2)
    .filter(([value]) => value > 0)
    .map(([value, unit]) => `${value} ${unit}`)
    .join(" ");
}

/** The class of an exception without its module. */
export const classOf = (name: string | null): string => (name ?? "").split(".").pop() ?? "";

/** A word of a command line: quoted where a shell would read more into it. */
export const quoted = (word: string): string => (/^[\w.\/@%+=:,-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

/** Control characters and those that turn the direction of the text, made visible. */
export function visible(text: string): string {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g, (c) => {
    return `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`;
  });
}
