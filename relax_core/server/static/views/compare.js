// Compares several runs: one curve of each run per plot, and the differences of their configurations.
import { address, ask } from "../api.js";
import { chart, COLOURS } from "../chart.js";
import { field, foreign, h, number } from "../dom.js";
import { flat } from "./config.js";

const MOST = 8;
const TAGS = ["actor/reward", "actor/exact", "eval/exact", "actor/response_tokens", "actor/loss", "actor/grad_norm", "actor/entropy", "actor/samples_per_s"];

export async function show(root, { run, runs, query }) {
  const ids = (query.runs ? query.runs.split(",") : [...new Set([run.id, ...runs.map((one) => one.id)])].slice(0, 2)).slice(0, MOST);
  const chosen = ids.map((id) => runs.find((one) => one.id === id)).filter(Boolean);
  const boxes = runs.map((one) => h("input", { type: "checkbox", value: one.id, checked: ids.includes(one.id) }));
  const smoothing = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0.6 });
  const charts = h("div", { class: "charts" });
  const go = () => {
    const wanted = boxes.filter((box) => box.checked).map((box) => box.value).slice(0, MOST);
    location.hash = address(run.id, "compare", { runs: wanted.join(",") });
  };
  boxes.forEach((box) => box.addEventListener("change", go));
  const names = chosen.map((one, place) => {
    const swatch = h("i");
    swatch.style.background = COLOURS[place];
    return h("span", {}, swatch, one.name);
  });
  root.append(
    h("h1", {}, "Compare"),
    h("details", { class: "card", open: runs.length <= MOST }, h("summary", {}, `Runs, at most ${MOST}`),
      h("div", { class: "stack small" }, ...runs.map((one, place) => h("label", {}, boxes[place], ` ${one.name} – ${one.folder}`)))),
    h("div", { class: "controls" }, field("Smoothing", smoothing), h("div", { class: "legend" }, ...names)), charts);

  const answers = await Promise.all(chosen.map((one) => ask(`run/${one.id}/series`, { tags: TAGS.join(",") })));
  const configs = await Promise.all(chosen.map((one) => ask(`run/${one.id}/config`)));
  const drawn = TAGS.map((tag) => ({ tag, plot: chart(tag) }));
  charts.append(...drawn.map((one) => one.plot.element));
  const draw = () => {
    for (const { tag, plot } of drawn) {
      plot.set(answers.map((answer, place) => {
        const [steps, values] = answer.curves[tag] ?? [[], []];
        return { label: chosen[place].name, steps, values };
      }), [], Number(smoothing.value));
    }
  };
  smoothing.addEventListener("input", draw);
  draw();
  root.append(...tables(chosen, configs));
  return { leave() { drawn.forEach(({ plot }) => plot.leave()); } };
}

function tables(chosen, configs) {
  const head = h("tr", {}, h("th", {}, "run"), ...chosen.map((one) => h("th", {}, one.name)));
  const all = configs.map((one) => new Map(flat(one.values)));
  const keys = [...new Set(all.flatMap((one) => [...one.keys()]))].filter((key) => new Set(all.map((one) => one.get(key))).size > 1);
  const figures = [["outcome", (one) => one.outcome], ["steps", (one) => one.steps], ["samples per second", (one) => number(one.samples_per_s)],
    ["reward, last", (one) => number(one.reward?.last)], ["fully right, last", (one) => number(one.exact?.last)], ["seconds", (one) => number(one.wall_s)]];
  const table = (words, rows) => h("section", { class: "card scroll" }, h("h2", {}, words), h("table", {}, h("thead", {}, head.cloneNode(true)), h("tbody", {}, ...rows)));
  return [
    table("Results", figures.map(([name, of]) => h("tr", {}, h("th", {}, name), ...configs.map((one) => h("td", {}, String(of(one.summary) ?? "–")))))),
    keys.length
      ? table("Where the configurations differ", keys.map((key) => h("tr", {}, h("th", {}, key), ...all.map((one) => h("td", { class: "words text" }, foreign(one.get(key) ?? "–"))))))
      : h("p", { class: "quiet" }, "The configurations are equal."),
  ];
}
