// Annotate: the images of a project, tools that make objects, and the list of objects. Masks are
// computed by the server; each operation names the version of the image that it was made for, and
// waits for those before it (queue.js).
import * as categories from "./categories.js";
import * as list from "./images.js";
import * as loop from "./loop.js";
import * as queue from "./queue.js";
import * as stage from "./stage.js";
import { boxOf, drawBox, drawSteps } from "./marks.js";
import { belongsTo, namesOf, takesText } from "./keys.js";
import { $, classCounts, counted, download, loadPicture, make, refill, request, save, showChosen, showMessage, withErrorMessages } from "./parts.js";
import { contains, decoded, hue } from "./masks.js";

const MODEL = [240, 228, 66], PREVIEW = [86, 180, 233], DRAGGED_PX = 6, NEAR_PX = 9, PREVIEW_MS = 40, LOOK_MS = 700, RETRY_MS = 1000, MOST_POINTS = 4000;
const NOT_SAVED = "the last change is not saved";
const TOOLS = { v: "select", p: "point", b: "box", d: "brush", e: "erase", g: "polygon" };

let images = [], order = [], change = 0;
let image = null;      // {row, name, width, height, version, objects, ...}
let wanted = null;     // row of the image that was asked for last
let active = null;     // id of the object that tools change; null begins one
let tool = "point";
let drag = null;       // {kind, from, points, client, last, long, button}, and the corner `added` by it, {ring, index}
let rings = null;      // corners of the polygon tool; `closed` if they are those of an object, whose mask is `counts`
let entries = new Map();   // of the list of objects by id: {says, mask, button, item}
let named = null;      // id of the object whose name is shown
let naming = false;    // whether the field of the name waits for what was done before: what is typed are no keys
let corner = null;     // the corner being dragged
let hovered = null;    // id of the object under the pointer or in the list
let preview = null;    // the model's mask under the pointer
let asked = 0, newest = 0, pointer = null;
let everything = null; // all masks of the model, if they are shown
let hidden = false, spaced = false, steps = 0;
let shownAt = 0, touched = false, doubted = 0;   // when the image was shown, whether it was worked on since, when "done" was doubted
let lost = null;       // the image when the answer to a change was lost, and whether one `more` failed since
let ready = Promise.resolve(), encoding = 0, slow = "", fault = "";
const pointers = new Map(), client = crypto.getRandomValues(new Uint32Array(2)).join("-");
let pinched = null;

export function start({ writers }) {
  $("a-format").append(...writers.map((name) => make("option", { value: JSON.stringify({ formats: [name] }) }, name)));
  stage.start(paint);
  queue.start(showState, failed);
  list.start((row) => { showList(false); open(row); });
  categories.start({ images: () => images, act, apart, send, active: () => active });
  const canvas = $("a-marks");
  Object.assign(canvas, { onpointerdown: pressed, onpointermove: moved, onpointerup: released, onpointercancel: cancelled, onpointerleave: left, ondblclick: closePolygon, oncontextmenu: (event) => event.preventDefault() });
  canvas.addEventListener("wheel", (event) => { event.preventDefault(); stage.zoom(1.0015 ** -turned(event), event); }, { passive: false });
  for (const button of $("a-tools").children) button.onclick = () => choose(button.dataset.tool);
  for (const [id, action] of Object.entries(actions)) if ($(`a-${id}`)) $(`a-${id}`).onclick = action;
  for (const id of ["a-contrast", "a-brightness"]) $(id).oninput = () => stage.contrast(Number($("a-contrast").value), Number($("a-brightness").value));
  $("a-order").onchange = sort;
  $("a-name").onchange = () => { const [id, name] = [named, $("a-name").value.slice(0, 100)]; if (id) act(() => send("assign", { objects: [id], name })); };
  $("a-name").onkeydown = (event) => {
    if (!["Enter", "Escape"].includes(event.key) || event.isComposing) return;
    event.preventDefault();   // a browser would empty the field
    if (event.key === "Escape") $("a-name").value = nameOf(named);   // as it was
    $("a-marks").focus({ preventScroll: true });
  };
  $("a-pair").onclick = withErrorMessages(pair);
  addEventListener("keydown", keyed);
  addEventListener("keyup", (event) => { if (event.key === " ") spaced = false; });
  addEventListener("blur", () => { spaced = false; });
  addEventListener("beforeunload", (event) => { if ((queue.busy() && queue.label()) || drawing() || typing()) event.preventDefault(); });
  $("annotate").addEventListener("click", giveBackFocus);
  $("annotate").addEventListener("change", giveBackFocus);
  loop.start({ reload: withErrorMessages(refresh), apart, image: () => image });
  withErrorMessages(async () => { await refresh(); if (order.length) await open(lastOpen() ?? order[0]); })();
}

/** Returns the image that was open when the page was loaded again. */
function lastOpen() {
  try {
    const name = sessionStorage.getItem("image");
    return order.find((row) => images[row].name === name);
  } catch { return undefined; }   // storage is disabled
}

export function shown(visible) { loop.shown(visible); if (visible) stage.draw(); }

const actions = {
  undo: () => undo(), redo: () => act(() => image.can_redo && send("history", { by: 1 })),
  accept: () => accept(), delete: () => act(() => active && send("assign", { objects: [active], delete: true })),
  split: () => act(() => active && send("split", { object: active })), choose: () => act(() => active && send("choose", { object: active })),
  new: () => leave(), done: () => finish(true), fit: () => stage.fit(), full: () => stage.fullSize(), next: () => step(1), previous: () => step(-1),
  "accept-all": () => acceptAll(), everything: () => showEverything(), hide: () => { hidden = !hidden; $("a-hide").setAttribute("aria-pressed", hidden); stage.draw(); },
  help: () => $("a-keys").showModal(), "close-keys": () => $("a-keys").close(), reload: () => open(image.row, true), "images-toggle": () => showList(),
  export: withErrorMessages(exportAll), "done-empty": () => finish(true, true),
};

/** Loads what has changed in the list of images since it was loaded, and the categories. */
async function refresh() {
  const takeCategories = categories.taker(), found = await request(`project/images?since=${change}`);
  change = found.change;
  for (const each of found.images) images[each.row] = each;
  takeCategories(found.categories);
  sort();
  showProposals();
  return images;
}

function sort() {
  const before = String(order);
  order = list.list(images, $("a-order").value);
  if (image && String(order) !== before) list.show(image.row);   // else the list stays where it was scrolled to
  progress();
}

/** Loads the open image again once the model has proposed masks for it, unless it is worked on. */
function showProposals() {
  if (!image || queue.busy() || active !== null || rings || drag || images[image.row].status !== "proposed") return;
  if (String(openOf(image)) !== String(images[image.row].open)) open(image.row, true);
}

/** Returns the certainties of the proposals that nobody has accepted or changed. */
const openOf = ({ objects }) => objects.filter((each) => each.is_open).map((each) => each.certainty);

/** Writes how much is done, and what to do next. */
function progress() {
  const done = images.filter(({ status }) => status === "done").length, accepted = images.reduce((sum, each) => sum + each.accepted, 0);
  $("a-progress").textContent = `${done} of ${images.length} images done, ${counted(accepted, "object")} accepted`;
  loop.show(images);
}

/** Gives annotations of renamed images their image, which equals what they were made for. */
async function pair() {
  const { paired, unused } = await request("project/pair", { json: {} }), count = Object.keys(paired).length;
  showMessage(count ? `${counted(count, "image")} found by content; ${unused.length ? `${unused.length} still not` : "none is missing now"}` : "no image here has the content of one that is missing");
  await loop.refresh();
}

/** Opens an image in its turn; a polygon that is being drawn is kept as an object of the one before. */
function open(row, again = false) {
  if (row !== image?.row) closePolygon();
  return queue.enqueue("opening", () => load(row, again));
}

/** Loads an image and shows it; its mask preview begins when it is embedded. */
async function load(row, again = false) {
  wanted = row;
  if (!again && image?.row === row) return;
  let info, bitmap;
  try {
    info = await request(`project/images/${row}`);
    bitmap = await loadPicture(`project/images/${row}/jpeg`, info.shows);
  } catch (error) { fault = `${images[row]?.name ?? "this image"} cannot be opened`; throw error; }
  const same = image?.row === row, kept = same ? image.objects : [];
  everything = null;
  for (const id of ["a-stale", "a-both", "a-empty-done"]) $(id).hidden = true;
  if (!same) {
    if ((drag && drag.kind !== "pan") || drawing()) showMessage("the image was left before this was drawn; draw it again");
    active = null; rings = null; touched = false; drag = corner = null;
  }
  doubted = 0;
  image = { ...info, objects: kept };
  entries.clear();   // their pictures are of other pixels
  stage.show(bitmap, info, same);   // before the objects, whose thumbnails are cut from it
  images[row].shows = info.shows;
  take(info);
  try { sessionStorage.setItem("image", info.name); } catch { /* storage is disabled */ }
  shownAt = performance.now();
  fault = "";
  $("a-note").textContent = info.note;
  if (!same) list.show(row);
  encoding += 1;
  ready = request(`project/images/${row}/embed`, { json: {} }).catch(showMessage).finally(() => { encoding -= 1; showState(); });
}

/** Says what is being done, or that all is saved, and sets the buttons that depend on it. */
function showState() {
  const name = queue.label() || slow || (encoding ? "encoding" : "");
  if (queue.label() === "saving") fault = "";
  $("a-state").classList.toggle("busy", Boolean(name));
  $("a-state").textContent = name ? `${name} …` : fault || "all saved";
  const one = image?.objects.some(({ id }) => id === active), coming = queue.label() === "saving";
  $("a-accept").disabled = !one && !(rings && !rings.closed) && !coming;
  $("a-new").disabled = !one && !rings && !coming;
}

/** Says that an action failed, and how many that waited for it are not done either. */
function failed(error, dropped) {
  console.warn(error);
  steps = 0;
  if (!/cannot be opened$/.test(fault)) fault = NOT_SAVED;
  if (queue.label() === "saving" && lost) lost.more = true;
  else if (queue.label() === "saving" && !(error.status < 500) && image) {   // a proxy answers 502 or 504 for it
    lost = { ...image, more: false };
    queue.enqueue("", recover);
  }
  const message = dropped ? `${error.message}; ${counted(dropped, "further action")} not done` : error.message;
  if (error.status === 409) { $("a-stale-why").textContent = message; $("a-stale").hidden = false; } else showMessage(message);
  stage.draw();
}

/** Shows what is saved, as soon as the server answers again, after the answer to a change was lost; another may have saved it. */
async function recover() {
  if (!lost) return;   // the server has answered about an image since
  const { row, version, objects, more } = lost;
  let found;
  try { found = await request(`project/images/${row}`); } catch (error) {
    if (error.status < 500) { lost = null; throw error; }   // as of another token: asked again, it says the same
    setTimeout(() => queue.enqueue("", recover), RETRY_MS);
    return;
  }
  if (found.version === version) { lost = null; return; }   // it never came
  take(found);
  const made = image.objects.find(({ id }) => objects.every((each) => each.id !== id));
  if (made) activate(made.id);
  if (more) return;   // what the page says of that one stays true
  if (fault === NOT_SAVED) fault = "";
  showMessage("the answer of the server was lost; the image is shown as it is saved");
}

/** Takes the server's objects of the image. */
function take(found) {
  if ([...image.objects, ...found.objects].some((each) => each.by_model)) loop.judged();
  const known = new Map(image.objects.map((each) => [each.segmentation.counts, each.mask]));
  image = { ...image, ...found, objects: found.objects.map((each) => ({ ...each, mask: known.get(each.segmentation.counts) ?? decoded(each) })) };
  if (active !== null && !image.objects.some(({ id }) => id === active)) active = null;
  preview = lost = null;
  refreshCorners();
  Object.assign(images[image.row], { status: image.status, objects: image.objects.length, accepted: image.objects.filter(({ accepted }) => accepted).length,
    open: openOf(image), held_out: image.held_out, categories: tally(image.objects.map((each) => each.category)) });
  list.update(image.row);
  progress();
  describe();
  stage.draw();
}

function tally(names) {
  const counts = Object.create(null);   // a name may be one of any object's
  for (const name of names) counts[name] = (counts[name] ?? 0) + 1;
  return counts;
}

/** Does something to the image that is shown now, in its turn; says so if that was left before, unless `quiet`. */
function act(work, quiet = false) {
  if (!image) return Promise.resolve();
  const { row } = image;
  touched = true;
  doubted = 0;
  $("a-empty-done").hidden = true;
  return queue.enqueue("saving", () => {
    if (image.row === row) return work();
    if (!quiet) showMessage(`${images[row].name} was left before this could be done`);
    return undefined;
  });
}

/** Does what may change all images in its turn, so that what is drawn meanwhile is sent once it is known what became of them. */
function apart(work) {
  return queue.enqueue("saving", async () => {
    try { return await work(); } finally { await refresh(); if (image) await load(image.row, true); }
  });
}

/** Sends an operation; returns the ids of new objects. */
async function send(path, body) {
  const before = new Set(image.objects.map(({ id }) => id));
  const found = await request(`project/images/${image.row}/${path}`, { json: { version: image.version, ...body }, pixels: image.pixels });
  take(found);
  return found.objects.map(({ id }) => id).filter((id) => !before.has(id));
}

/** Changes the active object, or begins one, which becomes active. */
function draw(path, body, begins = false) {
  const category = categories.chosen();
  return act(async () => {
    if (path === "prompt") await ready;
    const [made] = await send(path, { object: begins ? null : active, category, ...body });
    if (made !== undefined) activate(made);
  });
}

function undo() {
  if (!rings || rings.closed) return act(() => image.can_undo && send("history", { by: -1 }));
  removeCorner({ ring: rings[0], index: rings[0].length - 1 });
  return undefined;
}

function accept() {
  if (rings && !rings.closed) return closePolygon();
  return act(acceptActive);
}

async function acceptActive() {
  if (active === null) return;
  await send("assign", { objects: [active], accepted: true });
  activate(null);
}

function acceptAll() {
  return act(async () => {
    const open = image.objects.filter(({ accepted }) => !accepted).map(({ id }) => id);
    if (open.length) await send("assign", { objects: open, accepted: true });
    activate(null);
  });
}

/** Marks the image as done and opens the next; `again` is from the button, which also opens a done image again. */
function finish(again, confirmed = false) {
  if (!image) { step(1); return; }
  if (!touched && performance.now() - shownAt < LOOK_MS) return;   // nobody can have looked at it
  const { row, done } = image, doubt = doubted;
  closePolygon();
  queue.enqueue("saving", async () => {
    if (image.row !== row) return;   // pressed twice
    if (done && again) { await send("done", { done: false }); sort(); return; }
    const next = order[order.indexOf(wanted) + 1] ?? row;   // before this one, which is done, moves to the end; one that failed to open is passed
    if (!image.done) {
      await acceptActive();
      const rest = image.objects.filter(({ accepted }) => !accepted).length;
      if (rest) { showMessage(`${rest} object${rest === 1 ? " is" : "s are"} not accepted yet; accept (A) or delete them first`); return; }
      if (!image.objects.length && !confirmed && !(doubt && performance.now() - doubt > LOOK_MS)) {
        doubted ||= performance.now();
        $("a-empty-done").hidden = false;
        return;
      }
      await send("done", { done: true });
      sort();
    }
    await load(next);
  });
}

/** Opens the next image of the list, or the one before. */
function step(by) {
  closePolygon();
  steps += by;
  return queue.enqueue("opening", async () => {
    const index = Math.min(Math.max(order.indexOf(wanted) + steps, 0), order.length - 1);
    steps = 0;
    if (order.length) await load(order[index]);
  });
}

/** Makes an object the one that tools change; null for none. A polygon that is being drawn stays. */
function activate(id) {
  active = id;
  if (rings?.closed) rings = null;
  preview = null;
  if (tool === "polygon" && id && !rings) withErrorMessages(loadCorners)();
  describe();
  stage.draw();
}

const nameOf = (key) => image?.objects.find(({ id }) => id === key)?.name ?? "";

/** Whether a name is typed that is not saved yet. */
const typing = () => document.activeElement === $("a-name") && $("a-name").value !== nameOf(named);

/** Whether a polygon is being drawn that is not an object yet. */
const drawing = () => rings !== null && !rings.closed && rings[0].length > 2;

/** Loads the corners again if the mask that they belong to was changed by other means, as by undo. */
function refreshCorners() {
  if (!rings?.closed) return;
  if (rings.counts === countsOf(active)) { rings.moved = false; return; }   // they were moved to where they were
  if (rings.moved) { Object.assign(rings, { counts: countsOf(active), moved: false }); return; }   // by these corners
  rings = corner = null;
  if (active !== null) withErrorMessages(loadCorners)();
}

const countsOf = (id) => image.objects.find((each) => each.id === id)?.segmentation.counts;

const select = (id) => queue.enqueue("", () => activate(id));

/** Leaves the object, or the polygon that is being drawn. */
function leave() {
  if (rings && !rings.closed) { rings = null; describe(); stage.draw(); return; }
  select(null);
}

async function loadCorners() {
  const { row } = image, id = active, counts = countsOf(id);
  const found = await request(`project/images/${row}/corners/${id}`, { pixels: image.pixels });
  if (image.row !== row || active !== id || rings || tool !== "polygon" || countsOf(id) !== counts) return;
  rings = Object.assign(found, { closed: true, counts });
  stage.draw();
}

function choose(chosen) {
  closePolygon();   // what is drawn is kept, whatever comes next
  tool = chosen;
  for (const button of $("a-tools").children) button.setAttribute("aria-checked", button.dataset.tool === tool);
  $("a-marks").dataset.tool = tool;
  $("a-radius-label").hidden = !["brush", "erase"].includes(tool);
  rings = null;
  queue.enqueue("", () => { if (image) activate(active); });
}

const colourOf = ({ id, category }) => categories.colour(category) ?? hue(id);

/** Returns the entry of an object in the list; the one before if it says the same. */
function entryOf(each) {
  const colour = colourOf(each), says = JSON.stringify([each.name, each.category, each.accepted, each.is_open, each.certainty, each.predicted_iou, colour]), before = entries.get(each.id);
  if (before?.says === says && before.mask === each.mask) return before;
  const facts = [each.accepted ? "accepted" : each.is_open ? "proposed by the model" : "not accepted", each.is_open ? `certainty ${each.certainty.toFixed(3)}` : each.predicted_iou === null ? null : `predicted IoU ${each.predicted_iou.toFixed(3)}`].filter(Boolean).join(" · ");
  const button = make("button", { type: "button", onclick: () => { if (tool === "select") choose("point"); select(each.id); }, onpointerenter: () => { hovered = each.id; stage.draw(); }, onpointerleave: () => { hovered = null; stage.draw(); } },
    stage.thumbnail(each, colour), make("span", {}, each.name || `${each.category} ${each.id}`, make("small", {}, facts)));
  Object.assign(button.dataset, { key: each.id, accepted: each.accepted });
  return { says, mask: each.mask, button, item: make("li", {}, button) };
}

/** Lists the objects and sets what the buttons can do. */
function describe() {
  const one = image.objects.find(({ id }) => id === active), shown = $("a-objects").children;
  entries = new Map(image.objects.map((each) => [each.id, entryOf(each)]));
  const items = [...entries.values()].map(({ item }) => item);
  if (items.length !== shown.length || items.some((item, i) => item !== shown[i])) refill($("a-objects"), items);   // hundreds take long
  for (const [id, { button }] of entries) {
    const pressed = String(id === active);
    if (button.getAttribute("aria-pressed") !== pressed) button.setAttribute("aria-pressed", pressed);
  }
  $("a-empty").hidden = image.objects.length > 0;
  if (named !== active) showChosen($("a-objects"));
  if (named !== active || !typing()) $("a-name").value = nameOf(active);
  named = active;
  for (const id of ["a-name", "a-delete", "a-split"]) $(id).disabled = !one;
  $("a-choose").disabled = !(one?.steps.length === 1 && !one.by_model);
  $("a-accept-all").disabled = !image.objects.some(({ accepted }) => !accepted);
  $("a-undo").disabled = !image.can_undo && !(rings && !rings.closed);
  $("a-redo").disabled = !image.can_redo;
  $("a-done").textContent = image.done ? "Reopen" : "Done, next";
  $("a-title").textContent = `${image.name}${image.held_out ? ", held out" : ""}`;
  $("a-title").title = `${image.name}, ${image.width} x ${image.height}${image.held_out ? "; held out to compare models, never trained on" : ""}`;
  showState();
}

async function showEverything() {
  if (!image) return;
  if (everything) { everything = null; $("a-both").hidden = true; stage.draw(); return; }
  const { row } = image;
  await slowly("generating masks", async () => {
    const found = await request(`project/images/${row}/all-masks`, { json: {} });
    if (image.row !== row) return;
    everything = found.map((each) => ({ ...each, mask: decoded(each) }));
    const mine = image.objects.length;
    $("a-both").textContent = `The model's masks: ${found.length} (outlined in yellow${found[0]?.category === undefined ? "" : `: ${classCounts(found)}`}). Annotations: ${mine} (filled).`;
    $("a-both").hidden = false;
    if (!found.length) showMessage("the model finds no mask in this image that passes its thresholds");
  });
  stage.draw();
}

/** Does what takes long, once at a time, while one goes on annotating. */
const slowly = withErrorMessages(async (name, work) => {
  if (slow) throw new Error(`${slow} goes on; wait for it`);
  slow = name;
  showState();
  try { await work(); } finally { slow = ""; showState(); }
});

async function exportAll() {
  await queue.enqueue("", () => {});   // what was done before
  await slowly("exporting", async () => {
    const wanted = JSON.parse($("a-format").value);
    const { images: count, masks, written, skipped } = await request("project/export", { json: wanted });
    $("a-exported").replaceChildren(make("p", {}, `${masks} masks of ${count} images: ${written.join(", ")}. `, wanted.formats.includes("coco") ? make("button", { type: "button", onclick: withErrorMessages(async () => save(await download("project/export/coco.json"), "coco.json")) }, "Download coco.json") : ""),
      ...skipped.map((reason) => make("p", { className: "bad" }, reason)));
  });
}

/** Shows or hides the list of images on a narrow screen. */
function showList(wanted) {
  const shown = $("a-list").classList.toggle("shown", wanted);
  $("a-images-toggle").setAttribute("aria-expanded", shown);
  if (shown && image) list.show(image.row);
}

// Pointers

const radius = () => Number($("a-radius").value);
const topmost = (at) => image.objects.filter(({ mask }) => contains(mask, ...at)).sort((a, b) => a.area - b.area)[0];

function pressed(event) {
  if (!image || event.button > 2) return;   // the others go back and forward in browsers
  $("a-marks").focus({ preventScroll: true });
  if ($("a-list").classList.contains("shown")) { showList(false); return; }   // it lies over the image
  $("a-marks").setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, event);
  if (pointers.size > 1) { release(); pinched = stage.pinch(pointers, null); return; }
  corner = null;
  const at = stage.pixel(event), panning = event.button === 1 || spaced || (!stage.inside(event) && tool !== "box");
  const kind = panning ? "pan" : { brush: "stroke", erase: "stroke", box: "box", polygon: "corner" }[tool] ?? (tool === "point" && event.pointerType === "mouse" ? "point" : "click");
  drag = { kind, from: at, points: [at], client: [event.clientX, event.clientY], last: [event.clientX, event.clientY], long: false, button: event.button, erase: tool === "erase" || (kind === "stroke" && event.button === 2) };
  if (kind === "corner") grab(event);
}

/** Returns how far a wheel was turned; two fingers on a trackpad, which a browser calls a wheel with Ctrl, turn it little. */
const turned = ({ deltaY, ctrlKey }) => (ctrlKey ? Math.min(Math.max(7 * deltaY, -200), 200) : deltaY);

function moved(event) {
  if (!image) return;
  if (pointers.has(event.pointerId)) pointers.set(event.pointerId, event);
  if (pointers.size > 1) { pinched = stage.pinch(pointers, pinched); return; }
  pointer = event;
  if (!drag) { hover(event); return; }
  const at = stage.pixel(event);
  drag.long ||= Math.hypot(event.clientX - drag.client[0], event.clientY - drag.client[1]) > DRAGGED_PX;
  if (drag.kind === "pan" || (drag.kind === "click" && drag.long)) { stage.pan(event.clientX - drag.last[0], event.clientY - drag.last[1]); drag.last = [event.clientX, event.clientY]; return; }
  if (corner) { corner.ring[corner.index] = at; stage.draw(); return; }
  const last = drag.points.at(-1);
  if (drag.kind === "stroke" && Math.hypot(at[0] - last[0], at[1] - last[1]) >= 1) {
    if (drag.points.push(at) >= MOST_POINTS) { stroke(drag); drag.points = [at]; }   // the rest is another edit
  }
  else if (drag.kind !== "stroke") drag.points = [drag.from, at];
  stage.draw();
}

function released(event) {
  pointers.delete(event.pointerId);
  pinched = null;
  if (!drag || !image) return;
  const { kind, from, points, long, button, erase } = drag;
  drag = null;
  if (kind === "stroke") stroke({ points, erase });
  else if (kind === "corner") movedCorners();
  else if (kind === "box" || (kind === "point" && long)) {
    if (long) draw("prompt", { step: { box: boxOf(from, points.at(-1)) } });
  } else if (kind === "point" || (kind === "click" && !long && tool === "point")) draw("prompt", { step: { point: from, foreground: button !== 2 && !event.shiftKey && !$("a-negative").checked } });
  else if (kind === "click" && !long && tool === "select") select(topmost(from)?.id ?? null);
  stage.draw();
}

const stroke = ({ points, erase }) => draw("stroke", { points, radius: radius(), erase });

/** Ends what one pointer does since a second one came, or the browser took it; corners that were moved stay so. */
function release() {
  const { kind, long, added } = drag ?? {};
  if (added && rings?.includes(added.ring) && !(rings.closed && long)) removeCorner(added);
  else if (kind === "corner") movedCorners();
  drag = corner = null;
}

/** Takes a corner back that no mask has yet. */
function removeCorner({ ring, index }) {
  ring.splice(index, 1);
  if (!ring.length) { rings = null; describe(); }
  stage.draw();
}

/** Saves the corners of an object if one was moved, added or removed. */
function movedCorners() {
  if (corner && rings?.closed) {
    const object = active, mine = rings, copy = rings.map((ring) => [...ring]);
    act(async () => {
      mine.moved = true;
      try { await send("polygon", { object, rings: copy }); } catch (error) { Object.assign(mine, { moved: false, counts: "" }); refreshCorners(); throw error; }
    });
  }
  corner = null;
}

function cancelled(event) { pointers.delete(event.pointerId); release(); pinched = null; stage.draw(); }

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
  if (!rings) rings = Object.assign([[]], { closed: false });
  for (const ring of rings) {
    const index = ring.findIndex((each) => far(each) < near);
    if (index < 0) continue;
    if (event.button === 2 && ring.length > 3) { ring.splice(index, 1); corner = {}; movedCorners(); drag = null; stage.draw(); return; }
    if (!rings.closed && index === 0 && ring.length > 2) { drag = null; closePolygon(); return; }
    corner = { ring, index };
    return;
  }
  if (!rings.closed) {
    drag.added = { ring: rings[0], index: rings[0].push(at) - 1 };
    if (!drag.added.index) describe();
    stage.draw();
    return;
  }
  let best = null;
  for (const ring of rings) {
    ring.forEach(([ax, ay], i) => {
      const [bx, by] = ring[(i + 1) % ring.length], long = (bx - ax) ** 2 + (by - ay) ** 2 || 1;
      const share = Math.min(Math.max(((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / long, 0), 1), gap = far([ax + share * (bx - ax), ay + share * (by - ay)]);
      if (!best || gap < best.gap) best = { gap, ring, index: i + 1 };
    });
  }
  if (best && best.gap < near) { best.ring.splice(best.index, 0, at); drag.added = corner = best; }
}

/** Ends the polygon that is being drawn, which is an object of its own. */
function closePolygon() {
  if (!drawing()) return;
  const drawn = [...rings];
  rings = null;
  draw("polygon", { rings: drawn }, true);
}

// Keys

const withShift = { z: actions.redo };
const repeated = {   // also while they are held
  "+": () => stage.zoom(1.3, pointer), "=": () => stage.zoom(1.3, pointer), "-": () => stage.zoom(1 / 1.3, pointer), "[": () => brush(-1), "]": () => brush(1),
};
const keys = {
  z: actions.undo, y: actions.redo, Enter: actions.accept, Escape: actions.new, Delete: actions.delete, Backspace: actions.delete, s: actions.split, w: actions.choose,
  n: () => finish(false), ArrowRight: actions.next, ArrowDown: actions.next, ArrowLeft: actions.previous, ArrowUp: actions.previous, a: actions["accept-all"], m: actions.everything, x: actions.hide,
  f: actions.fit, 0: actions.full, "?": actions.help, r: () => { naming = true; queue.enqueue("", () => $("a-name").focus()).then(() => { naming = false; }); }, Tab: () => cycle(1), c: () => $("a-contrast").focus(), ...repeated,
};

function brush(by) { $("a-radius").value = radius() + by * Math.max(1, Math.round(radius() / 5)); stage.draw(); }

function cycle(by) {
  queue.enqueue("", () => {
    const ids = image.objects.map(({ id }) => id);
    if (ids.length) activate(ids[(ids.indexOf(active) + by + ids.length) % ids.length]);
  });
}

/** Returns what a key does, by the first of its names that does something. */
function actionOf(event) {
  for (const name of namesOf(event)) {
    const action = (event.shiftKey && withShift[name]) || keys[name] || (TOOLS[name] && (() => choose(TOOLS[name]))) || (/^[1-9]$/.test(name) && categories.atKey(name));
    if (action) return [name, action];
  }
  return [];
}

function keyed(event) {
  if ($("annotate").hidden || $("a-keys").open || takesText(event.target) || belongsTo(event.target, event.key)) return;
  if (naming) { event.preventDefault(); return; }
  if (event.key === " ") { spaced = true; event.preventDefault(); return; }
  const [name, action] = actionOf(event);
  if (!image && ![keys.n, actions.next, actions.previous, actions.help].includes(action)) return;
  if (!action || (name === "Tab" && (event.shiftKey || event.target !== $("a-marks")))) return;   // Shift+Tab leaves the image
  event.preventDefault();
  if (!event.repeat || repeated[name]) action();
}

/** Gives the keys to the image again after a pointer used a control, which would take Enter, letters or arrows. */
function giveBackFocus(event) {
  const control = event.target.closest("button, select, [type=checkbox]");
  const byPointer = control?.tagName === "SELECT" ? event.type === "change" && !control.matches(":focus-visible") : event.type === "click" && event.detail > 0;
  const typing = takesText(document.activeElement) && document.activeElement.tagName !== "SELECT";
  if (control && byPointer && !typing && !$("a-keys").open) $("a-marks").focus({ preventScroll: true });
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
    if (each.category !== undefined) stage.drawLabel(context, each.mask, `${each.category} ${each.class_score.toFixed(3)}`, unit);
  }
  const one = image.objects.find(({ id }) => id === active);
  if (preview) stage.drawMask(context, preview, PREVIEW, { alpha: 90, unit });
  if (rings) stage.drawRings(context, rings, unit, rings.closed);
  else if (one && !hidden) drawSteps(context, one.steps, unit);
  if (drag?.kind === "stroke") stage.drawStroke(context, drag.points, radius(), drag.erase);
  else if (drag?.long && ["box", "point"].includes(drag.kind)) drawBox(context, drag.from, drag.points.at(-1), unit);
  else if (pointer && (tool === "brush" || tool === "erase")) stage.drawStroke(context, [stage.pixel(pointer)], radius(), tool === "erase");
}
