// Asks the server. An answer that is no success becomes an Error with the server's words.

export async function ask(path, query = {}) {
  const given = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined));
  const words = given.toString();
  const response = await fetch(`/api/${path}${words ? `?${words}` : ""}`, { headers: { accept: "application/json" } });
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

// Sends a body to a route of the run's gateway, or reads one if there is no body. null: the page is not that of a gateway.
export async function gateway(path, body) {
  const given = body === undefined ? {} : { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" } };
  const response = await fetch(`/api/gateway/${path}`, given);
  if (response.ok) return response.json();
  if (response.status === 404 && body === undefined) return null;
  const problem = await response.json();
  throw new Error([problem.detail, problem.fix].filter(Boolean).join(": "));
}

export async function exchange(token) {
  const response = await fetch("/api/session", { method: "POST", body: token });
  if (!response.ok) throw new Error(await response.text());
}

export function address(run, view, query = {}) {
  const given = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined));
  const words = given.toString();
  return `#/${run}/${view}${words ? `?${words}` : ""}`;
}
