// Try: an image, prompts on it, and the predicted masks. The prompts are a list of steps; undo removes the last one.
import { $, classCounts, loadPicture, make, percent, pictureUrl, request, save, showMessage, withErrorMessages } from "./parts.js";
import * as compared from "./compare.js";
import { boxOf, drawBox, drawSteps } from "./marks.js";
import { decoded, drawMasks, hue, png } from "./masks.js";
import { namesOf, takesText } from "./keys.js";
import { pixelOf } from "./pointer.js";

const ANSWER = [0, 114, 178], DRAGGED_PX = 6, SAMPLES = 16, POLL_MS = 1000;

let picture = null;   // {id, name, width, height, bitmap, masks}
let steps = [];       // {point: [x, y], foreground} or {box: [x0, y0, x1, y1]}, and `chosen`
let answers = [];     // the masks predicted for a step, each with its decoded `mask`
let answered = null;  // that step; later ones may wait for their answers
let picked = 0;       // index of the chosen mask
let hovered = null;   // index of the mask under the pointer
let title = "Masks";
let mode = "add";
let drag = null;      // {start, now, button} in image pixels
let opening = 0;      // number of the latest image that was opened
let turn = 0;         // number of the latest request; responses to earlier ones are ignored
let ready = null;     // promise of the embedding

export function start(about) {
  compared.start(about);
  $("find").hidden = !about.grounding;
  $("file").onchange = withErrorMessages(async (event) => { await open(event.target.files[0]); event.target.value = ""; });
  const drop = $("drop");
  drop.ondragover = (event) => { event.preventDefault(); drop.classList.add("over"); };
  drop.ondragleave = () => drop.classList.remove("over");
  drop.ondrop = withErrorMessages(async (event) => { event.preventDefault(); drop.classList.remove("over"); await open(event.dataTransfer.files[0]); });
  addEventListener("paste", withErrorMessages(async (event) => {
    const file = [...(event.clipboardData?.files ?? [])][0];
    if (file && !$("try").hidden) await open(file);
  }));
  for (const button of $("mode").children) button.onclick = () => choose(button.dataset.mode);
  $("undo").onclick = undo;
  $("clear").onclick = clear;
  $("several").onchange = withErrorMessages(async () => { steps = steps.map(({ chosen, ...step }) => step); await question(); });
  $("save-png").onclick = withErrorMessages(savePng);
  $("save-rle").onclick = withErrorMessages(saveRle);
  $("all-masks").onclick = withErrorMessages(allMasks);
  $("another").onclick = close;
  $("find").onsubmit = withErrorMessages(async (event) => { event.preventDefault(); await find($("text").value.trim()); });
  const canvas = $("canvas");
  canvas.oncontextmenu = (event) => event.preventDefault();
  canvas.onpointerdown = pressed;
  canvas.onpointermove = moved;
  canvas.onpointerup = withErrorMessages(released);
  canvas.onpointercancel = () => { drag = null; paint(); };
  addEventListener("keydown", keyed);
  addEventListener("resize", fit);
  if (about.data) withErrorMessages(samples)();
}

export function shown(visible) { if (visible) fit(); }

/** Opens an image of the dataset. */
export async function openRow(row) {
  location.hash = "#try";
  await opened(request(`images/from-dataset/${row}`, { json: {} }));
}

async function open(file) {
  if (!file) return;
  const body = file.type.startsWith("image/") ? file : new Blob([file], { type: "image/jpeg" });   // the server looks at the bytes
  await opened(request(`images?name=${encodeURIComponent(file.name || "image")}`, { body }));
}

async function opened(response) {
  const mine = ++opening;
  busy("opening");
  try {
    const info = await response;
    if (mine === opening) await show(info);   // else another one was opened since
  } catch (error) { if (mine === opening) busy(); throw error; }
}

async function show(info) {
  const mine = opening, bitmap = await loadPicture(`images/${info.id}/jpeg`, info.id);
  if (mine !== opening) return;
  picture = { ...info, bitmap };
  $("canvas").classList.remove("none");
  $("canvas").style.setProperty("--ratio", info.width / info.height);
  $("invite").hidden = true;
  $("drop").classList.add("full");
  fit();
  for (const id of ["all-masks", "another"]) $(id).disabled = false;
  clear();
  const shown = picture;
  busy("encoding");
  ready = request(`images/${info.id}/embed`, { json: {} });
  const { seconds, cached } = await ready;
  if (picture === shown) busy(false, [cached ? "encoded (cached)" : `encoded in ${seconds.toFixed(seconds < 1 ? 2 : 1)} s`, info.note].filter(Boolean).join("; "));
}

function close() {
  picture = null;
  clear();
  $("canvas").classList.add("none");
  $("invite").hidden = false;
  $("drop").classList.remove("full");
  for (const id of ["all-masks", "another"]) $(id).disabled = true;
  busy();
}

function choose(wanted) {
  mode = wanted;
  for (const button of $("mode").children) button.setAttribute("aria-checked", button.dataset.mode === mode);
  $("canvas").classList.toggle("boxing", mode === "box");
}

function undo() {
  steps.pop();
  const last = steps.at(-1);
  if (last) delete last.chosen;
  withErrorMessages(question)();
}

function clear() {
  steps = [];
  withErrorMessages(question)();
}

function keyed(event) {
  if ($("try").hidden || !picture || takesText(event.target)) return;
  const names = namesOf(event), number = names.find((name) => /^[1-9]$/.test(name));
  if (names.includes("z") || names.includes("Backspace")) { event.preventDefault(); if (steps.length) undo(); }
  else if (names.includes("Escape")) clear();
  else if (answers[number - 1]) pick(number - 1);
}

/** Returns the image pixel under a pointer, counted from 0. */
const place = (event) => pixelOf($("canvas"), event, [picture.width, picture.height]);

function pressed(event) {
  if (!picture || event.button > 2 || event.button === 1) return;
  $("canvas").setPointerCapture(event.pointerId);
  drag = { start: place(event), now: place(event), from: [event.clientX, event.clientY], button: event.button, boxing: mode === "box" || event.pointerType === "mouse", long: false };
}

function moved(event) {
  if (!drag) return;
  drag.now = place(event);
  drag.long ||= drag.boxing && Math.hypot(event.clientX - drag.from[0], event.clientY - drag.from[1]) > DRAGGED_PX;
  if (drag.long) paint();
}

async function released(event) {
  if (!drag) return;
  const { start, now, button, long } = drag, far = Math.hypot(event.clientX - drag.from[0], event.clientY - drag.from[1]);
  drag = null;
  if (steps.includes(answered) && answers[picked]?.number !== undefined) answered.chosen = answers[picked].number;
  if (long) {
    steps.push({ box: boxOf(start, now) });
  } else if (far <= DRAGGED_PX * 2 && !(mode === "box" && event.pointerType !== "mouse")) {
    steps.push({ point: start, foreground: button !== 2 && mode !== "remove" });
  }
  await question();
}

/** Requests the masks for the current prompts. */
async function question() {
  const mine = ++turn;
  $("undo").disabled = $("clear").disabled = !steps.length;
  title = "Masks";
  if (!picture || !steps.length) { take([]); await compared.compare(picture, [], null, () => mine === turn); return; }
  paint();
  await ready;
  if (mine !== turn) return;
  try {
    const json = { steps, multimask_output: $("several").checked ? true : null }, shown = picture;
    const found = await request(`images/${picture.id}/predict`, { json });
    if (mine === turn) take(found);
    await compared.compare(shown, steps, json, () => mine === turn);
  } catch (error) {
    if (mine !== turn) return;
    steps.pop();
    $("undo").disabled = $("clear").disabled = !steps.length;
    paint();
    throw error;
  }
}

async function allMasks() {
  const mine = ++turn, { id } = picture;
  let ended = false;
  busy("generating masks");
  const poll = async () => {
    if (ended) return;
    const { fraction } = await request(`images/${id}/progress`).catch(() => ({}));
    if (!ended && mine === turn && fraction) busy(`generating masks: ${Math.round(100 * fraction)} %`);
    setTimeout(poll, POLL_MS);
  };
  setTimeout(poll, POLL_MS);
  try {
    const found = await request(`images/${id}/all-masks`, { json: {} });
    if (mine !== turn) return;
    if (!found.length) showMessage("no mask passes the thresholds; start the page with a lower --pred-iou-thresh and --stability-score-thresh");
    steps = [];
    title = [`Everything the model finds: ${found.length} ${found.length === 1 ? "mask" : "masks"}`, classCounts(found)].filter(Boolean).join("; ");
    take(found, true);
  } finally { ended = true; if (picture?.id === id) busy(); }   // another one may be encoded
}

async function find(text) {
  if (!text || !picture) { if (!picture) showMessage("open an image first"); return; }
  const mine = ++turn;
  busy("searching");
  try {
    const found = await request(`images/${picture.id}/find`, { json: { text } });
    if (mine !== turn) return;
    steps = [];
    const kind = found.annotated ? "annotated masks" : "masks of the model";
    title = found.num_matches ? `${found.num_matches} of ${found.candidates} ${kind} fit` : `None of ${found.candidates} ${kind} fits; the closest`;
    if (found.note) title += ` (${found.note})`;
    take(found.answers);
  } finally { busy(); }
}

let together = false;
function take(found, all = false) {
  answers = found.map((each) => ({ ...each, mask: decoded(each) }));
  answered = steps.at(-1) ?? null;
  together = all;
  picked = 0;
  hovered = null;
  $("hint").hidden = answers.length > 0;
  $("answers-title").textContent = title;
  for (const id of ["save-png", "save-rle"]) $(id).disabled = !answers.length;
  $("undo").disabled = $("clear").disabled = !steps.length && !answers.length;
  $("answers").replaceChildren(...answers.map(card));
  paint();
}

function pick(number) {
  picked = number;
  together = false;
  [...$("answers").querySelectorAll("button")].forEach((button, i) => button.setAttribute("aria-pressed", i === picked));
  paint();
}

/** One predicted mask: a thumbnail and its scores. */
function card(answer, number) {
  const score = answer.predicted_iou ?? answer.confidence, word = answer.confidence === undefined ? "predicted IoU" : "confidence";
  const bar = make("i");
  bar.style.width = `${Math.min(Math.max(score ?? 0, 0), 1) * 100}%`;
  const facts = [answer.stability === undefined ? null : `stability ${answer.stability.toFixed(3)}`, `${percent(answer.area / (picture.width * picture.height))} of the image`];
  const details = score === undefined ? make("div", {}, make("b", {}, `mask ${number + 1}`), make("small", {}, facts[1]))
    : make("div", {}, make("b", {}, score.toFixed(3)), ` ${word}`, make("div", { className: "meter" }, bar), make("small", {}, answer.area ? facts.filter(Boolean).join(" · ") : "empty"));
  if (answer.category !== undefined) details.prepend(make("div", {}, make("b", {}, answer.category), ` ${answer.class_score.toFixed(3)}`));
  const button = make("button", { type: "button", title: "hover to preview, click to choose" }, thumbnail(answer), details);
  button.setAttribute("aria-pressed", number === picked && !together);
  button.onclick = () => pick(number);
  button.onpointerenter = () => { hovered = number; paint(); };
  button.onpointerleave = () => { hovered = null; paint(); };
  return make("li", {}, button);
}

function thumbnail(answer) {
  const scale = Math.min(168 / picture.width, 126 / picture.height);
  const canvas = make("canvas", { width: Math.max(1, Math.round(picture.width * scale)), height: Math.max(1, Math.round(picture.height * scale)) });
  const context = canvas.getContext("2d");
  context.drawImage(picture.bitmap, 0, 0, canvas.width, canvas.height);
  context.fillStyle = "#000a";
  context.fillRect(0, 0, canvas.width, canvas.height);
  const cut = new OffscreenCanvas(picture.width, picture.height), inner = cut.getContext("2d");
  inner.drawImage(drawMasks([answer.mask], [[255, 255, 255]], [picture.height, picture.width], { alpha: 255 }), 0, 0);
  inner.globalCompositeOperation = "source-in";
  inner.drawImage(picture.bitmap, 0, 0);
  context.drawImage(cut, 0, 0, canvas.width, canvas.height);
  return canvas;
}

/** Sets the canvas resolution to that of the screen, but at least that of the image. */
function fit() {
  if (!picture || $("try").hidden) return;
  const canvas = $("canvas"), scale = Math.max(1, (canvas.clientWidth * devicePixelRatio) / picture.width);
  Object.assign(canvas, { width: Math.round(picture.width * scale), height: Math.round(picture.height * scale) });
  paint();
}

function paint() {
  const canvas = $("canvas"), context = canvas.getContext("2d");
  if (!picture) return;
  const unit = picture.width / (canvas.clientWidth || picture.width);  // image pixels per screen pixel
  context.setTransform(canvas.width / picture.width, 0, 0, canvas.height / picture.height, 0, 0);
  context.drawImage(picture.bitmap, 0, 0);
  const chosen = hovered ?? (together ? null : picked), size = [picture.height, picture.width], line = Math.max(1, Math.round(1.5 * unit));
  if (chosen !== null && answers[chosen]) context.drawImage(drawMasks([answers[chosen].mask], [ANSWER], size, { line }), 0, 0);
  else if (together) context.drawImage(drawMasks(answers.map(({ mask }) => mask), answers.map((_, i) => hue(i)), size, { line }), 0, 0);
  drawSteps(context, steps, unit);
  if (drag?.long) drawBox(context, drag.start, drag.now, unit);
}

/** Returns the masks to save: all, or the chosen one. */
const saved = () => answers.filter((_, i) => together || i === picked);

async function savePng() {
  save(await png(saved().map(({ mask }) => mask), [picture.height, picture.width]), `${stem()}_mask.png`);
}

async function saveRle() {
  const annotations = saved().map(({ segmentation, area, box: [x0, y0, x1, y1], predicted_iou, stability, category_id, category, class_score }) => ({
    segmentation, area, bbox: [x0, y0, x1 - x0 + 1, y1 - y0 + 1], predicted_iou, stability_score: stability, category_id, category, class_score,
  }));
  const content = { image: { file_name: picture.name, height: picture.height, width: picture.width }, annotations };
  save(new Blob([JSON.stringify(content)], { type: "application/json" }), `${stem()}_masks.json`);
}

const stem = () => picture.name.replace(/^.*[:/\\]/, "").replace(/\.[a-z]+$/i, "");

function busy(what = false, message = "") {
  $("state").classList.toggle("busy", Boolean(what));
  $("state").textContent = what ? `${what} …` : message;
}

async function samples() {
  const rows = await request(`data/images?count=${SAMPLES}`);
  $("samples").replaceChildren(...rows.map(({ row, name, shows }) => {
    const image = make("img", { src: pictureUrl(`data/images/${row}/thumbnail`, shows), alt: name, loading: "lazy" });
    return make("button", { type: "button", title: name, onclick: withErrorMessages(() => openRow(row)) }, image);
  }));
}
