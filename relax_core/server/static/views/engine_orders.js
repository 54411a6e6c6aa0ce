// Adds and removes engines of a live run: previews an order, places it, and shows its states and its end.
import { gateway } from "../api.js";
import { duration, foreign, h, number, problem, table } from "../dom.js";

const ENDED = new Set(["ACTIVE", "COMPLETED", "FAILED", "CANCELLED", "NOOP"]);
const MOST_ORDERS = 5;

export function engineOrders(run) {
  const element = h("section", { class: "stack", "aria-label": "Orders for engines" });
  const preview = h("div", { class: "controls", role: "status" });
  let left = false;
  let waiting = null;
  let present = 0;
  let target = null; // total number of engines in the next order
  const fewer = h("button", { type: "button", "aria-label": "one engine fewer", onclick: () => choose(-1) }, "−");
  const more = h("button", { type: "button", "aria-label": "one engine more", onclick: () => choose(1) }, "+");
  const count = h("span", {});
  const tables = h("div", { class: "stack" });

  const kind = () => (target > present ? "scale_out" : "scale_in");

  async function choose(step) {
    target = Math.max(1, (target ?? present) + step);
    if (target === present) return forget();
    try {
      const told = await gateway(`rollout/${kind()}`, { num_replicas: target, dry_run: true });
      const gone = told.engine_ids.length ? `: ${told.engine_ids.join(", ")} would leave` : "";
      preview.replaceChildren(
        h("span", {}, foreign([`${told.engines_now} engines would become ${told.engines_then}${gone}`, ...told.warnings].join("; ") + ".")),
        h("button", { type: "button", class: "main", onclick: order }, "Place the order"),
        h("button", { type: "button", onclick: forget }, "Discard"));
    } catch (error) {
      preview.replaceChildren(problem(error), h("button", { type: "button", onclick: forget }, "Discard"));
    }
    count.textContent = `${target}`;
  }

  function forget() {
    target = null;
    preview.replaceChildren();
    count.textContent = `${present}`;
  }

  async function order() {
    try {
      await gateway(`rollout/${kind()}`, { num_replicas: target });
      forget();
      await refresh();
    } catch (error) {
      preview.append(problem(error));
    }
  }

  async function cancel(one) {
    try {
      await gateway(`rollout/${one.kind}/${one.request_id}/cancel`, {});
      await refresh();
    } catch (error) {
      preview.replaceChildren(problem(error));
    }
  }

  async function refresh() {
    const found = run.state === "live" ? await gateway("rollout/engines") : null;
    if (left) return;
    if (found === null) {
      element.replaceChildren();
      return;
    }
    const lists = await Promise.all(["scale_out", "scale_in"].map((one) => gateway(`rollout/${one}?limit=${MOST_ORDERS}`)));
    if (left || lists.includes(null)) return;
    present = found.engines.filter((one) => ["joining", "serving"].includes(one.state)).length;
    if (target === null) count.textContent = `${present}`;
    const orders = lists.flatMap((one) => one.requests).sort((a, b) => b.history[0].at - a.history[0].at).slice(0, MOST_ORDERS);
    tables.replaceChildren(engineTable(found.engines), ...(orders.length ? [orderTable(orders, cancel)] : []));
    if (!element.childElementCount) {
      element.append(h("div", { class: "card stack" }, h("div", { class: "controls" }, h("span", {}, "Engines"), fewer, count, more), preview), tables);
    }
  }

  return {
    element,
    refresh,
    update() { waiting ??= setTimeout(() => { waiting = null; refresh(); }, 2000); },
    leave() { left = true; clearTimeout(waiting); },
  };
}

function card(columns, rows) {
  return h("div", { class: "card scroll" }, table(columns, rows));
}

function engineTable(engines) {
  const now = Date.now() / 1000;
  return card([["engine"], ["origin"], ["state"], ["for", 1], ["weights", 1], ["running", 1], ["waiting", 1], ["tokens per second", 1], ["cache used", 1], ["restarts", 1], ["last failure"]],
    engines.map((one) => h("tr", {}, h("td", {}, foreign(one.id)), h("td", {}, one.origin), h("td", {}, one.state),
      ...[duration(Math.max(0, now - one.since)), number(one.weight_version), number(one.samples_running), number(one.samples_waiting), number(one.tokens_per_s), one.cache_share === null ? "–" : `${number(100 * one.cache_share)} %`, number(one.restarts)]
        .map((words) => h("td", { class: "number" }, words)),
      h("td", { class: "words" }, foreign(one.last_failure)))));
}

function orderTable(orders, cancel) {
  return card([["order"], ["target"], ["state"], ["engines"], ["took", 1], ["failure"], [""]], orders.map((one) => {
    const took = duration(one.history.at(-1).at - one.history[0].at);
    const asked = one.body.num_replicas ?? (one.body.engine_urls ?? one.body.engine_ids ?? []).join(", ");
    const open = !ENDED.has(one.status);
    return h("tr", {}, h("td", {}, one.kind === "scale_out" ? "out" : "in"), h("td", {}, foreign(`${asked}`)),
      h("td", { title: one.history.map((state) => state.state).join(" → ") }, one.status), h("td", {}, foreign(one.engine_ids.join(", "))),
      h("td", { class: "number" }, took), h("td", { class: "words" }, foreign(one.failure)),
      h("td", {}, open && !one.cancel_requested ? h("button", { type: "button", onclick: () => cancel(one) }, "Cancel") : ""));
  }));
}
