// Makes elements. Text is always inserted as text nodes, so text of a model or a run never becomes markup. Text nodes and
// readable attributes show hidden characters as their codes.

// Control characters, invisible characters and characters that change the text direction; they could hide a sample's text.
// relax_core/contracts/foreign_files.py has the same list for the terminal.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\u{1d173}-\u{1d17a}\u{e0000}-\u{e0fff}]/gu;
const READ = new Set(["title", "aria-label", "alt", "placeholder", "label"]);

const code = (character) => `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

export function visible(text) {
  return text.replace(HIDDEN, code);
}

export function h(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (READ.has(key)) element.setAttribute(key, visible(String(value)));
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.className = value;
    else if (key in element && key !== "list") element[key] = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined).map(nodeOf));
  return element;
}

function nodeOf(child) {
  return child instanceof Node ? child : document.createTextNode(visible(String(child)));
}

// Returns text of a model or a run, with the code of each hidden character marked.
export function foreign(text) {
  const found = document.createDocumentFragment();
  let last = 0;
  for (const match of text.matchAll(HIDDEN)) {
    found.append(document.createTextNode(text.slice(last, match.index)));
    found.append(h("span", { class: "control", title: "a hidden character" }, code(match[0])));
    last = match.index + match[0].length;
  }
  found.append(document.createTextNode(text.slice(last)));
  return found;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

// Returns the first word of an outcome: "failed" for "failed: CAUSE".
export function outcome(state) {
  return visible(state.split(":")[0]);
}

// Returns the cause of an outcome, "" if it has none.
export function cause(state) {
  return state.split(": ").slice(1).join(": ");
}

export function field(words, input) {
  return h("label", {}, words, input);
}

// Returns a table. Each column is a name and whether it has numbers, which are right-aligned.
export function table(columns, rows) {
  const head = columns.map(([name, right]) => h("th", { class: right ? "number" : "" }, name));
  return h("table", {}, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...rows));
}

export function problem(error) {
  return h("p", { class: "problem", role: "alert" }, error.message);
}
