// Shows the list of runs: one row for each, with its outcome and newest metrics. A click on a column sorts by it.
import { address } from "../api.js";
import { cause, duration, foreign, h, number, outcome, problem, table } from "../dom.js";

const EVERY_MS = 5000; // between two requests for the list
const COLUMNS = [ // name, whether it has numbers, and the value to sort by
  ["run", false, (one) => one.name],
  ["state", false, (one) => one.state],
  ["steps", true, (one) => one.steps_done],
  ["reward", true, (one) => one.reward],
  ["held-out exact", true, (one) => one.exact],
  ["samples/s", true, (one) => one.samples_per_s],
  ["newest", true, (one) => one.newest_s],
];

export function show(root, { runs, again }) {
  const card = h("section", { class: "card scroll", tabIndex: 0, role: "region", "aria-label": "Runs" });
  const trouble = h("section", {});
  root.append(h("h1", {}, "Runs"), trouble, card);
  let [sorted, down, left, waiting] = [-1, false, false, null];

  function draw() {
    const rows = [...runs];
    if (sorted >= 0) rows.sort((one, other) => order(COLUMNS[sorted][2](one), COLUMNS[sorted][2](other), down));
    const focused = [...card.querySelectorAll("th button, td a")].indexOf(document.activeElement);
    const made = table(COLUMNS.map(([words, right], at) => [h("button", { type: "button", onclick: () => sort(at) }, words, at === sorted ? (down ? " ↓" : " ↑") : ""), right]), rows.map(row));
    made.className = "runs";
    if (sorted >= 0) made.querySelectorAll("th")[sorted].setAttribute("aria-sort", down ? "descending" : "ascending");
    card.replaceChildren(made);
    if (focused >= 0) card.querySelectorAll("th button, td a")[focused]?.focus();
  }

  function sort(at) {
    [sorted, down] = [at, at === sorted ? !down : COLUMNS[at][1]];
    draw();
  }

  async function look() {
    if (!document.hidden) {
      try {
        runs = await again();
        if (left) return;
        trouble.replaceChildren();
        draw();
      } catch (error) {
        if (!left) trouble.replaceChildren(problem(error));
      }
    }
    if (!left) waiting = setTimeout(look, EVERY_MS);
  }

  draw();
  waiting = setTimeout(look, EVERY_MS);
  return { leave() { left = true; clearTimeout(waiting); } };
}

// Unknown values come last.
function order(one, other, down) {
  const [unknown, otherUnknown] = [one ?? null, other ?? null].map((value) => value === null);
  if (unknown || otherUnknown) return unknown - otherUnknown;
  const found = typeof one === "number" ? one - other : one.localeCompare(other, "en", { numeric: true });
  return down ? -found : found;
}

function row(one) {
  const why = one.problem || cause(one.state);
  const steps = one.steps_done === null ? "–" : number(one.steps_done);
  const numbers = [one.steps ? `${steps} of ${number(one.steps)}` : steps, number(one.reward), number(one.exact), number(one.samples_per_s, 3), one.newest_s === null ? "–" : `${duration(Math.max(0, Date.now() / 1000 - one.newest_s))} ago`];
  return h("tr", {},
    h("td", { class: "run" }, h("a", { href: address(one.id, "run"), title: one.folder }, one.name), one.label && one.label !== one.name ? h("div", { class: "quiet small" }, one.label) : null),
    h("td", { class: "outcome" }, h("span", { class: `badge ${outcome(one.state)}` }, outcome(one.state)), why ? h("div", { class: "small lines", title: why }, foreign(why)) : null),
    ...numbers.map((words, at) => h("td", { class: "number", "data-label": COLUMNS[at + 2][0] }, words)));
}
