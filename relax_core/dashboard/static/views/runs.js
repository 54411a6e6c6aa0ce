// The table of all runs: where each stands, sorted by any column. A click opens a run.
import { address } from "../api.js";
import { ago, badge, foreign, h, number, problem } from "../dom.js";

const AGAIN_MS = 3000;
const steps = (run) => run.steps === null ? "–" : run.of_steps ? `${number(run.steps)} of ${number(run.of_steps)}` : number(run.steps);
// Words of the head, class of the cells, what a cell shows, and by what its rows are sorted.
const COLUMNS = [
  ["run", "words", (run) => name(run), (run) => run.name],
  ["outcome", "", (run) => badge(run.state), (run) => run.state],
  ["step", "number", steps, (run) => run.steps],
  ["reward", "number", (run) => number(run.reward, 3), (run) => run.reward],
  ["held-out", "number", (run) => run.held_out === null ? "–" : `${number(100 * run.held_out, 3)}%`, (run) => run.held_out],
  ["written", "number", (run) => ago(run.age_s), (run) => run.age_s],
];

export async function show(root, { runs, reload }) {
  let order = { column: COLUMNS.length - 1, down: false };
  let timer = null;
  const body = h("tbody");
  const heads = COLUMNS.map(([words, kind], column) => h("th", { class: kind === "number" ? kind : "" }, h("button", { class: "sort", type: "button", onclick: () => sort(column) }, words)));

  function sort(column) {
    order = { column, down: order.column === column ? !order.down : COLUMNS[column][1] === "number" && column !== COLUMNS.length - 1 };
    draw();
  }

  function draw() {
    const key = COLUMNS[order.column][3];
    const sign = order.down ? -1 : 1;
    const sorted = [...runs].sort((a, b) => {
      const [first, second] = [key(a), key(b)];
      if (first === null || second === null) return (first === null) - (second === null);
      return sign * (typeof first === "string" ? first.localeCompare(second) : first - second);
    });
    heads.forEach((head, column) => { head.ariaSort = column !== order.column ? "none" : order.down ? "descending" : "ascending"; });
    body.replaceChildren(...sorted.map((run) => h("tr", {}, ...COLUMNS.map(([words, kind, cell]) => h("td", { class: kind, "data-label": words }, cell(run))))));
  }

  root.append(h("h1", {}, "Runs"), h("section", { class: "card scroll" }, h("table", { class: "runs" }, h("thead", {}, h("tr", {}, ...heads)), body)));
  draw();

  async function again() {
    if (!document.hidden) {
      try {
        runs = await reload();
        if (root.isConnected && !body.contains(document.activeElement)) draw();
      } catch (error) {
        body.replaceChildren(h("tr", {}, h("td", { colSpan: COLUMNS.length }, problem(error))));
      }
    }
    if (timer !== null) timer = setTimeout(again, AGAIN_MS);
  }
  timer = setTimeout(again, AGAIN_MS);
  return { leave() { clearTimeout(timer); timer = null; } };
}

function name(run) {
  const [, cause] = run.state.split(/: (.*)/s);
  return [
    h("a", { href: address(run.id, "run"), title: run.folder }, foreign(run.name)),
    run.label && run.label !== run.name ? h("div", { class: "quiet small" }, foreign(run.label)) : null,
    cause || run.problem ? h("div", { class: "problem small lines" }, foreign(cause || run.problem)) : null,
  ];
}
