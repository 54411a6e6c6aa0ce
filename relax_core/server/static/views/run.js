// Shows one run: progress, ledger, staleness, and its curves.
import { ask } from "../api.js";
import { chart } from "../chart.js";
import { cause, duration, field, foreign, h, number, outcome, problem, table } from "../dom.js";
import { stallReport } from "./stall_report.js";

const POINTS = 800; // per curve, twice the pixels of its card
const EVERY_MS = 2000; // between two requests about a live run
const CHARTS = [
  ["Reward", ["actor/reward", "eval/reward"]],
  ["Fully right", ["actor/exact", "eval/exact", "actor/reward_shadow", "eval/shadow"]],
  ["Response tokens", ["actor/response_tokens", "actor/response_tokens/p10", "actor/response_tokens/p90"]],
  ["Loss", ["actor/loss", "eval/loss"]],
  ["Preferences learned", ["actor/algorithm/preference_accuracy", "eval/preference_accuracy"]],
  ["KL to the engine's policy", ["actor/algorithm/old_kl", "actor/algorithm/kl"]],
  ["Log-prob gap (nats)", ["actor/logprob_gap_max", "actor/logprob_gap_mean"]],
  ["Gradient norm", ["actor/grad_norm"]],
  ["Entropy (nats per token)", ["actor/entropy"]],
  ["Truncated, groups without signal", ["actor/truncated", "actor/groups_without_signal"]],
  ["Staleness (steps)", ["actor/staleness_mean", "actor/staleness_max"]],
  ["Step (ms)", ["actor/step_ms", "actor/train_ms", "actor/wait_ms", "actor/sync_ms"]],
  ["Samples per second", ["actor/samples_per_s"]],
];

export async function show(root, { run, query }) {
  const facts = h("section", { class: "card stack" });
  const staleness = h("section", { class: "card" });
  const smoothing = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: query.smooth ?? 0.6 });
  const more = h("select", {});
  const charts = h("div", { class: "charts" });
  const controls = h("div", { class: "controls" }, field("Smoothing", smoothing), field("Another metric", more));
  const stall = stallReport(run);
  root.append(h("h1", { class: "hidden" }, "Run"), facts, stall.element, controls, charts, staleness);

  const drawn = CHARTS.map(([title, tags]) => ({ tags, plot: chart(title) }));
  const chosen = { tags: [], plot: chart("Chosen metric") };
  charts.append(...drawn.map((one) => one.plot.element), chosen.plot.element);
  let answer = null;
  let left = false;
  let busy = false;
  let waiting = null;
  let lastAt = 0;

  function draw() {
    for (const { tags, plot } of [...drawn, chosen]) {
      plot.set(tags.map((tag) => {
        const [steps, values] = answer.curves[tag] ?? [[], []];
        return { label: tag, steps, values };
      }), answer.resumes, Number(smoothing.value));
    }
  }

  async function refresh() {
    if (busy || left) return;
    busy = true;
    lastAt = Date.now();
    try {
      const overview = await ask(`run/${run.id}`);
      if (left) return;
      facts.replaceChildren(...head(overview));
      staleness.replaceChildren(...histogram(overview.staleness));
      const known = new Set(CHARTS.flatMap(([, tags]) => tags));
      if (more.options.length !== overview.tags.length + 1) {
        more.replaceChildren(...["", ...overview.tags].map((tag) => h("option", { value: tag }, tag || "choose …")));
        more.value = chosen.tags[0] ?? "";
      }
      const wanted = [...known, ...chosen.tags].filter((tag) => overview.tags.includes(tag));
      answer = await ask(`run/${run.id}/series`, { tags: wanted.join(","), points: POINTS });
      if (!left) draw();
    } catch (error) {
      if (!left) facts.replaceChildren(problem(error));
    } finally {
      busy = false;
    }
  }

  smoothing.addEventListener("input", () => answer && draw());
  more.addEventListener("change", () => { chosen.tags = more.value ? [more.value] : []; refresh(); });
  await Promise.all([refresh(), stall.refresh(run.state)]);
  return {
    update({ state }) {
      if (state) stall.refresh(state);
      clearTimeout(waiting);
      waiting = setTimeout(refresh, Math.max(0, EVERY_MS - (Date.now() - lastAt)));
    },
    leave() { left = true; stall.leave(); clearTimeout(waiting); for (const { plot } of [...drawn, chosen]) plot.leave(); },
  };
}

function head(overview) {
  const { steps, steps_done: done } = overview;
  const fill = h("div");
  fill.style.width = `${steps ? Math.min(100, (100 * done) / steps) : 0}%`;
  const fact = (words, value) => h("div", { class: "fact" }, h("span", { class: "quiet small" }, words), h("b", {}, value));
  const counts = overview.ledger;
  const states = overview.samples?.state ?? {};
  const line = Object.entries(counts).map(([name, count]) => `${number(count)} ${name}`).join(" · ");
  const dropped = Object.entries(overview.samples?.reason ?? {}).map(([name, count]) => `${name} ${number(count)}`).join(" · ");
  return [
    h("div", {}, h("b", {}, overview.name), " ", h("span", { class: "quiet small" }, overview.folder)),
    h("div", { class: "progress", role: "progressbar", "aria-label": "train steps", "aria-valuenow": done, "aria-valuemin": 0, "aria-valuemax": steps ?? done }, fill),
    h("div", { class: "facts" },
      fact("train steps", steps ? `${number(done)} of ${number(steps)}` : number(done)),
      fact("left", overview.state === "live" ? duration(overview.left_s) : outcome(overview.state)),
      fact("time per step", overview.step_s === null ? "–" : `${number(1000 * overview.step_s, 3)} ms`),
      fact("newest step", overview.ended_s === null ? "–" : new Date(1000 * overview.ended_s).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false })),
      fact("samples kept", `${number(Object.values(states).reduce((sum, one) => sum + one, 0))}${overview.samples_share < 1 ? ` (${Math.floor(100 * overview.samples_share)}% read)` : ""}`),
      fact("resumes", number(overview.resumes.length))),
    line ? h("div", { class: "small" }, h("span", { class: "quiet" }, "ledger: "), line) : null,
    dropped ? h("div", { class: "small" }, h("span", { class: "quiet" }, "dropped: "), dropped) : null,
    cause(overview.state) ? problem({ message: cause(overview.state) }) : null,
    ...overview.problems.map((words) => problem({ message: words })),
    ...messages("Alarms", overview.alarms.filter((one) => one.alarm)),
    ...messages("Notices", overview.alarms.filter((one) => !one.alarm)),
  ].filter(Boolean);
}

// Returns the messages about the run (docs/notify.md), newest first: alarms, or notices such as the run's end.
function messages(title, told) {
  if (!told.length) return [];
  const rows = told.map((one) => h("tr", {},
    h("td", { class: "number" }, new Date(1000 * one.time_s).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false })),
    h("td", {}, one.kind), h("td", { class: "words" }, foreign(one.title)), h("td", { class: "words" }, foreign(one.text.split("\n")[0]))));
  const columns = [["time"], [""], ["message"], ["details"]];
  return [h("details", { class: title.toLowerCase(), open: title === "Alarms" && told.some((one) => one.kind !== "over") && told.length < 6 }, h("summary", {}, `${title} (${told.length})`),
    h("div", { class: "scroll" }, table(columns, rows)))];
}

function histogram(counts) {
  const entries = Object.entries(counts ?? {});
  if (!entries.length) return [h("h2", {}, "Staleness"), h("p", { class: "quiet" }, "No trained sample yet.")];
  const most = Math.max(...entries.map(([, count]) => count));
  const rows = entries.flatMap(([steps, count]) => {
    const bar = h("div", { class: "fill" });
    bar.style.width = `${(100 * count) / most}%`;
    return [h("span", {}, `${steps} ${steps === "1" ? "step" : "steps"}`), h("div", {}, bar), h("span", {}, number(count))];
  });
  return [h("h2", {}, "Staleness of the trained samples"), h("div", { class: "bars" }, ...rows)];
}
