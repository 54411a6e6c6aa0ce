// Shows a run over time: lanes of trainer, rollout, weights, evaluations, restarts, recoveries and orders, and the samples of a train step.
import { address, ask } from "../api.js";
import { field, foreign, h, number, problem } from "../dom.js";

const EVERY_MS = 2000;
const COLOUR = {
  wait: "#c9972b", bus: "#7a8597", decode: "#1a9cb0", train: "#2f6fe4", sync: "#a552c9", checkpoint: "#d2447f", other: "#98a2b3",
  trainer: "#2457c5", rollout: "#2a9d63", weights: "#a552c9", evaluation: "#d9622b",
  pack: "#1a9cb0", logprobs: "#8fb3f2", forward: "#2f6fe4", sums: "#7a8597", backward: "#1d4fae", pipeline: "#5b7fd6", reduce: "#c9972b", optimizer: "#a552c9",
  engine: "#2a9d63", restarts: "#d2447f", recoveries: "#b3261e", orders: "#1a9cb0",
};
const PARTS = ["wait", "bus", "logprobs", "decode", "train", "sync", "checkpoint", "other"];
const WORDS = { wait: "waits for samples", bus: "waits for the bus", logprobs: "computes log-probs", decode: "reads groups", train: "trains", sync: "publishes weights", checkpoint: "saves a checkpoint", other: "other" };

export async function show(root, { run, query }) {
  const lanes = h("section", { class: "card stack" });
  const batch = h("section", { class: "card stack" });
  const first = h("input", { name: "first", type: "number", min: 0, value: query.first ?? "" });
  const last = h("input", { name: "last", type: "number", min: 0, value: query.last ?? "" });
  const form = h("form", { class: "controls", onsubmit: (event) => {
    event.preventDefault();
    location.hash = address(run.id, "pipeline", { first: first.value, last: last.value });
  } }, field("From train step", first), field("To", last), h("button", { class: "main" }, "Show"),
  h("a", { href: address(run.id, "pipeline") }, "Newest"));
  root.append(h("h1", { class: "hidden" }, "Pipeline"), form, lanes, batch);
  let left = false;
  let waiting = null;
  let lastAt = 0;
  let shown = null;

  async function refresh() {
    lastAt = Date.now();
    try {
      shown = await ask(`run/${run.id}/timeline`, { first: query.first, last: query.last });
      if (left) return;
      lanes.replaceChildren(...drawn(run, query, shown));
      if (!batch.childElementCount || !query.step) await life(Number(query.step ?? shown.last));
    } catch (error) {
      if (!left) lanes.replaceChildren(problem(error));
    }
  }

  async function life(step) {
    try {
      const answer = await ask(`run/${run.id}/batch`, { step });
      if (!left) batch.replaceChildren(...anatomy(run, answer));
    } catch (error) {
      if (!left) batch.replaceChildren(problem(error));
    }
  }

  await refresh();
  const latest = !query.first && !query.last;
  return {
    update() {
      if (!latest) return;
      clearTimeout(waiting);
      waiting = setTimeout(refresh, Math.max(0, EVERY_MS - (Date.now() - lastAt)));
    },
    leave() { left = true; clearTimeout(waiting); },
  };
}

const seconds = (value) => (value >= 1 ? `${number(value, 3)} s` : `${number(1000 * value, 3)} ms`);

// Returns the row of each span of a lane; overlapping spans are in different rows.
function rowsOf(spans, slack) {
  const ends = [];
  return spans.map((span) => {
    let row = ends.findIndex((end) => end <= span.start_s + slack);
    if (row < 0) row = ends.length;
    ends[row] = span.end_s;
    return row;
  });
}

function bar(left, width, top, colour, title, href) {
  const element = h(href ? "a" : "div", { class: "bar-span", title, href: href ?? null, "aria-label": href ? title : null });
  Object.assign(element.style, { left: `${100 * left}%`, width: `${100 * width}%`, top: `${top}px`, background: colour });
  return element;
}

function axis(start, end) {
  const element = h("div", { class: "axis", "aria-hidden": "true" });
  for (let place = 0; place <= 4; place += 1) {
    const mark = h("span", {}, `+${seconds(((end - start) * place) / 4)}`);
    mark.style.left = `${25 * place}%`;
    element.append(mark);
  }
  return element;
}

function drawn(run, query, answer) {
  const { start_s: start, end_s: end } = answer;
  const all = end - start || 1;
  const byLane = new Map();
  for (const span of answer.spans) byLane.set(span.lane, [...(byLane.get(span.lane) ?? []), span]);
  const kinds = ["actor-", "rollout", "engine-"];
  const order = (name) => ["trainer", "trainer's parts", "weights"].indexOf(name) + 1 || 4 + (kinds.findIndex((kind) => name.startsWith(kind)) + 4) % 4;
  const lanes = [...byLane].sort(([one], [other]) => order(one) - order(other) || one.localeCompare(other, "en", { numeric: true }));
  const rows = lanes.flatMap(([name, spans]) => {
    spans.sort((one, other) => one.start_s - other.start_s);
    const places = rowsOf(spans, 0.004 * all);
    const lane = h("div", { class: "lane" });
    lane.style.height = `${18 * (Math.max(...places) + 1)}px`;
    spans.forEach((span, place) => {
      const from = Math.max(0, (span.start_s - start) / all);
      const to = Math.min(1, (span.end_s - start) / all);
      const colour = COLOUR[span.name] ?? COLOUR[name.split(/[ -]/)[0]] ?? COLOUR.other;
      const inner = Object.entries(span.values).filter(([key]) => key.startsWith("train/")).sort((one, other) => other[1] - one[1]).map(([key, value]) => `${key.slice(6)} ${number(value, 3)} ms`);
      const counts = ["requests", "samples", "tokens"].filter((key) => span.values[key]).map((key) => `${number(span.values[key])} ${key}`);
      const title = [WORDS[span.name] ?? span.name, name === "trainer's parts" || span.of_rank ? `step ${span.step}` : null, seconds(span.end_s - span.start_s), span.values.cpu_ms ? `${number(span.values.cpu_ms, 3)} ms of a core` : null, ...counts, ...inner].filter(Boolean).join(" · ");
      lane.append(bar(from, Math.max(to - from, 0.0015), 18 * places[place] + 1, colour, title,
        name === "trainer" ? address(run.id, "pipeline", { first: query.first, last: query.last, step: span.step }) : null));
    });
    return [h("div", { class: "lane-name" }, name), lane];
  });
  const shares = PARTS.filter((part) => answer.shares[part] > 0.0005).map((part) => {
    const swatch = h("i");
    swatch.style.background = COLOUR[part];
    return h("span", {}, swatch, `${WORDS[part]} ${(100 * answer.shares[part]).toFixed(1)}%`);
  });
  const whole = h("div", { class: "shares", role: "img", "aria-label": "share of each part of the trainer's time" });
  for (const part of PARTS) {
    const piece = h("div", { title: `${WORDS[part]} ${(100 * (answer.shares[part] ?? 0)).toFixed(1)}%` });
    Object.assign(piece.style, { width: `${100 * Math.max(0, answer.shares[part] ?? 0)}%`, background: COLOUR[part] });
    whole.append(piece);
  }
  const width = answer.last - answer.first + 1;
  const move = (words, from) => h("a", { href: address(run.id, "pipeline", { first: Math.max(0, from), last: Math.max(0, from) + width - 1 }) }, words);
  const zoom = (words, wide) => h("a", { href: address(run.id, "pipeline", { first: Math.max(0, answer.last - wide + 1), last: answer.last }) }, words);
  return [
    h("h2", {}, `Train steps ${number(answer.first)} to ${number(answer.last)}, ${seconds(all)}`),
    h("div", { class: "controls" }, answer.first > 0 ? move("Earlier", answer.first - width) : null,
      answer.last + 1 < answer.steps_done ? move("Later", answer.first + width) : null,
      width > 1 ? zoom("Closer", Math.max(1, Math.floor(width / 2))) : null, zoom("Wider", 2 * width)),
    ...answer.told.map((words) => h("p", { class: "told" }, words)), whole, h("div", { class: "legend" }, ...shares),
    h("div", { class: "scroll" }, h("div", { class: "lanes" }, ...rows, h("div", {}), axis(start, end))),
    h("p", { class: "quiet small" }, "Point at a bar to see its numbers; click a step to see its samples below. The lengths of a step's parts are exact; their order inside the step is the usual order."),
  ];
}

function anatomy(run, { step, rows }) {
  const times = rows.flatMap((row) => [row.issued_s, row.put_s, row.leased_s, row.ended_s]).filter((value) => value !== null);
  if (!times.length) return [h("h2", {}, `Samples of train step ${number(step)}`), h("p", { class: "quiet" }, "The ledger has none.")];
  const start = times.reduce((a, b) => Math.min(a, b));
  const all = times.reduce((a, b) => Math.max(a, b)) - start || 1;
  const groups = new Map();
  for (const row of rows) groups.set(row.group, [...(groups.get(row.group) ?? []), row]);
  const few = rows.length <= 300;
  const versions = [...new Set(rows.map((row) => row.version).filter((one) => one !== null))].sort((a, b) => a - b);
  const shade = (version) => `hsl(${145 + 60 * versions.indexOf(version)} 50% ${versions.length > 1 ? 38 + 25 * (versions.indexOf(version) / (versions.length - 1)) : 45}%)`;
  const share = (from, to) => [(from - start) / all, Math.max((to - from) / all, 0.001)];
  const lanes = (few ? rows.map((row) => [row.uid, row]) : [...groups].map(([name, own]) => [name, own[0]])).flatMap(([name, row]) => {
    const lane = h("div", { class: "lane thin" });
    const add = (from, to, colour, title) => { if (from !== null && to !== null) lane.append(bar(...share(from, to), 1, colour, `${row.uid} · ${title} · ${seconds(to - from)}`)); };
    add(row.issued_s, row.put_s, shade(row.version), `sampled with weights ${row.version}`);
    for (const [began, ended, env] of row.turns) {
      add(began, ended, "rgb(255 255 255 / .35)", "engine request");
      if (env) add(ended, ended + env, COLOUR.evaluation, "env");
    }
    add(row.put_s, row.leased_s, "var(--grid)", "waits on the bus");
    add(row.leased_s, row.ended_s, COLOUR.train, row.reason ? `leased, then dropped: ${row.reason}` : "leased and trained");
    const link = few ? h("a", { href: address(run.id, "samples", { uid: row.uid }) }, name) : h("a", { href: address(run.id, "samples", { group: name }) }, name);
    return [h("div", { class: "lane-name small" }, link), lane];
  });
  const swatched = (colour, words) => {
    const swatch = h("i");
    swatch.style.background = colour;
    return h("span", {}, swatch, words);
  };
  const slowest = rows.filter((row) => row.issued_s !== null && row.put_s !== null).sort((a, b) => (b.put_s - b.issued_s) - (a.put_s - a.issued_s))[0];
  return [
    h("h2", {}, `Samples of train step ${number(step)}`),
    h("p", { class: "small" }, `${number(rows.length)} samples in ${number(groups.size)} groups over ${seconds(all)}. `,
      slowest ? foreign(`${slowest.uid} took longest from its prompt to the bus: ${seconds(slowest.put_s - slowest.issued_s)}.`) : null),
    h("div", { class: "legend" }, ...versions.map((one) => swatched(shade(one), `sampled with weights ${one}`)),
      ...(rows.some((row) => row.turns.length) ? [swatched(`color-mix(in srgb, ${shade(versions[0])}, white 35%)`, "engine request"), swatched(COLOUR.evaluation, "env")] : []),
      swatched("var(--grid)", "waits on the bus"), swatched(COLOUR.train, "leased and trained")),
    h("div", { class: "scroll tall" }, h("div", { class: "lanes" }, ...lanes, h("div", {}), axis(start, start + all))),
    few ? null : h("p", { class: "quiet small" }, "One row per group, because there are many samples."),
  ].filter(Boolean);
}
