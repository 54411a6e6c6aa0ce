// Shows the engines: their samples, their tokens per second over time, and the resource usage of every process.
import { address, ask } from "../api.js";
import { chart } from "../chart.js";
import { duration, foreign, h, number, table } from "../dom.js";
import { engineOrders } from "./engine_orders.js";

export async function show(root, { run }) {
  const body = h("div", { class: "stack" });
  const rates = chart("Sampled tokens per second, by time since the first sample (s)");
  const orders = engineOrders(run);
  const processes = h("div", { class: "stack" });
  root.append(h("h1", {}, "Engines"), orders.element, body, rates.element, processes);
  let left = false;
  let waiting = null;

  async function refresh() {
    const [engines, used] = await Promise.all([ask(`run/${run.id}/engines`), ask(`run/${run.id}/processes`)]);
    if (left) return;
    processes.replaceChildren(...usage(used));
    if (!engines.length) {
      body.replaceChildren(h("p", { class: "quiet" }, "This run keeps no samples, so the numbers of each engine are unknown."));
      rates.set([]);
      return;
    }
    const start = Math.min(...engines.map((one) => one.first_s));
    const names = [["engine"], ["samples", 1], ["tokens", 1], ["tokens per sample", 1], ["mean reward", 1], ["newest weights", 1], ["from", 1], ["to", 1]];
    const rows = engines.map((one) => h("tr", {},
      h("td", {}, h("a", { href: address(run.id, "samples", { engine: one.engine }) }, foreign(one.engine))),
      ...[number(one.samples), number(one.tokens), number(one.mean_length), number(one.reward), number(one.version), `+${duration(one.first_s - start)}`, `+${duration(one.last_s - start)}`]
        .map((words) => h("td", { class: "number" }, words))));
    body.replaceChildren(h("section", { class: "card scroll" }, table(names, rows)), ...slow(engines));
    rates.set(engines.map((one) => ({ label: one.engine, steps: one.times.map((time) => Math.round(time - start)), values: one.rates })));
  }

  await Promise.all([refresh(), orders.refresh()]);
  return {
    update() { waiting ??= setTimeout(() => { waiting = null; refresh(); }, 5000); orders.update(); },
    leave() { left = true; orders.leave(); clearTimeout(waiting); rates.leave(); },
  };
}

// Shows the resource usage of the run's processes in the newest 5 s.
function usage(used) {
  if (!used.length) return [];
  const names = [["process"], ["cores", 1], ["memory (MB)", 1], ["children", 1], ["their cores", 1], ["their memory (MB)", 1], ["peak memory (MB)", 1], ["GPU busy", 1], ["GPU memory (MB)", 1]];
  const shown = names.slice(0, used.some(({ numbers }) => Object.keys(numbers).some((key) => key.startsWith("gpu"))) ? 9 : 7);
  const total = (numbers, end) => {
    const found = Object.entries(numbers).filter(([key]) => key.startsWith("gpu") && key.endsWith(end)).map(([, value]) => value);
    return found.length ? found.reduce((a, b) => a + b, 0) : undefined;
  };
  const rows = used.map(({ name, numbers, most_memory_mb: most }) => h("tr", {}, h("td", {}, foreign(name)),
    ...[number(numbers.cores, 3), number(numbers.memory_mb), number(numbers.children), number(numbers.children_cores, 3), number(numbers.children_memory_mb), number(most), number(total(numbers, "_busy"), 3), number(total(numbers, "_memory_mb"))]
      .slice(0, shown.length - 1).map((words) => h("td", { class: "number" }, words))));
  return [h("section", { class: "card scroll" }, h("h2", {}, "Processes"), table(shown, rows),
  h("p", { class: "quiet small" }, "Usage in the newest 5 s. Memory is resident memory; a page that several processes share counts for each."))];
}

const LEAST_S = 10; // rates are compared for engines with at least this many seconds between first and last sample

// Engines share the prompts, so an engine that sampled clearly fewer tokens per second while it was present was slow.
function slow(engines) {
  const rates = engines.filter((one) => one.last_s - one.first_s >= LEAST_S).map((one) => [one.engine, one.tokens / (one.last_s - one.first_s)]);
  if (rates.length < 2) return [];
  const sorted = rates.map(([, rate]) => rate).sort((a, b) => a - b);
  const median = sorted[Math.floor(sorted.length / 2)];
  return rates.filter(([, rate]) => rate < 0.8 * median).map(([engine, rate]) =>
    h("p", {}, foreign(`${engine} sampled ${number(Math.round(100 * (1 - rate / median)))}% fewer tokens per second than the median engine.`)));
}
