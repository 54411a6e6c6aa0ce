// Shows the processes' logs: the end of a log with its new lines, and a search.
import { address, ask } from "../api.js";
import { field, foreign, h, number, problem } from "../dom.js";

const EVERY_MS = 1000;
const MOST_CHARACTERS = 400000;

export async function show(root, { run, query }) {
  const files = await ask(`run/${run.id}/logs`);
  root.append(h("h1", {}, "Logs"));
  if (!files.length) {
    root.append(h("p", { class: "quiet" }, "This run has no log files."));
    return {};
  }
  const longest = files.reduce((best, one) => (one.size > best.size ? one : best));
  const name = files.some((one) => one.name === query.name) ? query.name : longest.name;
  const select = h("select", {}, ...files.map((one) => h("option", { value: one.name }, `${one.name} (${number(one.size)} bytes)`)));
  select.value = name;
  const words = h("input", { type: "search", value: query.words ?? "", placeholder: "words in a line" });
  const follow = h("input", { type: "checkbox", checked: true });
  const text = h("pre", { class: "text", tabIndex: 0, "aria-label": name });
  const told = h("p", { class: "quiet small" });
  root.append(
    h("form", { class: "controls", onsubmit: (event) => { event.preventDefault(); location.hash = address(run.id, "logs", { name: select.value, words: words.value }); } },
      field("Process", select), field("Search", words), field("Follow", follow), h("button", {}, "Show")),
    h("section", { class: "card" }, text, told));
  select.addEventListener("change", () => { location.hash = address(run.id, "logs", { name: select.value, words: words.value }); });

  let next;
  let left = false;
  async function read() {
    if (left || (next !== undefined && (!follow.checked || document.hidden))) return;
    try {
      const answer = await ask(`run/${run.id}/log`, { name, words: query.words, from: next });
      if (left) return;
      if (query.words) {
        text.replaceChildren(foreign(answer.text || "No line has these words."));
        told.textContent = `${number(answer.found)} lines`;
        return;
      }
      if (answer.text || next === undefined) {
        if (text.textContent.length > MOST_CHARACTERS) text.replaceChildren();
        text.append(foreign(answer.text || "Nothing was written."));
        text.scrollTop = text.scrollHeight;
      }
      next = answer.next;
      told.textContent = `${number(answer.size)} bytes`;
    } catch (error) {
      told.replaceChildren(problem(error));
    }
  }
  await read();
  const timer = query.words ? null : setInterval(read, EVERY_MS);
  return { leave() { left = true; clearInterval(timer); } };
}
