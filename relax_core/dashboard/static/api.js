// Asks the server. An answer that is no success becomes an Error with the server's words.

export async function ask(path, query = {}) {
  const given = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined));
  const words = given.toString();
  const response = await fetch(`/api/${path}${words ? `?${words}` : ""}`, { headers: { accept: "application/json" } });
  if (!response.ok) throw new Error(await response.text());
  return response.json();
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
