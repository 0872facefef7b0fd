// Builds src/gradgate/report/page: the script, the style, and what they were built from.
// `node build.mjs [FOLDER]` builds elsewhere, for comparison.
import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import * as esbuild from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = process.argv[2] ?? join(here, "../src/gradgate/report/page");
const sha256 = (text) => createHash("sha256").update(text).digest("hex");

function filesBelow(folder) {
  return readdirSync(folder, { withFileTypes: true }).flatMap((entry) =>
    entry.isDirectory() ? filesBelow(join(folder, entry.name)) : [join(folder, entry.name)],
  );
}

// The same list and the same order as in tests/report/test_built.py.
const sources = ["build.mjs", "package.json", "package-lock.json", "tsconfig.json"]
  .map((name) => join(here, name))
  .concat(filesBelow(join(here, "src")))
  .map((path) => relative(here, path).replaceAll("\\", "/"))
  .sort();
const sourcesHash = sha256(sources.map((name) => `${name} ${sha256(readFileSync(join(here, name)))}\n`).join(""));

const licences = ["uplot", "@dagrejs/dagre", "@dagrejs/graphlib"].map((name) => {
  const { version } = JSON.parse(readFileSync(join(here, "node_modules", name, "package.json"), "utf8"));
  const text = readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8").trim();
  return `${name} ${version}\n\n${text}\n`;
});

async function bundle(entry) {
  const result = await esbuild.build({
    entryPoints: [join(here, "src", entry)],
    bundle: true,
    minify: true,
    write: false,
    format: "iife",
    target: "es2022",
    charset: "ascii",
    legalComments: "none", // Their licences are written in full, below.
  });
  return result.outputFiles[0].text.trim();
}

const script = `"use strict";/*\nThis page contains:\n\n${licences.join("\n").replaceAll("*/", "* /")}*/\n${await bundle("main.ts")}\n`;
const style = `${await bundle("page.css")}\n`;
for (const text of [script, style]) {
  if (/<\/(script|style)|<!--/i.test(text)) throw new Error("the result would end its own element");
}
mkdirSync(target, { recursive: true });
writeFileSync(join(target, "page.js"), script);
writeFileSync(join(target, "page.css"), style);
const built = { sources: sourcesHash, "page.js": sha256(script), "page.css": sha256(style) };
writeFileSync(join(target, "built.json"), JSON.stringify(built, null, 2) + "\n");
