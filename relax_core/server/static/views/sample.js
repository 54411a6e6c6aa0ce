// Shows one sample: its metrics, and its text by turn and token, coloured by a number of each token.
import { address, ask, fileAddress } from "../api.js";
import { field, foreign, h, number, problem } from "../dom.js";

const MODES = [["logprob", "log-prob"], ["advantage", "advantage"], ["gap", "trainer − engine"], ["trained", "mask"], ["version", "weight version"], ["none", "none"]];

// Returns the reward, with its parts in brackets.
export function reward(row) {
  const parts = Object.entries(row.parts).map(([name, value]) => `${name} ${number(value)}`).join(" · ");
  return `reward ${number(row.reward)}${parts ? ` (${parts})` : ""}`;
}

export async function sample(run, query) {
  const row = await ask(`run/${run.id}/sample`, { id: query.id });
  const mode = h("select", {}, ...MODES.map(([value, words]) => h("option", { value }, words)));
  mode.value = query.colour ?? "logprob";
  const text = h("div", { class: "stack" });
  const scale = h("div", { class: "legend" });
  const told = h("div", { class: "small quiet", role: "status" }, "Point at a token to see its numbers.");
  const draw = () => paint(text, scale, told, row, mode.value);
  mode.addEventListener("change", () => {
    history.replaceState(null, "", address(run.id, "samples", { ...query, colour: mode.value }));
    draw();
  });
  draw();
  return [h("article", { class: "card stack" },
    h("h2", {}, `${row.uid} `, h("span", { class: `badge ${row.state}` }, row.state)),
    h("div", { class: "small" }, [
      row.step === null ? null : `train step ${number(row.step)}`, reward(row), `${number(row.length)} tokens`,
      row.turns_of.length > 1 ? `${row.turns_of.length} turns` : null, row.segments > 1 ? `${row.segments} histories` : null,
      `ended ${row.ended}`, row.version === null ? null : `oldest trained weights ${row.version}`, row.staleness === null ? null : `staleness ${row.staleness}`, row.engine,
    ].filter(Boolean).join(" · ")),
    row.why ? h("div", {}, h("span", { class: "quiet" }, "Explanation of the reward: "), foreign(row.why)) : null,
    row.reason ? h("div", {}, h("span", { class: "quiet" }, "Dropped: "), foreign(row.reason)) : null,
    h("div", { class: "controls" }, field("Colour", mode),
      h("a", { href: address(run.id, "samples", { side: row.group_uid }) }, "Samples of its group"),
      h("a", { href: address(run.id, "lineage", { uid: row.uid }) }, "Its ledger events")),
    row.gone ? problem({ message: row.gone }) : null, ...media(run, row), scale, told, text,
    row.left_out ? h("p", { class: "quiet" }, `${number(row.left_out)} tokens in the middle are left out.`) : null,
    )];
}

const addresses = []; // of the shown sample's files

function load(element, path) {
  fileAddress(path).then((found) => {
    addresses.push(found);
    element.src = found;
  }, (error) => element.replaceWith(problem(error)));
  return element;
}

// Shows the kept media of a sample: pictures of images, players for sounds and videos, video frames side by side, and spectra of sounds.
function media(run, row) {
  if (!row.media.length) return [];
  addresses.splice(0).forEach((one) => URL.revokeObjectURL(one));
  const figures = row.media.map((one) => {
    const words = `${one.words}, ${number(one.rows)} rows`;
    const picture = one.picture ? load(h("img", { alt: words }), `run/${run.id}/picture/${one.digest}`) : h("div", { class: "quiet small" }, "no picture is stored");
    const player = one.played ? load(h(one.kind === "video" ? "video" : "audio", { controls: true, preload: "metadata", "aria-label": words }), `run/${run.id}/media/${one.digest}`) : null;
    return h("figure", {}, player, one.played && !one.picture ? null : picture, h("figcaption", { class: "small quiet" }, words));
  });
  return [h("div", { class: "figures" }, ...figures)];
}

// Returns a token's colour: one hue of increasing strength for sizes, two hues around 0 for signed values.
function shade(value, least, most, mode) {
  if (value === null || value === undefined) return "";
  if (mode === "trained") return value ? "rgb(42 157 99 / .35)" : "rgb(201 80 60 / .35)";
  if (mode === "version") return `hsl(${(47 * value) % 360} 70% 50% / .3)`;
  if (mode === "logprob") return `rgb(217 98 43 / ${(0.75 * Math.min(1, value / (least || -1))).toFixed(3)})`;
  const size = Math.max(Math.abs(least), Math.abs(most)) || 1;
  const strength = (0.7 * Math.min(1, Math.abs(value) / size)).toFixed(3);
  return value >= 0 ? `rgb(42 157 99 / ${strength})` : `rgb(210 68 127 / ${strength})`;
}

function paint(text, scale, told, row, mode) {
  const { tokens } = row;
  const values = tokens.map((token) => token[mode]).filter((value) => typeof value === "number");
  const [least, most] = values.length ? [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))] : [0, 0];
  const spanOf = (token) => {
    const sampled = token.logprob !== undefined;
    const span = h("span", { class: `token ${sampled ? (token.trained ? "" : "off") : "prompt"}` }, foreign(token.text.replaceAll("\n", "↵\n")));
    if (sampled && mode !== "none") span.style.backgroundColor = shade(token[mode], least, most, mode);
    span.addEventListener("mouseenter", () => told.replaceChildren(foreign(words(token))));
    return span;
  };
  text.replaceChildren(...blocks(tokens).map(([turn, own], place) => {
    const body = h("div", { class: "text" }, ...own.map(spanOf));
    if (turn === undefined) return h("section", { class: "turn context" }, h("h3", {}, place ? "env messages" : "prompt"), body);
    return h("section", { class: "turn" }, turnHead(turn, row.turns_of[turn]), body);
  }));
  const swatched = (colour, label) => {
    const swatch = h("i");
    swatch.style.background = colour || "transparent";
    return h("span", {}, swatch, label);
  };
  let items = [];
  if (mode === "trained") items = [swatched(shade(true, 0, 0, mode), "trained"), swatched(shade(false, 0, 0, mode), "masked")];
  else if (mode === "version") items = [...new Set(values)].sort((a, b) => a - b).slice(-12).map((one) => swatched(shade(one, 0, 0, mode), `weights ${one}`));
  else if (mode !== "none" && values.length) items = [...new Set([least, most])].map((one) => swatched(shade(one, least, most, mode), number(one)));
  scale.replaceChildren(...items);
}

// Groups adjacent tokens of the same turn, or outside of any turn.
function blocks(tokens) {
  const found = [];
  for (const token of tokens) {
    if (!found.length || found.at(-1)[0] !== token.turn) found.push([token.turn, []]);
    found.at(-1)[1].push(token);
  }
  return found;
}

function turnHead(place, turn) {
  const facts = [
    turn.reward === null ? null : `reward ${number(turn.reward)}`, `${number(turn.tokens)} tokens`,
    `weights ${turn.versions.map(([version]) => version).join(", ")}`, turn.finish === "stop" ? null : `ended by ${turn.finish}`,
    turn.seconds === null ? null : `${number(turn.seconds, 3)} s`, turn.env_ms ? `then the env took ${number(turn.env_ms, 3)} ms` : null, turn.engine,
  ].filter(Boolean).join(" · ");
  const tools = turn.tools.length ? [" · tools: ", foreign(turn.tools.join(", "))] : [];
  return h("h3", {}, `turn ${place + 1} `, h("span", { class: "quiet" }, foreign(facts), ...tools));
}

function words(token) {
  const found = [`token ${token.id} ${JSON.stringify(token.text)}`];
  for (const [name, label] of [["logprob", "engine's log-prob"], ["trainer_logprob", "trainer's log-prob"], ["advantage", "advantage"], ["version", "weights"]]) {
    if (token[name] !== undefined && token[name] !== null) found.push(`${label} ${number(token[name])}`);
  }
  if (token.trained !== undefined) found.push(token.trained ? "trained" : "masked");
  return found.join(" · ");
}
