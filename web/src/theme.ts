// Light and dark: what the system says, until the button says otherwise; remembered where that is possible.

import { h } from "./dom";

const KEY = "gradgate-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners: (() => void)[] = [];

/** Have something drawn anew when the colours change. */
export const onTheme = (listener: () => void): void => void listeners.push(listener);

/** The value of a custom property of the style, such as --ink. */
export const shade = (name: string): string => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function remembered(): string | null {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // Storage is switched off for files in some browsers.
  }
}

function remember(theme: string): void {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    return; // It holds for this visit, then.
  }
}

let chosen = remembered();

export function themeButton(): HTMLButtonElement {
  const button = h("button", { type: "button", class: "quiet", id: "theme" });
  const apply = (printing = false): void => {
    const theme = printing ? "light" : chosen === "dark" || chosen === "light" ? chosen : system.matches ? "dark" : "light";
    document.documentElement.dataset.theme = theme;
    const other = theme === "dark" ? "light" : "dark";
    button.textContent = other === "dark" ? "Dark" : "Light";
    button.setAttribute("aria-label", `Switch to the ${other} theme`);
    for (const listener of listeners) listener();
  };
  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    remember(chosen);
    apply();
  });
  system.addEventListener("change", () => apply());
  addEventListener("beforeprint", () => apply(true));
  addEventListener("afterprint", () => apply());
  apply();
  return button;
}
