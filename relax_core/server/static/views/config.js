// Shows a run's configuration and its summary.json.
import { ask } from "../api.js";
import { field, foreign, h } from "../dom.js";

export async function show(root, { run }) {
  const answer = await ask(`run/${run.id}/config`);
  const words = h("input", { type: "search", placeholder: "part of a key or value" });
  const body = h("tbody");
  const rows = flat(answer.values);
  const draw = () => {
    const wanted = words.value.toLowerCase();
    body.replaceChildren(...rows.filter(([key, value]) => `${key}=${value}`.toLowerCase().includes(wanted)).map(([key, value]) =>
      h("tr", {}, h("td", {}, key), h("td", { class: "words text" }, foreign(value)))));
  };
  words.addEventListener("input", draw);
  draw();
  root.append(
    h("h1", {}, "Configuration"),
    h("div", { class: "controls" }, field("Search", words)),
    h("section", { class: "card scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "key"), h("th", {}, "value"))), body)),
  );
  if (Object.keys(answer.summary).length) {
    root.append(h("section", { class: "card" }, h("h2", {}, "summary.json"), h("pre", { class: "text", tabIndex: 0 }, foreign(JSON.stringify(answer.summary, null, 2)))));
  }
  root.append(h("section", { class: "card" }, h("h2", {}, "config.yaml"), h("pre", { class: "text", tabIndex: 0 }, foreign(answer.config || "This run has none."))));
  return {};
}

export function flat(values, before = "") {
  return Object.entries(values ?? {}).flatMap(([key, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length
      ? flat(value, `${before}${key}.`)
      : [[`${before}${key}`, typeof value === "string" ? value : JSON.stringify(value)]]);
}
