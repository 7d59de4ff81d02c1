// Charts as SVG for reports and pages: curves, histograms, bars. Imports
// nothing, so that a report can embed it. Text is set as text and never parsed as HTML.

const WIDTH = 380, HEIGHT = 212, LEFT = 46, RIGHT = 10, TOP = 22, BOTTOM = 36;
const COLOURS = 8, MAX_TICKS = 12;
const SVG = "http://www.w3.org/2000/svg";

const TITLES = new Map(Object.entries({
  loss: ["Loss"], iou: ["IoU of the best mask"], accuracy: ["Accuracy"], lr: ["Learning rate"],
  grad_norm: ["Gradient norm"], loss_scale: ["Loss scale"], iou_head: ["IoU head"],
  images_per_s: ["Speed", "images/s"], waiting: ["Waiting for data", "%"],
  memory_gb: ["Memory, peak", "GB"], loader_mb: ["Largest loader process", "MB"],
}));
const FIRST = ["loss", "iou", "accuracy"];
const LAST = ["lr", "grad_norm", "loss_scale", "images_per_s", "waiting", "memory_gb", "loader_mb"];
const HIDDEN = ["step", "epoch", "skipped", "data_time_s"];
const UNSMOOTHED = ["lr", "loss_scale", "memory_gb", "loader_mb"];
const SIGNS_OF_TROUBLE = ["wrong image", "points with a mask"];

function make(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function makeHtml(name, className, ...children) {
  const element = document.createElement(name);
  element.className = className;
  element.append(...children);
  return element;
}

/** Returns the colour of a series; there are eight, in light and dark. */
export const colour = (index) => `var(--c${index % COLOURS})`;

/** Formats a number for a caption. */
export const short = (value) => rounded(value, 3);

function rounded(value, digits) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(digits)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(digits)}k`;
  return size >= 1e-3 ? String(+value.toPrecision(digits)) : value.toExponential(digits - 2);
}

/** Formats ticks with as many digits as tell them apart. */
function tickLabels(values) {
  let labels = [];
  for (let digits = 3; digits < 13; digits += 1) {
    labels = values.map((value) => rounded(value, digits));
    if (new Set(labels).size === values.length) break;
  }
  return labels;
}

/** Shows a picture at its full size when it is clicked, and the page again with Esc or another click. */
export function zoomable(picture) {
  picture.classList.add("zoomable");
  Object.assign(picture, { tabIndex: 0, title: "click to enlarge" });
  const enlarge = () => {
    const legend = (picture.closest(".figures") ?? picture.closest("figure"))?.nextElementSibling, about = picture.closest("figure")?.querySelector("figcaption");
    const words = [about, legend?.matches(".note") ? legend : null].filter(Boolean).map(({ textContent }) => textContent).join(". ");
    const dialog = makeHtml("dialog", "enlarged", picture.cloneNode(), ...(words ? [makeHtml("p", "", words)] : []));
    dialog.onclick = () => dialog.close();
    dialog.onclose = () => dialog.remove();
    document.body.append(dialog);
    dialog.showModal();
  };
  picture.onclick = enlarge;
  picture.onkeydown = (event) => { if (event.key === "Enter") enlarge(); };
  return picture;
}

/** Formats a number for a tooltip. */
const exact = (value) => (Number.isInteger(value) ? value.toLocaleString("en") : String(+value.toPrecision(4)));

/** Returns three or more round numbers between `low` and `high`. */
function ticks(low, high) {
  if (!(high > low)) return [low];
  const power = 10 ** Math.floor(Math.log10(high - low));
  const first = (step) => Math.ceil(low / step - 1e-9), last = (step) => Math.floor(high / step + 1e-9);
  const step = [5, 2, 1, 0.5, 0.2, 0.1].map((each) => each * power).find((each) => last(each) - first(each) >= 2) ?? power / 10;
  const count = Math.min(last(step) - first(step) + 1, MAX_TICKS) || 0;
  return Array.from({ length: Math.max(count, 0) }, (_, i) => (first(step) + i) * step);
}

/** Returns the exponential moving average of the known values, bias-corrected as in TensorBoard. */
export function smoothed(values, weight) {
  let mean = 0, mass = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return null;
    mean = mean * weight + value * (1 - weight);
    mass = mass * weight + (1 - weight);
    return mean / mass;
  });
}

/** Makes a figure with a caption, a legend for named series, and the labels of both axes. */
function frame(title, { note = "", x = "", y = "" }, series) {
  const plot = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  if (y) plot.append(make("text", { x: 2, y: 11 }, y));
  if (x) plot.append(make("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 3, "text-anchor": "middle" }, x));
  const named = series.filter(({ name }) => name).map((each) => {
    const key = make("svg", { viewBox: "0 0 18 10", "aria-hidden": "true" });
    key.append(each.bar
      ? make("rect", { x: 4, y: 0, width: 10, height: 10, rx: 2, fill: each.colour, "fill-opacity": each.opacity })
      : make("line", { ...stroke(each), x1: 0, x2: 18, y1: 5, y2: 5 }));
    return makeHtml("span", "", key, each.legend ?? each.name);
  });
  const figure = captioned(title, note, plot);
  if (named.length) figure.append(makeHtml("div", "legend", ...named));
  return { figure, plot };
}

const stroke = ({ colour, faded, dashed }) => ({ stroke: colour, class: `curve${faded ? " faded" : ""}${dashed ? " dashed" : ""}` });
const linear = (low, high, start, end) => (value) => start + ((value - low) / (high - low || 1)) * (end - start);

function drawAxes(plot, across, up, xTicks, yTicks, xLabels = tickLabels(xTicks)) {
  const yLabels = tickLabels(yTicks);
  yTicks.forEach((value, i) => {
    plot.append(make("line", { class: "gridline", x1: LEFT, x2: WIDTH - RIGHT, y1: up(value), y2: up(value) }));
    plot.append(make("text", { x: LEFT - 5, y: up(value) + 4, "text-anchor": "end" }, yLabels[i]));
  });
  xTicks.forEach((value, i) => {
    const at = across(value);
    plot.append(make("text", { x: at, y: HEIGHT - 19, "text-anchor": at > WIDTH - RIGHT - 12 ? "end" : "middle" }, xLabels[i]));
  });
}

/** Shows the values nearest to the pointer; `places` are x positions, `describe(i)` returns a heading and rows. */
function addTooltip(figure, plot, places, describe) {
  const cursor = make("g", { class: "cursor" }), tooltip = makeHtml("div", "tooltip");
  plot.append(cursor);
  tooltip.hidden = true;
  figure.append(tooltip);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect(), outer = figure.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    let nearest = 0;
    places.forEach((place, i) => { if (Math.abs(place - at) < Math.abs(places[nearest] - at)) nearest = i; });
    const { heading, rows } = describe(nearest), x = places[nearest];
    cursor.replaceChildren(make("line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }),
      ...rows.filter(({ y }) => y !== undefined).map(({ y, colour }) => make("circle", { cx: x, cy: y, r: 3.2, fill: colour })));
    tooltip.replaceChildren(makeHtml("b", "", heading), ...rows.map(({ text, colour }) => {
      const dot = makeHtml("i", "");
      dot.style.background = colour;
      return makeHtml("div", "", dot, text);
    }));
    tooltip.hidden = false;
    const left = box.left - outer.left + (x / WIDTH) * box.width;
    tooltip.style.left = `${Math.max(0, x > WIDTH / 2 ? left - tooltip.offsetWidth - 8 : Math.min(left + 8, outer.width - tooltip.offsetWidth))}px`;
    tooltip.style.top = `${box.top - outer.top + 8}px`;
  });
  plot.addEventListener("pointerleave", () => { cursor.replaceChildren(); tooltip.hidden = true; });
}

/** Returns the range of the y axis. The outermost 1 % of a long curve is cut off, since a spike would flatten the rest. */
function yRange(series, zero) {
  const ends = series.flatMap(({ points }) => {
    const values = points.map(([, y]) => y).sort((a, b) => a - b), cut = values.length > 50 ? Math.ceil(values.length / 100) : 0;
    return [values[cut], values[values.length - 1 - cut]];
  });
  const low = Math.min(...ends, ...(zero ? [0] : [])), high = Math.max(...ends);
  const spread = high - low > 1e-6 * Math.abs(high) ? high - low : 0;  // else rounding errors would fill the axis
  const room = 0.04 * spread || 0.1 * Math.abs(high) || 1;
  return [low >= 0 ? Math.max(low - room, 0) : low - room, high + room];
}

/**
 * Draws curves over a common axis; unknown values are skipped. Returns null if no value is known.
 * A series is {name, colour, xs, ys}, and optionally faded, dashed, dots, sizes (radii of dots
 * without a line) and texts (of the tooltip). `marks` are x values of events; `whole`: x has no fractions.
 */
export function lines(title, series, { zero = false, whole = false, marks = [], ...labels } = {}) {
  const known = series.map((each) => ({ ...each, points: each.xs.map((x, i) => [x, each.ys[i], i]).filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y)) }))
    .filter(({ points }) => points.length);
  if (!known.length) return null;
  const all = known.flatMap(({ points }) => points.map(([x]) => x));
  if (new Set(all).size === 1) {
    const last = known.map(({ name, points }) => `${name ? `${name} ` : ""}${exact(points[0][1])}`).join(", ");
    return sentence(title, labels, `${labels.x ?? "x"} ${exact(all[0])}: ${last}; a curve needs a second one`);
  }
  const { figure, plot } = frame(title, labels, known);
  const x0 = all.reduce((a, b) => Math.min(a, b)), end = all.reduce((a, b) => Math.max(a, b)), x1 = end > x0 ? end : x0 + 1;
  const [low, high] = yRange(known, zero);
  const across = linear(x0, x1, LEFT, WIDTH - RIGHT), linearUp = linear(low, high, HEIGHT - BOTTOM, TOP);
  const up = (y) => linearUp(Math.min(Math.max(y, low), high));
  drawAxes(plot, across, up, ticks(x0, x1).filter((x) => !whole || Number.isInteger(x)), ticks(low, high));
  for (const mark of marks.filter((each) => each > x0 && each < x1)) plot.append(make("line", { class: "mark", x1: across(mark), x2: across(mark), y1: TOP, y2: HEIGHT - BOTTOM }));
  for (const each of known) {
    const at = each.points.map(([x, y]) => `${across(x).toFixed(1)},${up(y).toFixed(1)}`).join(" ");
    if (!each.sizes) plot.append(make("polyline", { points: at, ...stroke(each) }));
    if (each.dots || each.sizes || each.points.length === 1) {
      for (const [x, y, i] of each.points) plot.append(make("circle", { cx: across(x), cy: up(y), r: each.sizes?.[i] ?? 2.6, fill: each.colour, "fill-opacity": each.sizes ? 0.75 : 1 }));
    }
  }
  const named = known.filter(({ name, faded }) => !faded && (name !== undefined)), shown = named.length ? named : known;
  const steps = [...new Set(shown.flatMap(({ points }) => points.map(([x]) => x)))].sort((a, b) => a - b);
  addTooltip(figure, plot, steps.map(across), (place) => {
    const step = steps[place];
    const rows = shown.filter(({ points }) => step >= points[0][0] && step <= points.at(-1)[0]).map((each) => {
      const [, y, i] = each.points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
      return { y: up(y), colour: each.colour, text: each.texts?.[i] ?? `${each.name ? `${each.name}: ` : ""}${exact(y)}` };
    });
    return { heading: `${labels.x ? `${labels.x} ` : ""}${exact(step)}`, rows };
  });
  return figure;
}

/** Makes a figure with a caption. */
function captioned(title, note, content) {
  const caption = makeHtml("figcaption", "", makeHtml("b", "", title), makeHtml("small", "", note));
  return makeHtml("figure", "chart", caption, content);
}

/** Says what a chart with a single dot or bar would show. */
const sentence = (title, { note = "" }, text) => captioned(title, note, makeHtml("p", "", text));

/** Draws histograms {name, colour, edges, counts, only} over each other; `only` is the value that all have. */
export function bars(title, histograms, { logarithmic = false, ...labels } = {}) {
  if (histograms.every(({ only }) => only !== undefined)) {
    return sentence(title, labels, histograms.map(({ name, only }) => `${name ? `${name}: ` : ""}always ${exact(only)}`).join(", "));
  }
  const several = histograms.length > 1, opacity = several ? 0.6 : 0.85;
  const { figure, plot } = frame(title, labels, several ? histograms.map((each) => ({ ...each, bar: true, opacity })) : []);
  const scale = logarithmic ? Math.log10 : (x) => x;
  const x0 = Math.min(...histograms.map(({ edges }) => scale(edges[0]))), x1 = Math.max(...histograms.map(({ edges }) => scale(edges.at(-1))));
  const most = Math.max(...histograms.flatMap(({ counts }) => counts), 1);
  const across = linear(x0, x1, LEFT, WIDTH - RIGHT), up = linear(0, most, HEIGHT - BOTTOM, TOP);
  const decades = ticks(x0, x1).filter((x) => Math.abs(x - Math.round(x)) < 1e-6);
  const xTicks = logarithmic && decades.length > 1 ? decades : ticks(x0, x1);
  drawAxes(plot, across, up, xTicks, ticks(0, most), tickLabels(xTicks.map((x) => (logarithmic ? 10 ** x : x))));
  const bins = [];
  for (const { name, colour, edges, counts } of histograms) {
    counts.forEach((count, i) => {
      const left = across(scale(edges[i])), right = across(scale(edges[i + 1]));
      bins.push({ x: (left + right) / 2, heading: `${exact(edges[i])} to ${exact(edges[i + 1])}`, rows: [{ colour, text: `${several ? `${name}: ` : ""}${exact(count)}` }] });
      if (count) plot.append(make("rect", { x: left, y: up(count), width: Math.max(right - left - 0.6, 0.6), height: HEIGHT - BOTTOM - up(count), fill: colour, "fill-opacity": opacity }));
    });
  }
  addTooltip(figure, plot, bins.map(({ x }) => x), (i) => bins[i]);
  return figure;
}

/** Draws a bar for each name, with its number on top. */
export function shares(title, numbers, labels = {}) {
  const { figure, plot } = frame(title, labels, []);
  const names = Object.keys(numbers), most = Math.max(...Object.values(numbers), 1), wide = (WIDTH - LEFT - RIGHT) / names.length;
  const up = linear(0, most, HEIGHT - BOTTOM, TOP + 12);
  drawAxes(plot, (i) => LEFT + (i + 0.5) * wide, up, names.map((_, i) => i), ticks(0, most), names);
  names.forEach((name, i) => {
    const top = up(numbers[name]), x = LEFT + i * wide;
    plot.append(make("rect", { x: x + wide * 0.15, y: top, width: wide * 0.7, height: HEIGHT - BOTTOM - top, fill: colour(0), "fill-opacity": 0.85 }));
    plot.append(make("text", { x: x + wide / 2, y: top - 4, "text-anchor": "middle" }, exact(numbers[name])));
  });
  return figure;
}

/** Draws the IoU of masks against the predicted IoU; each dot is a bin, its area shows the number of masks. */
export function reliability(bins) {
  const most = Math.max(...bins.map(({ count }) => count), 1);
  return lines("IoU against predicted IoU", [
    { name: "ideal", colour: colour(1), dashed: true, xs: [0, 1], ys: [0, 1] },
    { name: "masks, by predicted IoU", colour: colour(0), xs: bins.map(({ predicted }) => predicted), ys: bins.map(({ actual }) => actual),
      sizes: bins.map(({ count }) => 3 + 8 * Math.sqrt(count / most)), texts: bins.map(({ count, actual }) => `${exact(count)} masks, IoU ${exact(actual)}`) },
  ], { x: "predicted IoU", y: "IoU", zero: true });
}

/**
 * Draws runs over each other. A run is {name, records, evaluations, resumed}: columns by name, a list
 * of {step, scores}, and the steps at which training resumed. Returns the charts of the records and
 * those of the scores on held-out data.
 */
export function runCharts(runs, weight) {
  const several = runs.length > 1, marks = several ? [] : runs.flatMap(({ resumed }) => resumed);
  const style = (i) => ({ name: several ? runs[i].name : "", colour: colour(i), dashed: i >= COLOURS });
  const columns = [...new Set(runs.flatMap(({ records }) => Object.keys(records).filter((name) => !HIDDEN.includes(name) && records[name].some((value) => value))))];
  const order = [...FIRST, ...columns.filter((name) => !FIRST.includes(name) && !LAST.includes(name)), ...LAST].filter((name) => columns.includes(name));
  const curves = order.map((column) => {
    const smooth = weight > 0 && !UNSMOOTHED.includes(column);
    const series = runs.flatMap(({ records }, i) => {
      const xs = records.step, ys = Object.hasOwn(records, column) ? records[column] : [];
      if (!smooth || ys.length < 3) return [{ ...style(i), xs, ys }];
      return [{ ...style(i), name: several ? "" : "as recorded", xs, ys, faded: true }, { ...style(i), name: several ? runs[i].name : "smoothed", xs, ys: smoothed(ys, weight) }];
    });
    const last = ({ ys }) => ys.findLast((y) => Number.isFinite(y)), ends = series.filter((each) => !each.faded && last(each) !== undefined);
    if (several) for (const each of ends) each.legend = `${each.name} ${short(last(each))}`; // ten bare numbers say nothing
    const [title, unit] = TITLES.get(column) ?? [titled(column)];
    return lines(title, series, { x: "step", whole: true, y: unit ?? column, note: several ? "" : ends.map(last).map(short).join(" · "), marks });
  });
  const names = [...new Set(runs.flatMap(({ evaluations }) => evaluations.flatMap(({ scores }) => Object.keys(scores))))];
  const scored = (name, run, look) => ({ ...look, dots: true, xs: run.evaluations.map(({ step }) => step), ys: run.evaluations.map(({ scores }) => (Object.hasOwn(scores, name) ? scores[name] : null)) });
  const labels = { x: "step", whole: true, y: "score", marks };
  if (several) return { curves, scores: names.map((name) => lines(titled(name), runs.map((run, i) => scored(name, run, style(i))), labels)) };
  const of = (some) => some.flatMap((name, i) => runs.map((run) => scored(name, run, { name, colour: colour(i), dashed: i >= COLOURS })));
  const trouble = names.filter((name) => name === "1 click" || SIGNS_OF_TROUBLE.includes(name));
  return { curves, scores: [lines("Scores on held-out data", of(names.filter((name) => !SIGNS_OF_TROUBLE.includes(name))), labels), trouble.length > 1 ? lines("Signs of trouble", of(trouble), { ...labels, note: "wrong image: low is good" }) : null] };
}

const titled = (name) => (name.charAt(0).toUpperCase() + name.slice(1)).replaceAll("_", " ");
