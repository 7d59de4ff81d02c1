// Data: images with their masks, what a sampler draws, statistics, and skipped samples.
import { $, bytes, count, counted, loadPicture, make, percent, pictureUrl, request, withErrorMessages } from "./parts.js";
import { bars, colour, lines, shares, short } from "./charts.js";
import { contains, decoded, drawMasks, hue, ramp } from "./masks.js";
import { pixelOf } from "./pointer.js";
import { openRow } from "./try.js";

const PAGE = 24, DRAWN = 12, LINES = 200;
const COLOURS = { fine: colour(0), medium: colour(1), coarse: colour(2) };

let about = null, trying = false, last = 0, at = 0;
let open = null;     // the image in the viewer: {row, name, width, height, masks, bitmap}
let hovered = -1;
let started = false;
const asked = {};    // how often each part was asked for

export function start(info) { trying = info.weights !== null; }

export function shown(visible) {
  if (visible && !started) { started = true; withErrorMessages(begin)(); }
}

async function begin() {
  about = await request("data");
  $("data-facts").textContent = `${count(about.images)} images with ${count(about.masks)} masks in ${counted(about.shards.length, "shard")}, ${bytes(about.shards.reduce((sum, { bytes: size }) => sum + size, 0))}`;
  $("shard").replaceChildren(...about.shards.map(({ name, images }, i) => make("option", { value: i }, `${name} (${count(images)})`)));
  $("shard").onchange = () => turn(about.shards[$("shard").value].first);
  $("earlier").onclick = () => turn(at - PAGE);
  $("later").onclick = () => turn(at + PAGE);
  $("close").onclick = () => $("viewer").close();
  $("colour").onchange = paint;
  $("try-it").hidden = !trying;
  $("try-it").onclick = withErrorMessages(async () => { const { row } = open; $("viewer").close(); await openRow(row); });
  const canvas = $("viewer-canvas");
  canvas.onpointermove = look;
  canvas.onclick = look;
  canvas.onpointerleave = () => { hovered = -1; paint(); };
  $("sampler").replaceChildren(...about.samplers.map((name) => make("option", { value: name }, name)));
  $("sampler").onchange = withErrorMessages(async () => { $("position").value = 0; await Promise.all([draw(), expose()]); });
  $("epoch").onchange = $("position").onchange = withErrorMessages(draw);
  $("slide").oninput = () => { $("position").value = $("slide").value; };
  $("slide").onchange = withErrorMessages(draw);
  leftOut();
  turn(0);
  await Promise.all([draw(), expose(), histograms()]);
}

/** Returns the answer of what a part asked for; null if it has asked for something else since. */
async function latest(part, work) {
  const mine = asked[part] = (asked[part] ?? 0) + 1, found = await work;
  return mine === asked[part] ? found : null;
}

/** Shows a page of images, starting at a row. */
const turn = withErrorMessages(async (row) => {
  at = Math.min(Math.max(row, 0), Math.max(about.images - 1, 0));
  const rows = await latest("grid", request(`data/images?first=${at}&count=${PAGE}`));
  if (!rows) return;
  last = at + rows.length;
  $("grid").replaceChildren(...rows.map(tile));
  $("range").textContent = about.images ? `${count(at + 1)} to ${count(last)} of ${count(about.images)}` : "no images";
  $("earlier").disabled = at === 0;
  $("later").disabled = last >= about.images;
  if (rows.length) $("shard").value = rows[0].shard;
});

function tile(image) {
  const picture = make("img", { src: pictureUrl(`data/images/${image.row}/thumbnail`, image.shows), alt: "", loading: "lazy" });
  const caption = make("span", {}, `${image.name} · ${counted(image.masks, "mask")}`);
  picture.onerror = () => { caption.textContent = `${image.name} · cannot be read`; caption.className = "bad"; };
  return make("button", { type: "button", title: `${image.name}, ${image.width} x ${image.height}`, onclick: withErrorMessages(() => view(image)) }, picture, caption);
}

async function view(image) {
  const found = await latest("viewer", Promise.all([loadPicture(`data/images/${image.row}/jpeg`, image.shows), image.annotated ? request(`data/images/${image.row}`) : { ...image, masks: [] }]));
  if (!found) return;
  const [bitmap, info] = found;
  open = { ...info, bitmap };
  open.masks = open.masks.map((mask) => ({ ...mask, mask: decoded(mask) })).sort((a, b) => b.area - a.area);
  hovered = -1;
  const canvas = $("viewer-canvas");
  canvas.width = open.width;
  canvas.height = open.height;
  canvas.style.setProperty("--ratio", open.width / open.height);
  $("viewer-name").textContent = open.name;
  paint();
  if (!$("viewer").open) $("viewer").showModal();
}

/** Returns where a mask lies on the colour scale, 0 to 1. */
function share(mask, by) {
  if (by === "area") return (Math.log10(Math.max(mask.area / (open.width * open.height), 1e-5)) + 5) / 5;
  const values = open.masks.map((each) => each[by]), low = Math.min(...values), high = Math.max(...values);
  return high > low ? (mask[by] - low) / (high - low) : 1;
}

function paint() {
  if (!open) return;
  const by = $("colour").value, context = $("viewer-canvas").getContext("2d");
  const line = Math.max(1, Math.round(open.width / 900)), size = [open.height, open.width];
  context.drawImage(open.bitmap, 0, 0);
  if (hovered >= 0) {
    context.fillStyle = "#0009";
    context.fillRect(0, 0, open.width, open.height);
  }
  const colours = open.masks.map((mask, i) => (by === "mask" ? hue(i) : ramp(share(mask, by))));
  const some = hovered >= 0 ? [hovered] : open.masks.map((_, i) => i);
  context.drawImage(drawMasks(some.map((i) => open.masks[i].mask), some.map((i) => colours[i]), size, { line, alpha: 130 }), 0, 0);
  const values = open.masks.map((each) => each[by]);
  const ends = by === "area" ? ["0.001 %", "100 %"] : by === "mask" || !values.length ? [] : [Math.min(...values).toFixed(3), Math.max(...values).toFixed(3)];
  const strip = make("i");
  strip.style.background = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map((each) => `rgb(${ramp(each)})`)})`;
  $("scale").replaceChildren(...(ends.length ? [ends[0], strip, ends[1]] : []));
  const mask = open.masks[hovered];
  $("viewer-info").textContent = mask
    ? `${percent(mask.area / (open.width * open.height), 2)} of the image, predicted IoU ${mask.predicted_iou.toFixed(3)}, stability ${mask.stability.toFixed(3)}`
    : `${open.width} x ${open.height}, ${counted(open.masks.length, "mask")}; hover over one`;
}

function look(event) {
  const [x, y] = pixelOf($("viewer-canvas"), event, [open.width, open.height]);
  const found = open.masks.findLastIndex(({ mask }) => contains(mask, x, y));
  if (found !== hovered) { hovered = found; paint(); }
}

async function draw() {
  const query = `name=${$("sampler").value}&epoch=${$("epoch").value || 0}&position=${$("position").value || 0}&count=${DRAWN}`;
  $("drawn").replaceChildren();
  const found = await latest("drawn", request(`data/sampler?${query}`));
  if (!found) return;
  const { positions, position, images } = found;
  $("slide").max = Math.max(positions - 1, 0);
  $("slide").value = $("position").value = position;
  $("positions").textContent = `of ${count(positions)} in an epoch`;
  $("drawn").replaceChildren(...images.map(tile));
}

async function expose() {
  $("exposure").replaceChildren();
  const found = await latest("exposure", request(`data/sampler/statistics?name=${$("sampler").value}`));
  if (!found) return;
  const { pieces, data } = found;
  const xs = pieces.map(({ end }) => end), ends = [xs[0], xs.at(-1)];
  const curve = (name, colour, value) => ({ name, colour, xs, ys: pieces.map(value) });
  const level = (name, colour, value) => ({ name, colour, xs: ends, ys: [value, value], dashed: true, faded: true });
  const drawn = Object.entries(COLOURS).map(([name, colour]) => curve(name, colour, ({ granularity }) => 100 * granularity[name]));
  const levels = Object.entries(COLOURS).map(([name, colour]) => level(`${name}, all data`, colour, 100 * data.granularity[name]));
  $("exposure").replaceChildren(...[
    lines("Granularity", [...levels, ...drawn], { x: "samples drawn", y: "% of the samples", zero: true }),
    lines("Median difficulty", [curve("drawn", colour(0), ({ difficulty }) => difficulty.median), level("all data", colour(0), data.difficulty.median)], { x: "samples drawn", y: "difficulty, 0 to 1" }),
    lines("Shards", [curve("visited so far", colour(0), ({ tars_seen }) => tars_seen), curve("in a step of the curve", colour(1), ({ tars_here }) => tars_here)], { x: "samples drawn", y: "shards", note: `of ${count(data.tars)}`, zero: true }),
  ].filter(Boolean));
}

async function histograms() {
  const { histograms, granularity, distributions } = await request("data/statistics");
  const held = Object.fromEntries(Object.entries(histograms).map(([name, one]) => {
    const { min, max } = distributions[name];
    return [name, { ...one, only: min === max ? min : undefined }];
  }));
  const one = (title, name, more) => held[name] && bars(title, [{ ...held[name], colour: colour(0) }], { note: `median ${short(distributions[name].median)}`, y: "masks", ...more });
  const sides = ["short side", "long side"].filter((name) => held[name]).map((name, i) => ({ ...held[name], name, colour: colour(i) }));
  $("histograms").replaceChildren(...[
    one("Masks per image", "masks per image", { x: "masks of an image", y: "images" }),
    one("Mask area", "mask area share", { x: "share of the image, logarithmic", logarithmic: true }),
    shares("Granularity of masks", Object.fromEntries(Object.entries(granularity).map(([name, number]) => [name.split(" ")[0], number])), { y: "masks" }),
    sides.length ? bars("Image size", sides, { x: "pixels", y: "images" }) : null,
    one("Predicted IoU", "predicted_iou", { x: "predicted IoU" }),
    one("Stability", "stability_score", { x: "stability score" }),
  ].filter(Boolean));
}

function leftOut() {
  const reasons = [...about.broken, ...about.skipped.map(({ reason }) => reason)];
  $("left-out-part").hidden = !reasons.length;
  $("left-out").replaceChildren(...reasons.slice(0, LINES).map((line) => make("li", {}, line)));
  if (about.skipped_count > LINES) $("left-out").append(make("li", {}, `and ${count(about.skipped_count - LINES)} more; 'gigamask index' lists all`));
}
