// Starts the page: exchanges the link's token, shows the view that the address names, and follows the run's stream.
import { address, ask, entered, events, exchange } from "./api.js";
import { h, outcome, problem, visible } from "./dom.js";
import * as compare from "./views/compare.js";
import * as config from "./views/config.js";
import * as engines from "./views/engines.js";
import * as evaluation from "./views/evaluation.js";
import * as lineage from "./views/lineage.js";
import * as logs from "./views/logs.js";
import * as pipeline from "./views/pipeline.js";
import * as run from "./views/run.js";
import * as list from "./views/runs.js";
import * as samples from "./views/samples.js";

const VIEWS = { run, samples, evaluation, pipeline, engines, config, logs, lineage, compare };
const WORDS = { run: "Run", samples: "Samples", evaluation: "Evaluation", pipeline: "Pipeline", engines: "Engines", config: "Config", logs: "Logs", lineage: "Lineage", compare: "Compare" };
const AGAIN_MS = 3000; // pause before a stream that has ended is opened again
const main = document.getElementById("main");
const select = document.getElementById("runs");
const badge = document.getElementById("state");
let runs = [];
let shown = null; // the open view, with update(pulse) and leave()
let stream = null; // the AbortController of the open run's stream
let open = "";

function parsed() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [id, view] = path.split("/");
  return { id, view: view in VIEWS ? view : "run", query: Object.fromEntries(new URLSearchParams(query)) };
}

function state(words) {
  badge.textContent = outcome(words);
  badge.title = visible(words);
  badge.className = `badge ${outcome(words)}`;
}

async function show() {
  const { id, view, query } = parsed();
  const chosen = runs.find((one) => one.id === id) ?? (runs.length === 1 ? runs[0] : undefined);
  if (!chosen && runs.length) {
    await showList();
    return;
  }
  if (!chosen) {
    main.replaceChildren(h("p", {}, "There is no run in these folders yet."));
    setTimeout(load, 2000);
    return;
  }
  select.value = chosen.id;
  const links = Object.keys(VIEWS).map((name) => h("a", { href: address(chosen.id, name), "aria-current": name === view ? "page" : false }, WORDS[name]));
  document.getElementById("views").replaceChildren(...links);
  links.find((link) => link.ariaCurrent)?.scrollIntoView({ block: "nearest", inline: "nearest" });
  document.title = `${WORDS[view]} · ${visible(chosen.name)} · Relax`;
  shown?.leave?.();
  shown = null;
  listen(chosen.id);
  state(chosen.state);
  const root = h("div", { class: "stack" });
  main.replaceChildren(root);
  try {
    const opened = await VIEWS[view].show(root, { run: chosen, runs, query });
    if (root.isConnected) shown = opened;
    else opened?.leave?.();
  } catch (error) {
    root.append(problem(error));
  }
}

// Shows all runs in one table, which polls the list because no run's stream is open.
async function showList() {
  shown?.leave?.();
  stream?.abort();
  [stream, open] = [null, ""];
  select.value = "";
  document.getElementById("views").replaceChildren();
  document.title = "Runs · Relax";
  state("");
  const root = h("div", { class: "stack" });
  main.replaceChildren(root);
  shown = list.show(root, { runs, again: async () => { runs = await ask("runs"); fill(); return runs; } });
}

function listen(id) {
  if (stream && open === id) return;
  stream?.abort();
  open = id;
  stream = null;
  if (document.hidden) return;
  stream = new AbortController();
  follow(id, stream.signal);
}

// Reads the run's stream until it is aborted, and opens it again if the server ends it.
async function follow(id, signal) {
  let last = "";
  while (!signal.aborted) {
    try {
      for await (const data of events(`run/${id}/stream`, signal)) {
        if (data === last) continue;
        const first = !last;
        last = data;
        const pulse = JSON.parse(data);
        state(pulse.state);
        if (!first) shown?.update?.(pulse);
      }
    } catch (error) {
      if (signal.aborted) return;
    }
    await new Promise((resolve) => { setTimeout(resolve, AGAIN_MS); });
  }
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    stream?.abort();
    stream = null;
  } else if (open) {
    listen(open);
    shown?.update?.({});
  }
});

// Replaces the options only if the runs have changed, so that an open list stays open.
function fill() {
  const options = runs.map((one) => h("option", { value: one.id, title: one.folder }, [one.name, one.state, one.folder, one.problem].filter(Boolean).join(" – ")));
  if (runs.length > 1) options.unshift(h("option", { value: "" }, `All ${runs.length} runs`));
  const same = options.length === select.options.length && options.every((one, at) => one.text === select.options[at].text);
  if (same) return;
  const { value } = select;
  select.replaceChildren(...options);
  select.value = value;
}

async function load() {
  try {
    runs = await ask("runs");
  } catch (error) {
    main.replaceChildren(problem(error));
    return;
  }
  fill();
  await show();
}

select.addEventListener("change", () => { location.hash = select.value ? address(select.value, parsed().view) : "#/"; });
window.addEventListener("hashchange", () => { if (!enter()) show(); });

// A link with a token may also be pasted into an open page.
function enter() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return false;
  history.replaceState(null, "", "/");
  exchange(token).then(load, (error) => main.replaceChildren(problem(error)));
  return true;
}

if (!enter()) entered().then(load);
