// Shows the samples: a list with filters, one sample by token, and the samples of a group side by side.
import { address, ask } from "../api.js";
import { field, foreign, h, number, problem, table } from "../dom.js";
import { reward, sample } from "./sample.js";

const PAGE = 50;
const STATES = ["", "trained", "made", "put", "masked", "dropped", "undone"];
const ORDERS = [["newest", "newest"], ["oldest", "oldest"], ["-reward", "largest reward"], ["reward", "smallest reward"], ["-length", "longest"]];
const NUMBERS = [["step", "Step"], ["reward", "Reward"], ["length", "Tokens"], ["version", "Weights"], ["staleness", "Staleness"]];
const WIDE = 700; // window width in pixels above which the filters are open

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
  } }, field("Words", words), text("group", "Group"), text("uid", "Sample"), field("State", state), text("reason", "Reason"), text("ended", "Ended"), text("engine", "Engine"), ...numbers, field("Order", order),
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
    h("td", { class: "number" }, number(row.reward)), h("td", { class: "words text" }, h("div", { class: "lines" }, foreign(row.answer.replaceAll("\n", "↵ ")))),
    h("td", {}, h("span", { class: `badge ${row.state}`, title: row.reason }, row.state)),
    h("td", {}, foreign(row.ended)), ...[row.turns, row.step, row.length, row.version, row.staleness].map((value) => h("td", { class: "number" }, number(value)))));
  const names = [["sample"], ["reward", 1], ["answer"], ["state"], ["ended"], ["turns", 1], ["step", 1], ["tokens", 1], ["weights", 1], ["stale", 1]];
  const told = answer.searched === null
    ? `${number(answer.count)} samples${answer.count > PAGE ? `, ${number(first + 1)} to ${number(first + rows.length)}` : ""}`
    : `${number(answer.count)} of ${number(answer.searched)} ${query.before ? "older" : "newest"} samples that match the other filters have these words`;
  const page = (words, to) => h("a", { href: address(run.id, "samples", { ...filters, first: to || undefined }) }, words);
  return [
    h("div", { class: "controls" }, h("span", { class: "quiet" }, told, answer.share < 1 ? `; ${Math.floor(100 * answer.share)}% of the run's samples are read so far` : ""), first > 0 ? page("Back", Math.max(0, first - PAGE)) : null,
      answer.searched === null && first + PAGE < answer.count ? page("Next", first + PAGE) : null,
      answer.next ? h("a", { href: address(run.id, "samples", { ...filters, before: answer.next }) }, "Search older samples") : null),
    h("div", { class: "scroll" }, table(names, rows)),
  ];
}

async function side(run, query) {
  const answer = await ask(`run/${run.id}/group`, { uid: query.side });
  const rows = answer.rows.map((row) => h("article", { class: "card" },
    h("div", { class: "small" }, h("a", { href: address(run.id, "samples", { id: row.id }) }, row.uid), " ", h("span", { class: `badge ${row.state}` }, row.state)),
    h("div", { class: "small quiet" }, `${reward(row)} · ${number(row.length)} tokens`),
    row.reason ? h("div", { class: "small" }, foreign(row.reason)) : null,
    row.why ? h("div", { class: "small" }, "Why: ", foreign(row.why)) : null,
    h("div", { class: "text" }, foreign(row.answer))));
  return [h("h2", {}, `Group ${answer.group}`), h("div", { class: "card text" }, foreign(answer.prompt)), h("div", { class: "side" }, ...rows)];
}
