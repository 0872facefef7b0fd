// A training that still runs: the server is asked for newer data now and then.

import { unpack, type PageData } from "./data";
import { h } from "./dom";
import { moment } from "./format";

const LEAST = 2000;

export class Live {
  readonly element = h("span", { class: "live", role: "status" }, "connecting");
  private state = "";

  constructor(private readonly show: (data: PageData) => void) {}

  async run(): Promise<never> {
    for (;;) {
      const start = performance.now();
      await this.ask();
      const took = performance.now() - start;
      await new Promise((resume) => setTimeout(resume, Math.max(LEAST, 4 * took)));
      while (document.hidden) await new Promise((resume) => document.addEventListener("visibilitychange", resume, { once: true }));
    }
  }

  private async ask(): Promise<void> {
    try {
      const answer = await fetch("/data", { headers: this.state ? { "If-None-Match": this.state } : {}, cache: "no-store" });
      if (answer.status === 200) {
        const data = await unpack(new Uint8Array(await answer.arrayBuffer()));
        this.state = answer.headers.get("ETag") ?? "";
        this.show(data);
      } else if (answer.status !== 304) throw new Error((await answer.text()).split("\n")[0]);
      this.tell("live", `live · ${moment(Date.now()).slice(11)}`);
    } catch (error) {
      this.tell("lost", error instanceof TypeError ? "the server has ended" : String(error instanceof Error ? error.message : error));
    }
  }

  private tell(kind: string, text: string): void {
    this.element.className = `live ${kind}`;
    this.element.textContent = text;
  }
}
