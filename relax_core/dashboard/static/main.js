// Starts the page: exchanges the link's token, keeps the address and the views together, and listens to the run.
import { address, ask, exchange } from "./api.js";
import { h, problem } from "./dom.js";
import * as compare from "./views/compare.js";
import * as config from "./views/config.js";
import * as engines from "./views/engines.js";
import * as evaluation from "./views/evaluation.js";
import * as lineage from "./views/lineage.js";
import * as logs from "./views/logs.js";
import * as pipeline from "./views/pipeline.js";
import * as run from "./views/run.js";
import * as samples from "./views/samples.js";

const VIEWS = { run, samples, evaluation, pipeline, engines, config, logs, lineage, compare };
const WORDS = { run: "Run", samples: "Samples", evaluation: "Evaluation", pipeline: "Pipeline", engines: "Engines", config: "Config", logs: "Logs", lineage: "Lineage", compare: "Compare" };
const main = document.getElementById("main");
const select = document.getElementById("runs");
const badge = document.getElementById("state");
let runs = [];
let shown = null; // the view that is open, with update(pulse) and leave()
let stream = null;
let open = "";

function parsed() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [id, view] = path.split("/");
  return { id, view: view in VIEWS ? view : "run", query: Object.fromEntries(new URLSearchParams(query)) };
}

function state(words) {
  badge.textContent = words;
  badge.className = `badge ${words}`;
}

async function show() {
  const { id, view, query } = parsed();
  const chosen = runs.find((one) => one.id === id) ?? runs[0];
  if (!chosen) {
    main.replaceChildren(h("p", {}, "There is no run in these folders yet."));
    setTimeout(load, 2000);
    return;
  }
  select.value = chosen.id;
  const links = Object.keys(VIEWS).map((name) => h("a", { href: address(chosen.id, name), "aria-current": name === view ? "page" : false }, WORDS[name]));
  document.getElementById("views").replaceChildren(...links);
  links.find((link) => link.ariaCurrent)?.scrollIntoView({ block: "nearest", inline: "nearest" });
  document.title = `${WORDS[view]} · ${chosen.name} · Relax`;
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

function listen(id) {
  if (stream && open === id) return;
  stream?.close();
  open = id;
  stream = null;
  if (document.hidden) return;
  let last = "";
  stream = new EventSource(`/api/run/${id}/stream`);
  stream.onmessage = (event) => {
    if (event.data === last) return;
    const first = !last;
    last = event.data;
    const pulse = JSON.parse(event.data);
    state(pulse.state);
    if (!first) shown?.update?.(pulse);
  };
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    stream?.close();
    stream = null;
  } else if (open) {
    listen(open);
    shown?.update?.({});
  }
});

async function load() {
  try {
    runs = await ask("runs");
  } catch (error) {
    main.replaceChildren(problem(error));
    return;
  }
  select.replaceChildren(...runs.map((one) => h("option", { value: one.id, title: one.folder }, `${one.name} – ${one.state} – ${one.folder}`)));
  await show();
}

select.addEventListener("change", () => { location.hash = address(select.value, parsed().view); });
window.addEventListener("hashchange", () => { if (!enter()) show(); });

// A link with a token may also be pasted into an open page.
function enter() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return false;
  history.replaceState(null, "", "/");
  exchange(token).then(load, (error) => main.replaceChildren(problem(error)));
  return true;
}

if (!enter()) load();
