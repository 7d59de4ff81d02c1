// The stage of Annotate: an image that zooms to the pointer and pans, with objects drawn over it.
// Below is a canvas with the pixels, which has the contrast; above is one with masks and prompts.
import { $, make } from "./parts.js";
import { drawMasks } from "./masks.js";
import { contentBox, share } from "./pointer.js";

const MOST_ZOOM = 40, PIXELS_FROM = 3, SPRITES = 500, SPRITE_PX = 2 ** 26;

let bitmap = null;
let size = { width: 1, height: 1 };
let box = { width: 1, height: 1 };     // of the canvases, in CSS pixels
let view = { scale: 1, x: 0, y: 0 };   // place in the canvas = image * scale + (x, y), in CSS pixels
let ratio = 0;                         // pixels of the device by CSS pixel when the canvases were sized
let fitted = true;                     // whether the view follows the size of the stage
let painters = () => {};
let coming = 0;                        // the frame in which it is drawn next
const sprites = new Map();             // of masks, cropped to their boxes, by key
const drawn = new Set();               // the keys of those that were drawn last
const thumbnails = new Map();          // of objects, by mask and colour

/** Prepares the stage; `paint(context, unit)` draws over the image, in its coordinates. */
export function start(paint) {
  painters = paint;
  const observer = new ResizeObserver(resize);
  observer.observe($("a-marks"));
  // A screen of another scale, or the browser's own zoom, changes the pixels of the device alone.
  try { observer.observe($("a-pixels"), { box: "device-pixel-content-box" }); } catch { addEventListener("resize", resize); }
}

/** Shows an image, or none; its part that is seen stays if it is shown `again` at the same size. */
export function show(shown, info, again = false) {
  bitmap?.close();
  bitmap = shown;
  sprites.clear();
  thumbnails.clear();
  if (!shown) { draw(); return; }
  if (!again || info.width !== size.width || info.height !== size.height) fitted = true;
  size = { width: info.width, height: info.height };
  resize();
}

/** Gives the canvases a pixel for each of the screen. */
function resize() {
  const { width, height } = contentBox($("a-marks"));
  if (!width || !height) return;
  box = { width, height };
  ratio = devicePixelRatio;
  for (const canvas of [$("a-pixels"), $("a-marks")]) {
    const wanted = { width: Math.max(1, Math.round(width * ratio)), height: Math.max(1, Math.round(height * ratio)) };
    if (canvas.width !== wanted.width || canvas.height !== wanted.height) Object.assign(canvas, wanted);
  }
  if (fitted) fit();
  render();   // a canvas of another size is empty
}

export function fit() {
  const { width, height } = box, scale = Math.min(width / size.width, height / size.height) || 1;
  view = { scale, x: (width - size.width * scale) / 2, y: (height - size.height * scale) / 2 };
  fitted = true;
  draw();
}

/** Zooms by a factor about a point of the screen, by default the middle. */
export function zoom(factor, event) {
  const [x, y] = event ? screen(event) : [box.width / 2, box.height / 2];
  const least = Math.min(box.width / size.width, box.height / size.height, 1) / 2;
  const scale = Math.min(Math.max(view.scale * factor, least), MOST_ZOOM), by = scale / view.scale;
  view = { scale, x: x - (x - view.x) * by, y: y - (y - view.y) * by };
  fitted = false;
  draw();
}

/** Shows each pixel of the image as one of the page. */
export const fullSize = (event) => zoom(1 / view.scale, event);

/** Moves the image by CSS pixels. */
export function pan(dx, dy) {
  view = { ...view, x: view.x + dx, y: view.y + dy };
  fitted = false;
  draw();
}

function screen(event) {
  const [across, down] = share($("a-marks"), event);
  return [across * box.width, down * box.height];
}

/** Returns the place under a pointer in image coordinates, in which pixel 0 reaches from 0 to 1. */
export function place(event) {
  const [x, y] = screen(event);
  return [(x - view.x) / view.scale, (y - view.y) / view.scale];
}

/** Returns the pixel under a pointer, limited to the image. */
export function pixel(event) {
  const [x, y] = place(event), limited = (value, end) => Math.min(Math.max(Math.floor(value), 0), end - 1);
  return [limited(x, size.width), limited(y, size.height)];
}

export const inside = (event) => { const [x, y] = place(event); return x >= 0 && y >= 0 && x < size.width && y < size.height; };

/** Returns how much of a page pixel's size an image pixel has, in percent. */
export const percentShown = () => Math.round(100 * view.scale);

/** Draws once in the next frame, however often it is asked to: two fingers move several times in one. */
export function draw() { coming ||= requestAnimationFrame(render); }

function render() {
  cancelAnimationFrame(coming);
  coming = 0;
  if (ratio && devicePixelRatio !== ratio) { resize(); return; }
  const [below, above] = ["a-pixels", "a-marks"].map((id) => $(id).getContext("2d"));
  for (const context of [below, above]) {
    const across = context.canvas.width / box.width, down = context.canvas.height / box.height;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, context.canvas.width, context.canvas.height);
    context.setTransform(view.scale * across, 0, 0, view.scale * down, view.x * across, view.y * down);
    context.imageSmoothingEnabled = view.scale < PIXELS_FROM;
  }
  if (!bitmap) return;
  tidy();
  below.drawImage(bitmap, 0, 0);
  painters(above, 1 / view.scale);
  $("a-zoom").textContent = `${percentShown()} %`;
}

/** Drops pictures of masks that were not drawn last, once there are many or they are large. */
function tidy() {
  let pixels = 0;
  for (const { width, height } of sprites.values()) pixels += width * height;
  if (sprites.size > SPRITES || pixels > SPRITE_PX) for (const key of sprites.keys()) if (!drawn.has(key)) sprites.delete(key);
  drawn.clear();
}

/** Draws a mask; its picture is kept for the next time. */
export function drawMask(context, { mask, segmentation }, colour, { alpha, unit }) {
  if (!mask.width || !mask.height) return;
  const line = Math.max(1, Math.round(1.5 * unit)), key = `${colour}/${alpha}/${line}/${mask.x},${mask.y}/${segmentation.counts}`;
  drawn.add(key);
  if (!sprites.has(key)) {
    sprites.set(key, drawMasks([{ ...mask, x: 0, y: 0 }], [colour], [mask.height, mask.width], { alpha, line }));
  }
  context.drawImage(sprites.get(key), mask.x, mask.y);
}

/** Writes a word at the upper left of a mask. */
export function drawLabel(context, { x, y }, text, unit) {
  context.font = `${12 * unit}px sans-serif`;
  context.textBaseline = "top";
  context.lineWidth = 3 * unit;
  context.strokeStyle = "#000a";
  context.strokeText(text, x, y);
  context.fillStyle = "#fff";
  context.fillText(text, x, y);
}

/** Draws the path of a stroke, or the round brush at its only point. */
export function drawStroke(context, points, radius, erase) {
  context.lineWidth = Math.max(1, 2 * radius);
  context.lineCap = context.lineJoin = "round";
  context.strokeStyle = erase ? "#d55e00aa" : "#009e73aa";
  context.beginPath();
  points.forEach(([x, y], i) => (i ? context.lineTo(x + 0.5, y + 0.5) : context.moveTo(x + 0.5, y + 0.5)));
  if (points.length === 1) context.lineTo(points[0][0] + 0.5, points[0][1] + 0.51);
  context.stroke();
}

/** Draws rings of corners, closed or still open. */
export function drawRings(context, rings, unit, closed) {
  for (const ring of rings) {
    for (const [width, colour] of [[4, "#000a"], [2, "#fff"]]) {
      context.lineWidth = width * unit;
      context.strokeStyle = colour;
      context.beginPath();
      ring.forEach(([x, y], i) => (i ? context.lineTo(x + 0.5, y + 0.5) : context.moveTo(x + 0.5, y + 0.5)));
      if (closed) context.closePath();
      context.stroke();
    }
    context.fillStyle = "#0072b2";
    for (const [x, y] of ring) context.fillRect(x + 0.5 - 4 * unit, y + 0.5 - 4 * unit, 8 * unit, 8 * unit);
  }
}

/** Makes two pointers zoom and pan; returns whether they do. */
export function pinch(pointers, before) {
  if (pointers.size !== 2) return null;
  const [a, b] = pointers.values(), now = { x: (a.clientX + b.clientX) / 2, y: (a.clientY + b.clientY) / 2, far: Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY) || 1 };
  if (before) {
    pan(now.x - before.x, now.y - before.y);
    zoom(now.far / before.far, { clientX: now.x, clientY: now.y });
  }
  return now;
}

/** Sets the contrast and brightness of the pixels, each 1 as stored. */
export function contrast(amount, brightness) {
  $("a-pixels").style.filter = amount === 1 && brightness === 1 ? "" : `contrast(${amount}) brightness(${brightness})`;
}

/** Returns a small picture of an object for the list; it is kept until the image changes. */
export function thumbnail({ id, mask, segmentation }, colour) {
  const key = `${id}/${colour}/${segmentation.counts}`;
  if (!thumbnails.has(key)) {
    if (thumbnails.size > 10 * SPRITES) thumbnails.clear();
    thumbnails.set(key, drawThumbnail(mask, colour));
  }
  return thumbnails.get(key);
}

function drawThumbnail(mask, colour) {
  const canvas = make("canvas", { width: 36, height: 36 }), context = canvas.getContext("2d");
  const side = Math.max(mask.width, mask.height, 12), scale = 36 / side;
  context.setTransform(scale, 0, 0, scale, (36 - mask.width * scale) / 2 - mask.x * scale, (36 - mask.height * scale) / 2 - mask.y * scale);
  if (bitmap) context.drawImage(bitmap, mask.x, mask.y, mask.width || 1, mask.height || 1, mask.x, mask.y, mask.width || 1, mask.height || 1);
  if (mask.width && mask.height) context.drawImage(drawMasks([{ ...mask, x: 0, y: 0 }], [colour], [mask.height, mask.width], { alpha: 90, line: Math.max(1, Math.round(side / 24)) }), mask.x, mask.y);
  return canvas;
}
