// Requests a stall report from the controller of a live run, as `relax stall` does, and shows it.
import { gateway } from "../api.js";
import { foreign, h, problem } from "../dom.js";

export function stallReport(run) {
  const element = h("section", { class: "stack", "aria-label": "What the run waits for" });
  const answer = h("div", { role: "status" });
  const button = h("button", { type: "button", onclick: report }, "What does it wait for?");
  const card = h("div", { class: "card stack" }, h("div", { class: "controls" }, button), answer);
  let left = false;
  let served = false; // whether the page has a gateway whose run answers

  async function report() {
    button.disabled = true;
    answer.replaceChildren(h("p", { class: "quiet" }, "The report takes some seconds. If the run's controller does not answer within a minute, an error appears here."));
    try {
      const told = await gateway("run/stall", {});
      if (!left) answer.replaceChildren(h("pre", { class: "text", tabIndex: 0, "aria-label": "report" }, foreign(told.report)));
    } catch (error) {
      if (!left) answer.replaceChildren(problem(error));
    }
    button.disabled = false;
  }

  // The button exists only where orders can be placed: on the page of the gateway of a live run.
  async function refresh(state) {
    try {
      if (state === "live" && !served) served = (await gateway("rollout/engines")) !== null;
      if (left) return;
      if (state !== "live" || !served) element.replaceChildren();
      else if (!card.isConnected) element.replaceChildren(card);
    } catch (error) {
      if (!left) element.replaceChildren(problem(error));
    }
  }

  return { element, refresh, leave() { left = true; } };
}
