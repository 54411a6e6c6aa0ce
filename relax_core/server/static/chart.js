// Draws curves with uPlot in the colours of the page, with smoothing and marks of resumes.
import { h, number } from "./dom.js";

export const COLOURS = ["#2f6fe4", "#d9622b", "#2a9d63", "#a552c9", "#c9972b", "#1a9cb0", "#d2447f", "#7a8597"];

const FEW = 20; // a curve with fewer points shows each of them and is not smoothed

export function smoothed(values, weight) {
  if (!weight || values.length < FEW) return values;
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}

function aligned(curves) {
  const steps = [...new Set(curves.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const columns = curves.map((curve) => {
    const column = new Array(steps.length).fill(undefined); // undefined: another curve's step, joined; null: a gap
    curve.steps.forEach((step, index) => { column[place.get(step)] = curve.values[index]; });
    return column;
  });
  return [steps, ...columns];
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// curves: [{label, steps, values}]; the legend shows values without smoothing. Returns {element, set(curves, resumes, smoothing), leave()}.
export function chart(title) {
  const plot = h("div", { class: "plot" });
  const legend = h("div", { class: "legend" });
  const element = h("section", { class: "card", "aria-label": title }, h("h2", {}, title), plot, legend);
  let drawn = null;
  let marks = [];
  let given = null;
  const width = () => Math.max(200, plot.clientWidth);

  function build(curves) {
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--grid") } };
    const options = {
      width: width(), height: 190, legend: { show: false }, scales: { x: { time: false, range: (_, least, most) => (most > least ? [least, most] : [least, least + 1]) } },
      cursor: { y: false, points: { size: 6 } },
      axes: [
        { ...axis, size: 30, values: (_, values) => values.map((value) => (Number.isInteger(value) ? number(value) : "")) },
        { ...axis, size: 64, values: (_, values) => values.map((value) => number(value, 3)) },
      ],
      series: [{}, ...curves.map((curve, index) => ({
        label: curve.label, stroke: COLOURS[index % COLOURS.length], width: 1.6, spanGaps: false,
        points: { show: curve.steps.length < FEW, size: 5 },
      }))],
      hooks: { draw: [drawMarks], setCursor: [(shown) => tell(curves, shown.cursor.idx)] },
    };
    drawn = new window.uPlot(options, aligned(curves), plot);
  }

  function drawMarks(shown) {
    const context = shown.ctx;
    context.save();
    context.strokeStyle = colour("--warn");
    context.setLineDash([4, 4]);
    for (const step of marks) {
      const x = Math.round(shown.valToPos(step, "x", true));
      context.beginPath();
      context.moveTo(x, shown.bbox.top);
      context.lineTo(x, shown.bbox.top + shown.bbox.height);
      context.stroke();
    }
    context.restore();
  }

  function tell(curves, place) {
    const step = drawn && place !== null && place !== undefined ? drawn.data[0][place] : null;
    const items = curves.map((curve, index) => {
      const own = step === null ? curve.values.length - 1 : curve.steps.indexOf(step);
      const swatch = h("i");
      swatch.style.background = COLOURS[index % COLOURS.length];
      return h("span", {}, swatch, `${curve.label} ${number(curve.measured[own])}`);
    });
    legend.replaceChildren(step === null ? null : h("span", {}, `step ${number(step)}`), ...items);
    if (step === null) legend.firstChild?.remove();
  }

  function set(curves, resumes = [], smoothing = 0) {
    given = [curves, resumes, smoothing];
    marks = resumes;
    const shown = curves.filter((curve) => curve.steps.length).map((curve) => ({ ...curve, measured: curve.values, values: smoothed(curve.values, smoothing) }));
    element.hidden = !shown.length;
    drawn?.destroy();
    drawn = null;
    if (shown.length) {
      build(shown);
      tell(shown, null);
    }
  }

  const watcher = new ResizeObserver(() => {
    if (drawn && drawn.width !== width()) drawn.setSize({ width: width(), height: 190 });
  });
  watcher.observe(plot);
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  const again = () => { if (given) set(...given); };
  scheme.addEventListener("change", again);
  return {
    element, set,
    leave() { watcher.disconnect(); scheme.removeEventListener("change", again); drawn?.destroy(); drawn = null; },
  };
}
