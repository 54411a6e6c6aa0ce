// Shows the ledger: the counts of a run, and every event of the chosen samples.
import { address, ask } from "../api.js";
import { field, foreign, h, number, problem } from "../dom.js";

const CLOCK = { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3, hour12: false };
const FILTERS = [["uid", "Sample"], ["group", "Group"], ["step", "Train step"], ["reason", "Reason"]];

export async function show(root, { run, query }) {
  const inputs = Object.fromEntries(FILTERS.map(([name]) => [name, h("input", { class: "short", value: query[name] ?? "", name })]));
  const chosen = Object.fromEntries(FILTERS.map(([name]) => [name, query[name] ?? ""]));
  const form = h("form", { class: "controls", onsubmit: (event) => {
    event.preventDefault();
    location.hash = address(run.id, "lineage", Object.fromEntries(FILTERS.map(([name]) => [name, inputs[name].value.trim()])));
  } }, ...FILTERS.map(([name, words]) => field(words, inputs[name])), h("button", { class: "main" }, "Show"));
  const body = h("div", { class: "stack" });
  root.append(h("h1", {}, "Lineage"), form, body);
  try {
    const answer = await ask(`run/${run.id}/lineage`, chosen);
    body.append(...(answer.counts ? counted(run, answer) : life(answer)));
  } catch (error) {
    body.append(problem(error));
  }
  return {};
}

function counted(run, { counts, reasons, steps }) {
  const rows = [
    ["issued", counts.issued], ["trained", counts.trained],
    ...Object.entries(counts.dropped).map(([reason, count]) => [`dropped: ${reason}`, count]),
    ...Object.entries(counts.open).map(([name, count]) => [`open, newest event ${name}`, count]),
    ["lost", counts.lost.length], ["trained twice", counts.trained_twice.length],
  ];
  const links = Object.keys(reasons).map((reason) => h("a", { href: address(run.id, "lineage", { reason }) }, foreign(reason)));
  return [
    h("section", { class: "card scroll" }, h("table", { class: "narrow" }, ...rows.map(([name, count]) =>
      h("tr", {}, h("th", {}, foreign(name)), h("td", { class: "number" }, number(count)))))),
    h("p", { class: "quiet" }, steps ? `Events name the train steps ${steps[0]} to ${steps[1]}. ` : "", links.length ? "Reasons: " : "",
      ...links.flatMap((link, place) => (place ? [", ", link] : [link]))),
  ];
}

function life({ count, samples }) {
  if (!count) return [h("p", { class: "quiet" }, "No sample matches.")];
  const found = samples.map((sample) => h("section", { class: "card scroll" },
    h("h2", {}, `${sample.uid} `, h("span", { class: `badge ${sample.state}` }, sample.state)),
    h("table", {}, ...sample.events.map((event) => h("tr", {},
      h("td", { class: "number" }, new Date(1000 * event.time).toLocaleTimeString([], CLOCK)),
      h("td", { class: "number" }, `+${(event.time - sample.events[0].time).toFixed(3)} s`),
      h("td", {}, event.event), h("td", { class: "words" }, foreign(told(event))))))));
  const more = count > samples.length ? [h("p", { class: "quiet" }, `The first ${samples.length} of ${number(count)} samples.`)] : [];
  return [...more, ...found];
}

function told(event) {
  const words = [];
  if (event.step !== undefined) words.push(`step ${event.step}`);
  if (event.version !== undefined) words.push(`weights ${event.version}`);
  if (event.made) words.push(`reward ${number(event.made.reward)}`, `ended ${event.made.ended}`, ...event.made.turns.map((turn) => `${turn.end - turn.start} tokens by ${turn.engine}`));
  if (event.reason) words.push(event.reason);
  if (event.undone) words.push("undone by a resume");
  return words.join(" · ");
}
