// Sends requests to the server. A response without success becomes an Error with the server's message.

// The session's key is in this tab's storage, which belongs to this address and port. A cookie would be sent to every port of the machine.
const KEY = "relax.session";
const HANDED_MS = 300; // how long a new tab waits for the key from another tab
let key = sessionStorage.getItem(KEY) ?? "";
const tabs = new BroadcastChannel(KEY); // reaches only tabs of this address and port

tabs.addEventListener("message", ({ data }) => {
  if (data === "" && key) tabs.postMessage(key);
  else if (data && !key) keep(data);
});

function keep(given) {
  key = given;
  sessionStorage.setItem(KEY, key);
}

// Waits until this tab has the key, or no other tab has it.
export function entered() {
  if (key) return Promise.resolve();
  return new Promise((resolve) => {
    tabs.addEventListener("message", () => resolve(), { once: true });
    tabs.postMessage("");
    setTimeout(resolve, HANDED_MS);
  });
}

function send(path, given = {}) {
  return fetch(`/api/${path}`, { ...given, headers: { ...given.headers, authorization: `Bearer ${key}` } });
}

async function answered(path, given) {
  const response = await send(path, given);
  if (!response.ok) throw await refusal(response);
  return response;
}

function withQuery(path, query) {
  const words = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined)).toString();
  return words ? `${path}?${words}` : path;
}

export async function ask(path, query = {}) {
  return (await answered(withQuery(path, query), { headers: { accept: "application/json" } })).json();
}

// Returns a URL, valid in this page only, of a file of the server: an element cannot send the session's key itself.
export async function fileAddress(path) {
  return URL.createObjectURL(await (await answered(path)).blob());
}

// Yields the text of each event of a stream until it ends.
export async function* events(path, signal) {
  const reader = (await answered(path, { signal })).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) yield part.replace(/^data: /, "");
  }
}

// Sends a body to a route of the run's gateway, or reads the route without a body. Reading returns null if the page has no gateway or the run is starting.
export async function gateway(path, body) {
  const given = body === undefined ? {} : { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" } };
  const response = await send(`gateway/${path}`, given);
  if (response.ok) return response.json();
  if ([404, 503].includes(response.status) && body === undefined) return null;
  throw await refusal(response);
}

async function refusal(response) {
  const problem = await response.json();
  return new Error([problem.detail, problem.fix].filter(Boolean).join(": "));
}

export async function exchange(token) {
  const response = await fetch("/api/session", { method: "POST", body: token });
  if (!response.ok) throw await refusal(response);
  keep((await response.json()).session);
}

export function address(run, view, query = {}) {
  return `#/${withQuery(`${run}/${view}`, query)}`;
}
