// The view of engines: what each of them sampled, and how many tokens a second over time.
import { address, ask } from "../api.js";
import { chart } from "../chart.js";
import { duration, foreign, h, number } from "../dom.js";
import { engineOrders } from "./engine_orders.js";

export async function show(root, { run }) {
  const body = h("div", { class: "stack" });
  const rates = chart("Sampled tokens a second, by time since the first sample (s)");
  const orders = engineOrders(run);
  root.append(h("h1", {}, "Engines"), orders.element, body, rates.element);
  let left = false;
  let waiting = null;

  async function refresh() {
    const engines = await ask(`run/${run.id}/engines`);
    if (left) return;
    if (!engines.length) {
      body.replaceChildren(h("p", { class: "quiet" }, "This run keeps no samples, so it is not known what each engine sampled."));
      rates.set([]);
      return;
    }
    const start = Math.min(...engines.map((one) => one.first_s));
    const names = [["engine"], ["samples", 1], ["tokens", 1], ["tokens a sample", 1], ["mean reward", 1], ["newest weights", 1], ["from", 1], ["to", 1]];
    const rows = engines.map((one) => h("tr", {},
      h("td", {}, h("a", { href: address(run.id, "samples", { engine: one.engine }) }, foreign(one.engine))),
      ...[number(one.samples), number(one.tokens), number(one.mean_length), number(one.reward), number(one.version), `+${duration(one.first_s - start)}`, `+${duration(one.last_s - start)}`]
        .map((words) => h("td", { class: "number" }, words))));
    body.replaceChildren(h("section", { class: "card scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, ...names.map(([name, right]) => h("th", { class: right ? "number" : "" }, name)))), h("tbody", {}, ...rows))),
    ...slow(engines));
    rates.set(engines.map((one) => ({ label: one.engine, steps: one.times.map((time) => Math.round(time - start)), values: one.rates })));
  }

  await Promise.all([refresh(), orders.refresh()]);
  return {
    update() { waiting ??= setTimeout(() => { waiting = null; refresh(); }, 5000); orders.update(); },
    leave() { left = true; orders.leave(); clearTimeout(waiting); rates.leave(); },
  };
}

// Engines share the prompts, so one that sampled clearly fewer tokens than the median of all was slower or was away.
function slow(engines) {
  if (engines.length < 2) return [];
  const sorted = engines.map((one) => one.tokens).sort((a, b) => a - b);
  const median = sorted[Math.floor(sorted.length / 2)];
  return engines.filter((one) => one.tokens < 0.8 * median).map((one) =>
    h("p", {}, foreign(`${one.engine} sampled ${number(Math.round(100 * (1 - one.tokens / median)))}% fewer tokens than the median engine.`)));
}
