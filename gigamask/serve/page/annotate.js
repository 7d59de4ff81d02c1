// Annotate: the images of a project, tools that make objects, and the list of objects. Masks are
// computed by the server; each operation names the version of the image that it was made for.
import * as loop from "./loop.js";
import * as stage from "./stage.js";
import { $, classCounts, loadPicture, make, pictureUrl, request, url, showMessage, withErrorMessages } from "./parts.js";
import { contains, decoded, hue } from "./masks.js";

const MODEL = [240, 228, 66], PREVIEW = [86, 180, 233], DRAGGED_PX = 6, NEAR_PX = 9, PREVIEW_MS = 40;
const TOOLS = { v: "select", p: "point", b: "box", d: "brush", e: "erase", g: "polygon" };
const MARKS = { done: "✓", "in progress": "◐", proposed: "✦", "not begun": "○", damaged: "!" };

let images = [], order = [], categories = [], category = "";
let image = null;      // {row, name, width, height, version, objects, ...}
let active = null;     // id of the object that tools change; null begins one
let tool = "point";
let drag = null;       // {kind, from, points, client, long, button}
let rings = null;      // corners of the polygon tool; `closed` if they are those of an object
let corner = null;     // the corner being dragged
let hovered = null;    // id of the object under the pointer or in the list
let preview = null;    // the model's mask under the pointer
let asked = 0, newest = 0, pointer = null;
let everything = null; // all masks of the model, if they are shown
let hidden = false, spaced = false, opening = 0;
let chain = Promise.resolve(), ready = Promise.resolve();
const pointers = new Map(), client = crypto.getRandomValues(new Uint32Array(2)).join("-");
let pinched = null;

export function start() {
  stage.start(paint);
  const canvas = $("a-marks");
  Object.assign(canvas, { onpointerdown: pressed, onpointermove: moved, onpointerup: released, onpointercancel: cancelled, onpointerleave: left, ondblclick: closePolygon, oncontextmenu: (event) => event.preventDefault() });
  canvas.addEventListener("wheel", (event) => { event.preventDefault(); stage.zoom(1.0015 ** -event.deltaY, event); }, { passive: false });
  for (const button of $("a-tools").children) button.onclick = () => choose(button.dataset.tool);
  for (const [id, action] of Object.entries(actions)) if ($(`a-${id}`)) $(`a-${id}`).onclick = action;
  for (const id of ["a-contrast", "a-brightness"]) $(id).oninput = () => stage.contrast(Number($("a-contrast").value), Number($("a-brightness").value));
  $("a-order").onchange = list;
  $("a-name").onchange = () => assign([active], { name: $("a-name").value.slice(0, 100) });
  $("a-add-category").onsubmit = withErrorMessages(addCategory);
  addEventListener("keydown", keyed);
  addEventListener("keyup", (event) => { if (event.key === " ") spaced = false; });
  loop.start({ reload: withErrorMessages(refresh), reopen: () => image && open(image.row, true) });
  withErrorMessages(async () => { await refresh(); if (order.length) await open(order[0]); })();
}

export function shown(visible) { loop.shown(visible); if (visible) stage.draw(); }

const actions = {
  undo: () => operate("history", { by: -1 }), redo: () => operate("history", { by: 1 }),
  accept: () => accept(), delete: () => active && operate("assign", { objects: [active], delete: true }),
  split: () => active && operate("split", { object: active }), choose: () => active && operate("choose", { object: active }),
  new: () => select(null), done: () => finish(), fit: () => stage.fit(), full: () => stage.fullSize(), next: () => step(1), previous: () => step(-1),
  "accept-all": () => acceptAll(), everything: withErrorMessages(showEverything), hide: () => { hidden = !hidden; $("a-hide").setAttribute("aria-pressed", hidden); stage.draw(); },
  help: () => $("a-keys").showModal(), "close-keys": () => $("a-keys").close(), reload: () => open(image.row, true),
  export: withErrorMessages(exportAll),
};

/** Loads the list of images and the categories. */
async function refresh() {
  const found = await request("project/images");
  ({ images, categories } = found);
  if (!categories.some(({ name }) => name === category)) category = categories[0].name;
  list();
  listCategories();
  showProposals();
  return images;
}

/** Loads the open image again once the model has proposed masks for it, unless it is worked on. */
function showProposals() {
  if (!image || active !== null || rings || drag || images[image.row].status !== "proposed") return;
  if (String(image.objects.filter(isOpen).map((each) => each.certainty)) !== String(images[image.row].open)) open(image.row, true);
}

const isOpen = (each) => each.by_model && !each.accepted;

const certainty = ({ open: values }) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** Lists the images in the chosen order. */
function list() {
  const rows = images.map((_, row) => row), by = $("a-order").value;
  const uncertain = (row) => (images[row].open.length ? certainty(images[row]) : 2);
  const rank = { done: 2, "in progress": 0, proposed: 0, damaged: 0, "not begun": 1 };
  if (by === "uncertain") rows.sort((a, b) => uncertain(a) - uncertain(b) || a - b);
  if (by === "open") rows.sort((a, b) => rank[images[a].status] - rank[images[b].status] || a - b);
  order = rows;
  progress();
  $("a-images").replaceChildren(...rows.map((row) => {
    const picture = make("img", { src: pictureUrl(`project/images/${row}/thumbnail`, images[row].shows), alt: "", loading: "lazy" });
    const button = make("button", { type: "button", onclick: () => open(row) }, picture, make("span"));
    picture.onerror = () => { button.classList.add("bad"); };
    button.dataset.row = row;
    return make("li", {}, button);
  }));
  rows.forEach(label);
}

/** Writes how much is done, and what to do next. */
function progress() {
  const done = images.filter(({ status }) => status === "done").length, accepted = images.reduce((sum, each) => sum + each.accepted, 0);
  $("a-progress").textContent = `${done} of ${images.length} images done, ${accepted} object${accepted === 1 ? "" : "s"} accepted`;
  loop.guide(images);
}

/** Scrolls the list of images to one, and nothing around the list. */
function reveal(item) {
  for (const list of [$("a-images"), $("a-images").parentElement]) {
    const box = list.getBoundingClientRect(), { top, bottom } = item.getBoundingClientRect();
    list.scrollTop += Math.min(top - box.top, 0) + Math.max(bottom - box.bottom, 0);
  }
}

/** Writes what the list says about an image. */
function label(row) {
  const button = $("a-images").querySelector(`[data-row="${row}"]`), { name, status, objects, open: values, held_out: heldOut, fault } = images[row];
  const facts = [status, objects ? `${objects} object${objects === 1 ? "" : "s"}` : null, values.length ? `certainty ${certainty(images[row]).toFixed(2)}` : null, heldOut ? "held out" : null].filter(Boolean).join(" · ");
  button.title = fault ?? `${name}: ${facts}`;
  button.lastChild.replaceChildren(make("b", {}, `${MARKS[status]} `), name, make("small", {}, facts));
  button.dataset.status = status;
  button.setAttribute("aria-current", image?.row === row);
}

/** Opens an image; its mask preview begins when it is embedded. */
const open = withErrorMessages(async (row, again = false) => {
  if (!again && image?.row === row) return;
  const mine = ++opening;
  state("opening");
  let info, bitmap;
  try {
    info = await request(`project/images/${row}`);
    bitmap = await loadPicture(`project/images/${row}/jpeg`, info.shows);
  } catch (error) { if (mine === opening) state("", `${images[row]?.name ?? "this image"} cannot be opened`); throw error; }
  if (mine !== opening) return;
  const same = image?.row === row;
  image = info;
  everything = null;
  for (const id of ["a-stale", "a-both"]) $(id).hidden = true;
  if (!same) { active = null; rings = null; }
  take(info);
  $("a-note").textContent = info.note;
  stage.show(bitmap, info);
  order.forEach(label);
  if (order.includes(row)) reveal($("a-images").children[order.indexOf(row)]);
  state("encoding");
  ready = request(`project/images/${row}/embed`, { json: {} });
  await ready;
  if (mine === opening) state("", "all saved");
});

function state(busy, message = "") {
  $("a-state").classList.toggle("busy", Boolean(busy));
  $("a-state").textContent = busy ? `${busy} …` : message;
}

/** Takes the server's objects of the image. */
function take(found) {
  const known = new Map(image.objects.map((each) => [each.segmentation.counts, each.mask]));
  image = { ...image, ...found, objects: found.objects.map((each) => ({ ...each, mask: known.get(each.segmentation.counts) ?? decoded(each) })) };
  if (active !== null && !image.objects.some(({ id }) => id === active)) active = null;
  preview = null;
  Object.assign(images[image.row], { status: image.status, objects: image.objects.length, accepted: image.objects.filter(({ accepted }) => accepted).length,
    open: image.objects.filter(isOpen).map((each) => each.certainty), held_out: image.held_out });
  label(image.row);
  progress();
  describe();
  stage.draw();
}

/** Sends an operation after those before it; returns the ids of new objects. */
function operate(path, body) {
  const row = image?.row;
  if (row === undefined) return Promise.resolve([]);
  chain = chain.then(async () => {
    if (image.row !== row) return [];
    state("saving");
    const before = new Set(image.objects.map(({ id }) => id));
    try {
      const found = await request(`project/images/${row}/${path}`, { json: { version: image.version, ...(typeof body === "function" ? body() : body) } });
      if (image.row !== row) return [];
      take(found);
      state("", "all saved");
      return found.objects.map(({ id }) => id).filter((id) => !before.has(id));
    } catch (error) {
      console.warn(error);
      state("", "the last change is not saved");
      if (error.status === 409) $("a-stale").hidden = false; else showMessage(error);
      stage.draw();
      return [];
    }
  });
  return chain;
}

/** Changes the active object, or begins one, which becomes active. */
async function change(path, body) {
  const [made] = await operate(path, () => ({ object: active, category, ...body }));
  if (made !== undefined) select(made);
}

const assign = (objects, fields) => (objects[0] ? operate("assign", { objects, ...fields }) : null);

async function accept() {
  if (rings && !rings.closed) { await closePolygon(); return; }
  if (active === null) return;
  await operate("assign", { objects: [active], accepted: true });
  select(null);
}

async function acceptAll() {
  const open = image.objects.filter(({ accepted }) => !accepted).map(({ id }) => id);
  if (open.length) await operate("assign", { objects: open, accepted: true });
  select(null);
}

async function finish() {
  if (!image.done) await accept();
  const rest = image.objects.filter(({ accepted }) => !accepted).length;
  if (rest && !image.done) { showMessage(`${rest} object${rest === 1 ? " is" : "s are"} not accepted yet; accept (A) or delete them first`); return; }
  await operate("done", { done: !image.done });
  list();
  if (image.done) await step(1);
}

/** Opens the next image of the list, or the one before. */
async function step(by) {
  const next = order[order.indexOf(image?.row) + by];
  if (next !== undefined) await open(next);
}

function select(id) {
  active = id;
  rings = null;
  preview = null;
  if (tool === "polygon" && id) withErrorMessages(loadCorners)();
  describe();
  stage.draw();
}

async function loadCorners() {
  const found = await request(`project/images/${image.row}/corners/${active}`);
  rings = Object.assign(found, { closed: true });
  stage.draw();
}

function choose(wanted) {
  tool = wanted;
  for (const button of $("a-tools").children) button.setAttribute("aria-checked", button.dataset.tool === tool);
  $("a-marks").dataset.tool = tool;
  $("a-radius-label").hidden = !["brush", "erase"].includes(tool);
  select(active);
}

const colourOf = ({ id, category: name }) => {
  const { color } = categories.length > 1 ? categories.find((each) => each.name === name) ?? {} : {};
  return color ? [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)) : hue(id);
};

/** Lists the objects and sets what the buttons can do. */
function describe() {
  const one = image.objects.find(({ id }) => id === active);
  $("a-objects").replaceChildren(...image.objects.map((each) => {
    const facts = [each.accepted ? "accepted" : each.by_model ? "proposed by the model" : "not accepted", isOpen(each) ? `certainty ${each.certainty.toFixed(2)}` : each.predicted_iou === null ? null : `predicted IoU ${each.predicted_iou.toFixed(2)}`].filter(Boolean).join(" · ");
    const button = make("button", { type: "button", onclick: () => { choose(tool === "select" ? "point" : tool); select(each.id); }, onpointerenter: () => { hovered = each.id; stage.draw(); }, onpointerleave: () => { hovered = null; stage.draw(); } },
      stage.thumbnail(each, colourOf(each)), make("span", {}, each.name || `${each.category} ${each.id}`, make("small", {}, facts)));
    button.setAttribute("aria-pressed", each.id === active);
    button.dataset.accepted = each.accepted;
    return make("li", {}, button);
  }));
  $("a-empty").hidden = image.objects.length > 0;
  $("a-name").value = one?.name ?? "";
  for (const id of ["a-name", "a-delete", "a-split", "a-new"]) $(id).disabled = !one;
  $("a-accept").disabled = !one && !(rings && !rings.closed);
  $("a-choose").disabled = !(one?.steps.length === 1 && !one.by_model);
  $("a-accept-all").disabled = !image.objects.some(({ accepted }) => !accepted);
  $("a-undo").disabled = !image.can_undo;
  $("a-redo").disabled = !image.can_redo;
  $("a-done").textContent = image.done ? "Reopen" : "Done, next";
  $("a-title").textContent = `${image.name}${image.held_out ? ", held out" : ""}`;
  $("a-title").title = `${image.name}, ${image.width} x ${image.height}${image.held_out ? "; held out to compare models, never trained on" : ""}`;
}

function listCategories() {
  $("a-categories").replaceChildren(...categories.map(({ name, color }, i) => {
    const button = make("button", { type: "button", title: `for new objects and the selected one${i < 9 ? ` (${i + 1})` : ""}`, onclick: () => categorize(name) }, make("i"), name);
    button.firstChild.style.background = color;
    button.setAttribute("aria-pressed", name === category);
    return button;
  }));
}

function categorize(name) {
  category = name;
  listCategories();
  if (active) assign([active], { category });
}

async function addCategory(event) {
  event.preventDefault();
  const name = $("a-new-category").value.trim();
  if (!name) return;
  ({ categories } = await request("project/categories", { json: { categories: [...categories, { name, color: $("a-color").value }] } }));
  $("a-new-category").value = "";
  categorize(name);
}

async function showEverything() {
  if (everything) { everything = null; $("a-both").hidden = true; stage.draw(); return; }
  const row = image.row;
  state("generating masks");
  try {
    const found = await request(`project/images/${row}/all-masks`, { json: {} });
    if (image.row !== row) return;
    everything = found.map((each) => ({ ...each, mask: decoded(each) }));
    const mine = image.objects.length;
    $("a-both").textContent = `The model's masks: ${found.length} (outlined in yellow${found[0]?.category === undefined ? "" : `: ${classCounts(found)}`}). Annotations: ${mine} (filled).`;
    $("a-both").hidden = false;
    if (!found.length) showMessage("the model finds no mask in this image that passes its thresholds");
  } finally { state("", "all saved"); stage.draw(); }
}

async function exportAll() {
  state("exporting");
  try {
    const { images: count, masks, coco, shards, skipped } = await request("project/export", { json: {} });
    $("a-exported").replaceChildren(make("p", {}, `${masks} masks of ${count} images: ${shards} and ${coco}. `, make("a", { href: url("project/export/coco.json"), download: "coco.json" }, "Download coco.json")),
      ...skipped.map((reason) => make("p", { className: "bad" }, reason)));
  } finally { state("", "all saved"); }
}

// Pointers

const radius = () => Number($("a-radius").value);
const topmost = (at) => image.objects.filter(({ mask }) => contains(mask, ...at)).sort((a, b) => a.area - b.area)[0];

function pressed(event) {
  if (!image) return;
  $("a-marks").focus({ preventScroll: true });
  $("a-marks").setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, event);
  if (pointers.size > 1) { drag = null; pinched = stage.pinch(pointers, null); return; }
  const at = stage.pixel(event), panning = event.button === 1 || spaced || (!stage.inside(event) && tool !== "box");
  const kind = panning ? "pan" : { brush: "stroke", erase: "stroke", box: "box", polygon: "corner" }[tool] ?? (tool === "point" && event.pointerType === "mouse" ? "point" : "click");
  drag = { kind, from: at, points: [at], client: [event.clientX, event.clientY], long: false, button: event.button, erase: tool === "erase" || (kind === "stroke" && event.button === 2) };
  if (kind === "corner") grab(event);
}

function moved(event) {
  if (!image) return;
  if (pointers.has(event.pointerId)) pointers.set(event.pointerId, event);
  if (pointers.size > 1) { pinched = stage.pinch(pointers, pinched); return; }
  pointer = event;
  if (!drag) { hover(event); return; }
  const at = stage.pixel(event);
  drag.long ||= Math.hypot(event.clientX - drag.client[0], event.clientY - drag.client[1]) > DRAGGED_PX;
  if (drag.kind === "pan" || (drag.kind === "click" && drag.long)) { stage.pan(event.movementX, event.movementY); return; }
  if (corner) { corner.ring[corner.index] = at; stage.draw(); return; }
  const last = drag.points.at(-1);
  if (drag.kind === "stroke" && Math.hypot(at[0] - last[0], at[1] - last[1]) >= 1 && drag.points.length < 4000) drag.points.push(at);
  else if (drag.kind !== "stroke") drag.points = [drag.from, at];
  stage.draw();
}

async function released(event) {
  pointers.delete(event.pointerId);
  pinched = null;
  if (!drag || !image) return;
  const { kind, from, points, long, button, erase } = drag;
  drag = null;
  if (kind === "stroke") await change("stroke", { points, radius: radius(), erase });
  else if (corner) { corner = null; if (rings.closed) await operate("polygon", { object: active, rings }); }
  else if (kind === "box" || (kind === "point" && long)) {
    const [a, b] = [from, points.at(-1)], box = [Math.min(a[0], b[0]), Math.min(a[1], b[1]), Math.max(a[0], b[0]), Math.max(a[1], b[1])];
    if (long) { await ready; await change("prompt", { step: { box } }); }
  } else if (kind === "point" || (kind === "click" && !long && tool === "point")) { await ready; await change("prompt", { step: { point: from, foreground: button !== 2 && !event.shiftKey && !$("a-negative").checked } }); }
  else if (kind === "click" && !long && tool === "select") select(topmost(from)?.id ?? null);
  stage.draw();
}

function cancelled(event) { pointers.delete(event.pointerId); drag = corner = pinched = null; stage.draw(); }

function left() { pointer = preview = null; hovered = null; stage.draw(); }

/** Shows what is under the pointer: an object to select, or the model's mask of a click. */
function hover(event) {
  if (tool === "select") {
    const found = topmost(stage.pixel(event))?.id ?? null;
    if (found !== hovered) { hovered = found; stage.draw(); }
  } else if (tool === "brush" || tool === "erase") stage.draw();
  else if (tool === "point" && active === null && event.pointerType === "mouse") {
    clearTimeout(asked);
    asked = setTimeout(ask, PREVIEW_MS);
  } else if (tool === "polygon" && rings && !rings.closed) stage.draw();
}

/** Asks for the model's mask under the pointer; the server drops requests that wait for it. */
async function ask() {
  if (!pointer || active !== null || !stage.inside(pointer)) return;
  const at = stage.pixel(pointer), row = image.row, mine = ++newest;
  const current = () => mine === newest && image.row === row && active === null && pointer && tool === "point";
  try {
    await ready;
    const found = await request(`project/images/${row}/preview`, { json: { steps: [{ point: at }], client } });
    if (current()) { preview = { ...found, mask: decoded(found) }; stage.draw(); }
  } catch { if (current()) preview = null; }
  if (current() && String(stage.pixel(pointer)) !== String(at)) ask();
}

/** Grabs a corner of the polygon, adds one, or removes it with the right button. */
function grab(event) {
  const near = NEAR_PX * (100 / stage.percentShown()), [x, y] = stage.place(event), at = stage.pixel(event);
  const far = ([a, b]) => Math.hypot(a + 0.5 - x, b + 0.5 - y);
  if (!rings) { rings = Object.assign([[at]], { closed: false }); describe(); stage.draw(); return; }
  for (const ring of rings) {
    const index = ring.findIndex((each) => far(each) < near);
    if (index < 0) continue;
    if (event.button === 2 && ring.length > 3) { ring.splice(index, 1); corner = { ring, index: 0 }; return; }
    if (!rings.closed && index === 0 && ring.length > 2) { drag = null; closePolygon(); return; }
    corner = { ring, index };
    return;
  }
  if (!rings.closed) { rings[0].push(at); stage.draw(); return; }
  let best = null;
  for (const ring of rings) {
    ring.forEach(([ax, ay], i) => {
      const [bx, by] = ring[(i + 1) % ring.length], long = (bx - ax) ** 2 + (by - ay) ** 2 || 1;
      const share = Math.min(Math.max(((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / long, 0), 1), gap = far([ax + share * (bx - ax), ay + share * (by - ay)]);
      if (!best || gap < best.gap) best = { gap, ring, index: i + 1 };
    });
  }
  if (best && best.gap < near) { best.ring.splice(best.index, 0, at); corner = best; }
}

async function closePolygon() {
  if (!rings || rings.closed || rings[0].length < 3) return;
  const drawn = [...rings];
  rings = null;
  await change("polygon", { rings: drawn });
}

// Keys

const withShift = { z: actions.redo };
const keys = {
  z: actions.undo, y: actions.redo, Enter: actions.accept, Escape: actions.new, Delete: actions.delete, Backspace: actions.delete, s: actions.split, w: actions.choose,
  n: actions.done, ArrowRight: actions.next, ArrowDown: actions.next, ArrowLeft: actions.previous, ArrowUp: actions.previous, a: actions["accept-all"], m: actions.everything, x: actions.hide,
  f: actions.fit, 0: actions.full, "+": () => stage.zoom(1.3, pointer), "=": () => stage.zoom(1.3, pointer), "-": () => stage.zoom(1 / 1.3, pointer), "?": actions.help,
  "[": () => brush(-1), "]": () => brush(1), r: () => $("a-name").focus(), Tab: () => cycle(1), c: () => $("a-contrast").focus(),
};

function brush(by) { $("a-radius").value = radius() + by * Math.max(1, Math.round(radius() / 5)); stage.draw(); }

function cycle(by) {
  const ids = image.objects.map(({ id }) => id);
  if (ids.length) select(ids[(ids.indexOf(active) + by + ids.length) % ids.length]);
}

function keyed(event) {
  if ($("annotate").hidden || !image || $("a-keys").open || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName) && event.target.type !== "range") return;
  if (event.altKey || ((event.ctrlKey || event.metaKey) && !/^[zy]$/i.test(event.key))) return;
  if (event.key === " ") { spaced = true; event.preventDefault(); return; }
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (key === "Tab" && event.target !== $("a-marks")) return;
  const action = (event.shiftKey && withShift[key]) || keys[key] || (TOOLS[key] && (() => choose(TOOLS[key]))) || (/^[1-9]$/.test(key) && categories[key - 1] && (() => categorize(categories[key - 1].name)));
  if (!action) return;
  event.preventDefault();
  action();
}

/** Draws the objects, the prompts of the active one, and what the tool is about to do. */
function paint(context, unit) {
  if (!image) return;
  if (!hidden) {
    for (const each of [...image.objects].sort((a, b) => b.area - a.area)) {
      const lit = each.id === active || each.id === hovered;
      stage.drawMask(context, each, colourOf(each), { alpha: each.accepted ? (lit ? 150 : 90) : lit ? 110 : 40, unit });
    }
  }
  for (const each of everything ?? []) {
    stage.drawMask(context, each, MODEL, { alpha: 0, unit });
    if (each.category !== undefined) stage.drawLabel(context, each.mask, `${each.category} ${each.class_score.toFixed(2)}`, unit);
  }
  const one = image.objects.find(({ id }) => id === active);
  if (preview) stage.drawMask(context, preview, PREVIEW, { alpha: 90, unit });
  if (rings) stage.drawRings(context, rings, unit, rings.closed);
  else if (one && !hidden) stage.drawSteps(context, one.steps, unit);
  if (drag?.kind === "stroke") stage.drawStroke(context, drag.points, radius(), drag.erase);
  else if (drag?.long && ["box", "point"].includes(drag.kind)) stage.drawBox(context, drag.from, drag.points.at(-1), unit);
  else if (pointer && (tool === "brush" || tool === "erase")) stage.drawStroke(context, [stage.pixel(pointer)], radius(), tool === "erase");
}
