// The list of images. Only the entries that are seen are drawn, so that it may have many thousands.
import { $, counted, make, pictureUrl, refill } from "./parts.js";

const ENTRY_PX = 50, BEYOND = 8, STILL_MS = 80;   // the height is that of the style sheet
const MARKS = { done: "✓", "in progress": "◐", proposed: "✦", "not begun": "○", damaged: "!" };

let images = [], order = [], current = null, open = () => {};
let drawn = new Map();   // the entries that are drawn, by row
let seen = "", still = 0;

/** Prepares the list; `onOpen(row)` opens an image. */
export function start(onOpen) {
  open = onOpen;
  $("a-images").addEventListener("scroll", draw, { passive: true });
  new ResizeObserver(draw).observe($("a-images"));
}

/** Returns the mean certainty of the proposals of an image. */
export const certainty = ({ open: values }) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** Lists the images in an order: by name, not done first, or least certain first; returns their rows. */
export function list(listed, by) {
  images = listed;
  order = images.map((_, row) => row);
  const rank = { done: 2, "in progress": 0, proposed: 0, damaged: 0, "not begun": 1 };
  const keys = images.map((each) => (by === "open" ? rank[each.status] : by === "uncertain" ? (each.open.length ? certainty(each) : 2) : 0));
  if (by !== "name") order.sort((a, b) => keys[a] - keys[b] || a - b);
  drawn = new Map();
  seen = "";
  draw();
  return order;
}

/** Marks the image that is open, and scrolls the list to it, and nothing around the list. */
export function show(row) {
  const before = current;
  current = row;
  for (const each of [before, row]) update(each);
  const index = order.indexOf(row), list = $("a-images"), top = index * ENTRY_PX;
  if (index < 0 || !list.clientHeight) return;
  list.scrollTop = Math.min(Math.max(list.scrollTop, top + ENTRY_PX - list.clientHeight), top);
  draw();
}

/** Writes again what the list says of an image. */
export function update(row) {
  if (!drawn.has(row)) return;
  const button = drawn.get(row).firstChild, { name, status, objects, open: values, held_out: heldOut, fault } = images[row];
  const slash = name.lastIndexOf("/") + 1;
  const facts = [name.slice(0, slash), status, objects ? counted(objects, "object") : "", values.length ? `certainty ${certainty(images[row]).toFixed(3)}` : "", heldOut ? "held out" : ""].filter(Boolean).join(" · ");
  button.title = fault ?? `${name}: ${facts}`;
  button.lastChild.replaceChildren(make("b", {}, `${MARKS[status]} `), name.slice(slash), make("small", {}, facts));
  button.dataset.status = status;
  button.setAttribute("aria-current", row === current);
  const picture = button.firstChild, address = pictureUrl(`project/images/${row}/thumbnail`, images[row].shows);
  if (picture.dataset.address !== address) { picture.dataset.address = address; if (picture.src) picture.src = address; }
}

function draw() {
  const list = $("a-images"), first = Math.max(Math.floor(list.scrollTop / ENTRY_PX) - BEYOND, 0);
  const last = Math.min(first + Math.ceil(list.clientHeight / ENTRY_PX) + 2 * BEYOND, order.length), now = `${first} ${last}`;
  if (now === seen) return;
  seen = now;
  const rows = order.slice(first, last), before = drawn;
  drawn = new Map(rows.map((row) => [row, before.get(row) ?? entry(row)]));
  for (const row of rows) if (!before.has(row)) update(row);
  list.style.setProperty("--above", `${first * ENTRY_PX}px`);
  list.style.setProperty("--below", `${(order.length - last) * ENTRY_PX}px`);
  refill(list, drawn.values());
  clearTimeout(still);
  still = setTimeout(load, before.size ? STILL_MS : 0);
}

function entry(row) {
  const picture = make("img", { alt: "" }), button = make("button", { type: "button", onclick: () => open(row) }, picture, make("span"));
  picture.onerror = () => { button.classList.add("bad"); };
  picture.onload = () => { button.classList.remove("bad"); };
  button.dataset.key = row;
  return make("li", {}, button);
}

/** Loads the thumbnails once the list has stopped moving. */
function load() {
  for (const item of drawn.values()) {
    const picture = item.firstChild.firstChild;
    if (!picture.src) picture.src = picture.dataset.address;
  }
}
