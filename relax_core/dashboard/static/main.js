// Starts the page: exchanges the link's token, keeps the address and the views together, and listens to the run.
import { address, ask, entered, events, exchange } from "./api.js";
import { badge, h, problem, visible } from "./dom.js";
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
const LIST = "runs"; // the address of the list of all runs, where a page with several of them begins
const AGAIN_MS = 3000; // between the end of a stream and the next one
const main = document.getElementById("main");
const select = document.getElementById("runs");
const state = document.getElementById("state");
let runs = [];
let shown = null; // the view that is open, with update(pulse) and leave()
let stream = null; // ends the stream of the run that is open
let open = "";

function parsed() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [id, view] = path.split("/");
  if (id === LIST || (!id && runs.length > 1)) return { id: LIST };
  return { id, view: view in VIEWS ? view : "run", query: Object.fromEntries(new URLSearchParams(query)) };
}

function showState(words) {
  state.replaceChildren(...(words ? [badge(words)] : []));
}

function openList() {
  select.value = LIST;
  document.getElementById("views").replaceChildren(h("a", { href: `#/${LIST}`, "aria-current": "page" }, "Runs"));
  document.title = "Runs · Relax";
  stream?.abort();
  stream = null;
  open = "";
  showState("");
}

function openRun(chosen, view) {
  select.value = chosen.id;
  const links = [h("a", { href: `#/${LIST}` }, "Runs"), ...Object.keys(VIEWS).map((name) => h("a", { href: address(chosen.id, name), "aria-current": name === view ? "page" : false }, WORDS[name]))];
  document.getElementById("views").replaceChildren(...links);
  links.find((link) => link.ariaCurrent)?.scrollIntoView({ block: "nearest", inline: "nearest" });
  document.title = `${WORDS[view]} · ${visible(chosen.name)} · Relax`;
  listen(chosen.id);
  showState(chosen.state);
}

async function show() {
  const { id, view, query } = parsed();
  const chosen = runs.find((one) => one.id === id) ?? runs[0];
  if (!chosen) {
    main.replaceChildren(h("p", {}, "There is no run in these folders yet."));
    setTimeout(load, 2000);
    return;
  }
  shown?.leave?.();
  shown = null;
  if (id === LIST) openList();
  else openRun(chosen, view);
  const root = h("div", { class: "stack" });
  main.replaceChildren(root);
  try {
    const opened = await (id === LIST ? list : VIEWS[view]).show(root, { run: chosen, runs, query, reload });
    if (root.isConnected) shown = opened;
    else opened?.leave?.();
  } catch (error) {
    root.append(problem(error));
  }
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

// Reads the run's stream until it is told to end, and begins again if the server ends it.
async function follow(id, signal) {
  let last = "";
  while (!signal.aborted) {
    try {
      for await (const data of events(`run/${id}/stream`, signal)) {
        if (data === last) continue;
        const first = !last;
        last = data;
        const pulse = JSON.parse(data);
        showState(pulse.state);
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

// Asks for the runs anew, and returns them.
async function reload() {
  runs = await ask("runs");
  const options = runs.map((one) => h("option", { value: one.id, title: one.folder }, [one.name, one.state, one.folder, one.problem].filter(Boolean).join(" – ")));
  const { value } = select;
  select.replaceChildren(h("option", { value: LIST }, `All runs (${runs.length})`), ...options);
  if (value) select.value = value;
  return runs;
}

async function load() {
  try {
    await reload();
  } catch (error) {
    main.replaceChildren(problem(error));
    return;
  }
  await show();
}

select.addEventListener("change", () => { location.hash = select.value === LIST ? `#/${LIST}` : address(select.value, parsed().view ?? "run"); });
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
