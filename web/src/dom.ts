// Elements are made here and nowhere else, and text becomes a text node: nothing that a ledger holds is ever markup.

import { visible } from "./format";

type Child = Node | string | number | null | undefined | false;
type Attributes = Record<string, string | number | boolean | null | undefined>;

const SVG = "http://www.w3.org/2000/svg";

function fill<E extends Element>(element: E, attributes: Attributes, children: Child[]): E {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(typeof child === "object" ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  return fill(document.createElement(tag), attributes, children);
}

export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  return fill(document.createElementNS(SVG, tag) as SVGElementTagNameMap[K], attributes, children);
}

/** A section of the page with its heading; `lead` is a sentence beside it. */
export function section(id: string, title: string, lead: Child, ...children: Child[]): HTMLElement {
  return h(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    h("header", { class: "section-head" }, h("h2", { id: `${id}-title` }, title), h("p", { class: "lead" }, lead)),
    ...children,
  );
}

/** What stands where there is nothing to show. */
export function empty(title: string, text: string, code = ""): HTMLElement {
  return h(
    "div",
    { class: "empty" },
    h("p", { class: "empty-title" }, title),
    h("p", {}, text),
    code ? h("pre", {}, h("code", {}, code)) : null,
  );
}

/** A button that copies a text as it is seen, and says that it did. */
export function copyButton(seen: string, label: string): HTMLButtonElement {
  const text = visible(seen);
  const button = h("button", { type: "button", class: "copy", "aria-label": label }, "Copy");
  button.addEventListener("click", async (event) => {
    event.stopPropagation();
    button.textContent = (await copy(text)) ? "Copied" : "Press Ctrl+C";
    setTimeout(() => (button.textContent = "Copy"), 1600);
  });
  return button;
}

async function copy(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Not allowed where the page is opened: the old way, with a field to copy from.
    const field = h("textarea", { class: "visually-hidden", "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

/** Arrow keys, Home and End move the focus among elements of which one at a time can be reached by Tab. */
export function roving(container: Element, selector: string): void {
  container.addEventListener("keydown", (event) => {
    const step = moves[(event as KeyboardEvent).key];
    if (!step || !(event.target instanceof Element) || !event.target.matches(selector)) return;
    const all = [...container.querySelectorAll<HTMLElement | SVGElement>(selector)];
    const at = all.indexOf(event.target as HTMLElement);
    const next = all[Math.max(0, Math.min(all.length - 1, step(at, all.length)))];
    if (!next) return;
    event.preventDefault();
    for (const one of all) one.setAttribute("tabindex", one === next ? "0" : "-1");
    next.focus();
  });
}

const moves: Record<string, (at: number, count: number) => number> = {
  ArrowRight: (at) => at + 1,
  ArrowDown: (at) => at + 1,
  ArrowLeft: (at) => at - 1,
  ArrowUp: (at) => at - 1,
  Home: () => 0,
  End: (_, count) => count - 1,
};
