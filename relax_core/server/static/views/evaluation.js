// Shows the evaluations: the model's answers to held-out prompts, and the answers to one prompt over time.
import { address, ask } from "../api.js";
import { field, foreign, h, number, problem } from "../dom.js";

const EXACT = [["", "all"], ["1", "fully right"], ["0", "not right"]];

export async function show(root, { run, query }) {
  root.append(h("h1", {}, "Evaluation"));
  const found = await ask(`run/${run.id}/evaluations`);
  if (!found.length) {
    root.append(h("p", { class: "quiet" }, "No evaluation has ended yet (eval.every)."));
    return {};
  }
  const step = h("select", { name: "step" }, ...[...found].reverse().map((one) =>
    h("option", { value: one.step }, `weights ${number(one.step)}: ${one.exact} of ${one.rows} kept answers fully right`)));
  step.value = query.step ?? String(found.at(-1).step);
  const exact = h("select", { name: "exact" }, ...EXACT.map(([value, words]) => h("option", { value }, words)));
  exact.value = query.exact ?? "";
  const words = h("input", { name: "words", type: "search", value: query.words ?? "" });
  const go = (event) => {
    event?.preventDefault();
    location.hash = address(run.id, "evaluation", { step: step.value, exact: exact.value, words: words.value.trim() });
  };
  step.addEventListener("change", () => go());
  exact.addEventListener("change", () => go());
  root.append(h("form", { class: "controls", onsubmit: go }, field("Evaluation", step), field("Answers", exact), field("Words", words), h("button", { class: "main" }, "Show")));
  const body = h("section", { class: "card stack" });
  root.append(body);
  try {
    const shown = query.prompt ? await history(run, query) : await rows(run, query, step.value);
    body.append(...shown);
  } catch (error) {
    body.append(problem(error));
  }
  return {};
}

const cells = (row) => [
  h("td", { class: "words text" }, foreign(String(row.answer ?? ""))),
  h("td", { class: "words text" }, foreign(String(row.response ?? ""))),
  h("td", {}, h("span", { class: `badge ${row.exact ? "trained" : "dropped"}` }, row.exact ? "right" : "not right")),
  h("td", { class: "words" }, foreign(String(row.why ?? ""))),
];

async function rows(run, query, step) {
  const first = Number(query.first ?? 0);
  const answer = await ask(`run/${run.id}/evaluation`, { step, exact: query.exact, words: query.words, first });
  const found = answer.rows.map((row) => h("tr", {},
    h("td", { class: "words text" }, h("a", { href: address(run.id, "evaluation", { prompt: row.prompt }), title: "its answers over time" }, foreign(String(row.prompt ?? "")))), ...cells(row)));
  const page = (words, to) => h("a", { href: address(run.id, "evaluation", { ...query, first: to || undefined }) }, words);
  return [
    ...look(answer.look),
    h("div", { class: "controls" }, h("span", { class: "quiet" }, `${number(answer.count)} answers${answer.count > answer.rows.length ? `, ${number(first + 1)} to ${number(first + answer.rows.length)}` : ""}`),
      first > 0 ? page("Back", Math.max(0, first - 100)) : null, first + answer.rows.length < answer.count ? page("Next", first + answer.rows.length) : null),
    table(["prompt", "wanted", "answer", "", "why"], found),
  ];
}

const share = (value) => typeof value === "number" ? `${Math.round(100 * value)}%` : "–";

function look(rows) {
  if (!rows.length) return [];
  const found = rows.map((row) => h("tr", {},
    h("td", { class: "words text" }, foreign(String(row.text ?? ""))), h("td", { class: "number" }, share(row.share)), h("td", { class: "number" }, share(row.shadow)),
    h("td", { class: "number" }, share(row.new_share)), h("td", { class: "number" }, number(Math.round(Number(row.tokens ?? 0)))), h("td", { class: "words text" }, foreign(String(row.example ?? "")))));
  return [
    h("h2", {}, "Forms of right answers"),
    rows[0].notice ? h("p", { class: "problem" }, foreign(String(rows[0].notice))) : null,
    table(["form", "share", "right by the shadow", "not in the prompt", "tokens", "example"], found),
  ].filter(Boolean);
}

async function history(run, query) {
  const found = await ask(`run/${run.id}/prompt`, { prompt: query.prompt });
  return [
    h("h2", {}, "One prompt over time"), h("div", { class: "text" }, foreign(query.prompt)),
    found.length
      ? table(["weights", "wanted", "answer", "", "why"], found.map((row) => h("tr", {}, h("td", { class: "number" }, number(row.step)), ...cells(row))))
      : h("p", { class: "quiet" }, "No evaluation has this prompt."),
  ];
}

function table(names, found) {
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ...names.map((name) => h("th", {}, name || "exact")))), h("tbody", {}, ...found)));
}
