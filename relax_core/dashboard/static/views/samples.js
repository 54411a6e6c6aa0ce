// The view of samples: a list with filters, one sample by token, and a group side by side.
import { address, ask } from "../api.js";
import { field, foreign, h, number, problem } from "../dom.js";

const PAGE = 50;
const STATES = ["", "trained", "put", "masked", "dropped", "undone"];
const ORDERS = [["newest", "newest"], ["oldest", "oldest"], ["-reward", "largest reward"], ["reward", "least reward"], ["-length", "longest"]];
const MODES = [["logprob", "log-prob"], ["advantage", "advantage"], ["gap", "trainer − engine"], ["trained", "mask"], ["version", "weight version"], ["none", "none"]];
const NUMBERS = [["step", "Step"], ["reward", "Reward"], ["length", "Tokens"], ["version", "Weights"], ["staleness", "Staleness"]];
const WIDE = 700; // pixels from which on the filters are open

export async function show(root, { run, query }) {
  root.append(h("h1", { class: "hidden" }, "Samples"));
  const list = h("section", { class: "card stack" });
  const detail = h("section", { class: "stack", "aria-live": "polite" });
  root.append(form(run, query), detail, list);
  const reading = [];
  if (query.side) reading.push(fill(detail, () => side(run, query)));
  else if (query.id) reading.push(fill(detail, () => sample(run, query)));
  reading.push(fill(list, () => listed(run, query)));
  await Promise.all(reading);
  const latest = !query.first && (query.order ?? "newest") === "newest" && !query.words;
  let waiting = null;
  return {
    update() {
      if (!latest || waiting) return;
      waiting = setTimeout(() => { waiting = null; if (list.isConnected) fill(list, () => listed(run, query)); }, 2000);
    },
    leave() { clearTimeout(waiting); },
  };
}

async function fill(target, make) {
  try {
    const made = await make();
    target.replaceChildren(...made);
  } catch (error) {
    target.replaceChildren(problem(error));
  }
}

function form(run, query) {
  const text = (name, words) => field(words, h("input", { name, class: "short", value: query[name] ?? "" }));
  const end = (name, label) => h("input", { name, type: "number", step: "any", value: query[name] ?? "", "aria-label": label });
  const numbers = NUMBERS.map(([name, words]) => h("fieldset", {}, h("legend", {}, words), end(`${name}_min`, `${words} from`), " – ", end(`${name}_max`, `${words} to`)));
  const state = h("select", { name: "state" }, ...STATES.map((one) => h("option", { value: one }, one || "any")));
  state.value = query.state ?? "";
  const order = h("select", { name: "order" }, ...ORDERS.map(([value, words]) => h("option", { value }, words)));
  order.value = query.order ?? "newest";
  const words = h("input", { name: "words", type: "search", value: query.words ?? "" });
  const element = h("form", { class: "controls", onsubmit: (event) => {
    event.preventDefault();
    location.hash = address(run.id, "samples", Object.fromEntries([...new FormData(element).entries()].map(([name, value]) => [name, String(value).trim()])));
  } }, field("Words", words), text("group", "Group"), text("uid", "Sample"), field("State", state), text("reason", "Reason"), ...numbers, field("Order", order),
  h("button", { class: "main" }, "Show"), h("a", { href: address(run.id, "samples") }, "Clear"));
  const some = Object.keys(query).some((name) => !["id", "side", "colour", "first"].includes(name));
  return h("details", { class: "card", open: some || window.innerWidth > WIDE }, h("summary", {}, "Filters"), element);
}

async function listed(run, query) {
  const { id, side: _, colour, ...filters } = query;
  const first = Number(query.first ?? 0);
  const answer = await ask(`run/${run.id}/samples`, { ...filters, most: PAGE });
  const rows = answer.rows.map((row) => h("tr", { class: String(row.id) === id ? "chosen" : "" },
    h("td", {}, h("a", { href: address(run.id, "samples", { ...filters, colour, id: row.id }) }, row.uid)),
    h("td", { class: "number" }, number(row.reward)), h("td", { class: "words text" }, foreign(row.answer)),
    h("td", {}, h("span", { class: `badge ${row.state}`, title: row.reason }, row.state)),
    ...[row.step, row.length, row.version, row.staleness].map((value) => h("td", { class: "number" }, number(value)))));
  const names = [["sample"], ["reward", 1], ["answer"], ["state"], ["step", 1], ["tokens", 1], ["weights", 1], ["stale", 1]];
  const told = answer.searched === null
    ? `${number(answer.count)} samples${answer.count > PAGE ? `, ${number(first + 1)} to ${number(first + rows.length)}` : ""}`
    : `${number(answer.count)} of the newest ${number(answer.searched)} samples that fit the other filters have these words`;
  const page = (words, to) => h("a", { href: address(run.id, "samples", { ...filters, first: to || undefined }) }, words);
  return [
    h("div", { class: "controls" }, h("span", { class: "quiet" }, told), first > 0 ? page("Back", Math.max(0, first - PAGE)) : null,
      answer.searched === null && first + PAGE < answer.count ? page("Further", first + PAGE) : null),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ...names.map(([name, right]) => h("th", { class: right ? "number" : "" }, name)))), h("tbody", {}, ...rows))),
  ];
}

async function side(run, query) {
  const answer = await ask(`run/${run.id}/group`, { uid: query.side });
  const rows = answer.rows.map((row) => h("article", { class: "card" },
    h("div", { class: "small" }, h("a", { href: address(run.id, "samples", { id: row.id }) }, row.uid), " ", h("span", { class: `badge ${row.state}` }, row.state)),
    h("div", { class: "small quiet" }, `reward ${number(row.reward)} · ${parts(row)} · ${number(row.length)} tokens`),
    row.reason ? h("div", { class: "small" }, foreign(row.reason)) : null,
    h("div", { class: "text" }, foreign(row.answer))));
  return [h("h2", {}, `Group ${answer.group}`), h("div", { class: "card text" }, foreign(answer.prompt)), h("div", { class: "side" }, ...rows)];
}

function parts(row) {
  return Object.entries(row.parts).map(([name, value]) => `${name} ${number(value)}`).join(" · ") || "no parts";
}

async function sample(run, query) {
  const row = await ask(`run/${run.id}/sample`, { id: query.id });
  const mode = h("select", {}, ...MODES.map(([value, words]) => h("option", { value }, words)));
  mode.value = query.colour ?? "logprob";
  const text = h("div", { class: "text" });
  const scale = h("div", { class: "legend" });
  const told = h("div", { class: "small quiet", role: "status" }, "Point at a token to see its numbers.");
  const draw = () => paint(text, scale, told, row.tokens, mode.value);
  mode.addEventListener("change", () => {
    history.replaceState(null, "", address(run.id, "samples", { ...query, colour: mode.value }));
    draw();
  });
  draw();
  const turns = row.turns.length > 1 || row.turns.some((turn) => turn.tools.length) ? [h("div", { class: "scroll" }, turnTable(row.turns))] : [];
  return [h("article", { class: "card stack" },
    h("h2", {}, `${row.uid} `, h("span", { class: `badge ${row.state}` }, row.state)),
    h("div", { class: "small" }, [
      row.step === null ? null : `train step ${number(row.step)}`, `reward ${number(row.reward)}`, parts(row), `${number(row.length)} tokens`,
      `ended ${row.ended}`, row.version === null ? null : `oldest trained weights ${row.version}`, row.staleness === null ? null : `staleness ${row.staleness}`, row.engine,
    ].filter(Boolean).join(" · ")),
    row.reason ? h("div", {}, "Dropped: ", foreign(row.reason)) : null,
    h("div", { class: "controls" }, field("Colour", mode),
      h("a", { href: address(run.id, "samples", { side: row.group_uid }) }, "Its group side by side"),
      h("a", { href: address(run.id, "lineage", { uid: row.uid }) }, "Its life in the ledger")),
    row.gone ? problem({ message: row.gone }) : null, text, scale, told,
    row.left_out ? h("p", { class: "quiet" }, `${number(row.left_out)} tokens in the middle are left out.`) : null,
    row.media.length ? h("p", { class: "quiet" }, `Media: ${row.media.map((one) => `${one.kind} of ${one.rows} rows`).join(", ")}`) : null,
    ...turns)];
}

function turnTable(turns) {
  const names = ["turn", "tokens", "weights", "finish", "reward", "seconds", "tools", "env ms"];
  return h("table", {}, h("thead", {}, h("tr", {}, ...names.map((name) => h("th", {}, name)))), h("tbody", {}, ...turns.map((turn, place) => h("tr", {},
    ...[place + 1, turn.tokens, turn.versions.map(([version]) => version).join(", "), turn.finish, number(turn.reward), number(turn.seconds), turn.tools.join(", "), number(turn.env_ms)].map((one) => h("td", {}, foreign(String(one))))))));
}

// Colours: one hue from nothing to strong for sizes, two hues around 0 for signs.
function shade(value, least, most, mode) {
  if (value === null || value === undefined) return "";
  if (mode === "trained") return value ? "rgb(42 157 99 / .35)" : "rgb(201 80 60 / .35)";
  if (mode === "version") return `hsl(${(47 * value) % 360} 70% 50% / .3)`;
  if (mode === "logprob") return `rgb(217 98 43 / ${(0.75 * Math.min(1, value / (least || -1))).toFixed(3)})`;
  const size = Math.max(Math.abs(least), Math.abs(most)) || 1;
  const strength = (0.7 * Math.min(1, Math.abs(value) / size)).toFixed(3);
  return value >= 0 ? `rgb(42 157 99 / ${strength})` : `rgb(210 68 127 / ${strength})`;
}

function paint(text, scale, told, tokens, mode) {
  const values = tokens.map((token) => token[mode]).filter((value) => typeof value === "number");
  const [least, most] = values.length ? [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))] : [0, 0];
  const spans = tokens.map((token) => {
    const sampled = token.logprob !== undefined;
    const span = h("span", { class: `token ${sampled ? (token.trained ? "" : "off") : "prompt"}` }, foreign(token.text.replaceAll("\n", "↵\n")));
    if (sampled && mode !== "none") span.style.backgroundColor = shade(token[mode], least, most, mode);
    span.addEventListener("mouseenter", () => told.replaceChildren(foreign(words(token))));
    return span;
  });
  text.replaceChildren(...spans);
  const items = mode === "none" || !values.length
    ? []
    : [[least, number(least)], [most, number(most)]].map(([value, label]) => {
      const swatch = h("i");
      swatch.style.background = shade(value, least, most, mode) || "transparent";
      return h("span", {}, swatch, label);
    });
  scale.replaceChildren(...(mode === "trained" ? ["trained", "masked"].map((label, place) => {
    const swatch = h("i");
    swatch.style.background = shade(!place, 0, 0, mode);
    return h("span", {}, swatch, label);
  }) : items));
}

function words(token) {
  const found = [`token ${token.id} ${JSON.stringify(token.text)}`];
  for (const [name, label] of [["logprob", "engine's log-prob"], ["trainer_logprob", "trainer's log-prob"], ["advantage", "advantage"], ["version", "weights"]]) {
    if (token[name] !== undefined && token[name] !== null) found.push(`${label} ${number(token[name])}`);
  }
  if (token.trained !== undefined) found.push(token.trained ? "trained" : "masked");
  return found.join(" · ");
}
