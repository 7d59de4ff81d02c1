// Small charts as SVG: lines over a number, and bars.
import { make } from "./parts.js";

const WIDE = 360, HIGH = 170, LEFT = 44, RIGHT = 8, TOP = 8, FOOT = 22;
const SPACE = "http://www.w3.org/2000/svg";

function draw(name, attributes, text) {
  const element = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** Returns a number in few letters. */
export function short(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return size >= 1e-3 ? String(+value.toPrecision(3)) : value.toExponential(1);
}

/** Returns round numbers from `low` to `high`, as few as may be, but three. */
function ticks(low, high) {
  if (!(high > low)) return [low];
  const power = 10 ** Math.floor(Math.log10(high - low));
  const fits = (step) => Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) >= 2;
  const step = [5, 2, 1, 0.5, 0.2, 0.1].map((each) => each * power).find(fits) ?? power / 10;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(i * step);
  return found;
}

function frame(title, note, key) {
  const svg = draw("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": title });
  const named = key.filter((each) => each.name).map((each) => {
    const dot = make("i");
    dot.style.background = each.colour;
    return make("span", {}, dot, each.name);
  });
  const box = make("figure", { className: "chart" }, make("h3", {}, title, make("small", {}, note)), svg, named.length ? make("div", { className: "key" }, ...named) : null);
  box.style.margin = 0;
  return { svg, box };
}

function axes(svg, across, up, [x0, x1], [y0, y1], unit) {
  for (const value of ticks(y0, y1)) {
    svg.append(draw("line", { class: "gridline", x1: LEFT, x2: WIDE - RIGHT, y1: up(value), y2: up(value) }));
    svg.append(draw("text", { x: LEFT - 5, y: up(value) + 4, "text-anchor": "end" }, short(value)));
  }
  for (const value of ticks(x0, x1)) svg.append(draw("text", { x: across(value), y: HIGH - 6, "text-anchor": "middle" }, short(value)));
  if (unit) svg.append(draw("text", { x: WIDE - RIGHT, y: HIGH - 6 - 14, "text-anchor": "end" }, unit));
}

/** Draws lines `{name, colour, xs, ys, faded, dots}` over a common axis; what is null is a gap that the line goes over. */
export function lines(title, series, { note = "", unit = "", zero = false } = {}) {
  const { svg, box } = frame(title, note, series.filter((each) => !each.faded));
  const points = series.map((each) => each.xs.map((x, i) => [x, each.ys[i]]).filter(([, y]) => y != null && Number.isFinite(y)));
  const all = points.flat();
  if (!all.length) return null;
  // Spikes at the start would flatten all that follows: the axis holds all but the highest hundredth.
  const sorted = all.map(([, y]) => y).sort((a, b) => a - b);
  let low = zero ? Math.min(0, sorted[0]) : sorted[0], high = sorted[Math.min(sorted.length - 1, Math.ceil(sorted.length * 0.99))];
  if (!(high > low)) { high = low + (Math.abs(low) || 1) * 0.1; low -= zero ? 0 : (Math.abs(low) || 1) * 0.1; }
  const x0 = Math.min(...all.map(([x]) => x)), x1 = Math.max(...all.map(([x]) => x), x0 + 1);
  const across = (x) => LEFT + ((x - x0) / (x1 - x0)) * (WIDE - LEFT - RIGHT);
  const up = (y) => TOP + (1 - (Math.min(Math.max(y, low), high) - low) / (high - low)) * (HIGH - TOP - FOOT);
  axes(svg, across, up, [x0, x1], [low, high], unit);
  series.forEach((each, number) => {
    const at = points[number].map(([x, y]) => `${across(x).toFixed(1)},${up(y).toFixed(1)}`).join(" ");
    svg.append(draw("polyline", { points: at, stroke: each.colour, ...(each.faded ? { class: "faded" } : {}) }));
    if (each.dots || points[number].length === 1) {
      for (const [x, y] of points[number]) {
        const dot = draw("circle", { cx: across(x), cy: up(y), r: 2.6, fill: each.colour });
        dot.append(draw("title", {}, `${each.name}: ${short(y)} at ${short(x)}`));
        svg.append(dot);
      }
    }
  });
  return box;
}

/** Draws counted bars `{edges, counts}`, several over each other; a logarithmic axis where edges grow by ratio. */
export function bars(title, held, { note = "", logarithmic = false, unit = "" } = {}) {
  const { svg, box } = frame(title, note, held.length > 1 ? held : []);
  const scale = logarithmic ? Math.log10 : (x) => x;
  const x0 = Math.min(...held.map(({ edges }) => scale(edges[0]))), x1 = Math.max(...held.map(({ edges }) => scale(edges[edges.length - 1])));
  const most = Math.max(...held.flatMap(({ counts }) => counts), 1);
  const across = (x) => LEFT + ((x - x0) / (x1 - x0 || 1)) * (WIDE - LEFT - RIGHT);
  const up = (y) => TOP + (1 - y / most) * (HIGH - TOP - FOOT);
  for (const value of ticks(0, most)) {
    svg.append(draw("line", { class: "gridline", x1: LEFT, x2: WIDE - RIGHT, y1: up(value), y2: up(value) }));
    svg.append(draw("text", { x: LEFT - 5, y: up(value) + 4, "text-anchor": "end" }, short(value)));
  }
  const told = logarithmic ? ticks(x0, x1).filter((x) => Number.isInteger(+x.toFixed(6))) : ticks(x0, x1);
  for (const value of told) svg.append(draw("text", { x: across(value), y: HIGH - 6, "text-anchor": "middle" }, short(logarithmic ? 10 ** value : value)));
  if (unit) svg.append(draw("text", { x: WIDE - RIGHT, y: TOP + 8, "text-anchor": "end" }, unit));
  for (const { edges, counts, colour } of held) {
    counts.forEach((number, i) => {
      if (!number) return;
      const left = across(scale(edges[i])), right = across(scale(edges[i + 1]));
      const bar = draw("rect", { x: left, y: up(number), width: Math.max(right - left - 0.6, 0.6), height: HIGH - FOOT - up(number), fill: colour, "fill-opacity": held.length > 1 ? 0.6 : 0.85 });
      bar.append(draw("title", {}, `${short(edges[i])} to ${short(edges[i + 1])}: ${number.toLocaleString("en")}`));
      svg.append(bar);
    });
  }
  return box;
}

/** Draws named shares beside each other. */
export function shares(title, named, { note = "" } = {}) {
  const { svg, box } = frame(title, note, []);
  const most = Math.max(...Object.values(named), 1), names = Object.keys(named), wide = (WIDE - LEFT - RIGHT) / names.length;
  names.forEach((name, i) => {
    const high = (named[name] / most) * (HIGH - TOP - FOOT - 16), x = LEFT + i * wide;
    svg.append(draw("rect", { x: x + wide * 0.15, y: HIGH - FOOT - high, width: wide * 0.7, height: high, fill: "var(--ours)", "fill-opacity": 0.85 }));
    svg.append(draw("text", { x: x + wide / 2, y: HIGH - FOOT - high - 4, "text-anchor": "middle" }, named[name].toLocaleString("en")));
    svg.append(draw("text", { x: x + wide / 2, y: HIGH - 6, "text-anchor": "middle" }, name));
  });
  return box;
}
