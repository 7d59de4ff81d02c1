// Helpers of all tabs: elements, requests to the server, messages, number formats, saving files.

export const $ = (id) => document.getElementById(id);

/** Creates an element: `make("b", {className: "x", onclick: f}, "text", child)`. Text is never parsed as HTML. */
export function make(name, attributes = {}, ...children) {
  const element = Object.assign(document.createElement(name), attributes);
  element.append(...children.filter((child) => child != null));
  return element;
}

/** Returns the address of a route, below that of the page, wherever a proxy puts it. */
export const url = (path) => new URL(`../api/${path}`, import.meta.url).href;

/** Returns the address of a picture, with the version that a listing stated: browsers keep what an address showed. */
export const pictureUrl = (path, shows) => url(`${path}${path.includes("?") ? "&" : "?"}shows=${shows}`);

let served = null;     // the project that this page shows; another may be served at its address later
export const showsProject = (identity) => { served = identity; };

/** Sends a request to the server and returns its JSON; throws an Error with the server's message. `pixels` is the picture that it is about. */
export async function request(path, { body, json, pixels } = {}) {
  const posted = body !== undefined || json !== undefined;
  const headers = json !== undefined ? { "content-type": "application/json" } : body?.type ? { "content-type": body.type } : {};
  if (pixels) headers["x-pixels"] = pixels;
  return (await answer(url(path), { method: posted ? "POST" : "GET", body: json !== undefined ? JSON.stringify(json) : body, headers })).json();
}

/** Returns a file of the server. */
export const download = async (path) => (await answer(url(path))).blob();

/** Loads a picture as a bitmap. */
export async function loadPicture(path, shows) {
  return createImageBitmap(await (await answer(pictureUrl(path, shows))).blob());
}

async function answer(address, { headers = {}, ...options } = {}) {
  let response;
  try {
    response = await fetch(address, { ...options, headers: served ? { ...headers, "x-project": served } : headers });
  } catch {
    throw new Error("the server does not respond; is 'gigamask serve' still running?");
  }
  if (response.ok) return response;
  const text = await response.text();
  let message = text || response.statusText;
  try { message = JSON.parse(text).error ?? message; } catch { /* plain text */ }
  if (response.status === 410) $("gone").hidden = false;
  throw Object.assign(new Error(message), { status: response.status });
}

let hiding;
/** Shows a message at the bottom of the page for a while. */
export function showMessage(line) {
  const toast = $("toast");
  toast.textContent = line instanceof Error ? line.message : line;
  toast.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => { toast.hidden = true; }, 6000);
}

/** Wraps a function so that its errors are shown as messages. */
export const withErrorMessages = (work) => async (...given) => {
  try { return await work(...given); } catch (error) { showMessage(error); }
};

/** Does something again and again, each time so long after the last time has ended. */
export function every(milliseconds, work) {
  setTimeout(async () => { await withErrorMessages(work)(); every(milliseconds, work); }, milliseconds);
}

/** Replaces the entries of a list; a button that has the focus keeps it, by its `data-key`. */
export function refill(list, entries) {
  const focused = document.activeElement, key = list.contains(focused) ? focused.dataset.key : undefined;
  list.replaceChildren(...entries);
  if (key !== undefined) list.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}

/** Replaces what an element shows if it is not the same already: a list that is open, a focus and a click stay. */
export function renew(element, ...children) {
  const now = children.map(({ outerHTML }) => outerHTML).join("");
  if (element.innerHTML !== now) element.replaceChildren(...children);
}

/** Scrolls a list, and nothing around it, to its pressed button. */
export function showChosen(list) {
  const [around, button] = [list, list.querySelector("[aria-pressed=true]")].map((each) => each?.getBoundingClientRect());
  if (button) list.scrollTop += Math.min(0, button.top - around.top) + Math.max(0, button.bottom - around.bottom);
}

/** How often each class is the likeliest of masks, as words; empty without classes. */
export function classCounts(masks) {
  const counts = new Map();
  for (const { category } of masks) if (category !== undefined) counts.set(category, (counts.get(category) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]).map(([name, number]) => `${number} ${name}`).join(", ");
}

export const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
export const count = (number) => number.toLocaleString("en");
export const counted = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

export function bytes(number) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) { number /= 1000; unit += 1; }
  return `${number >= 100 || !unit ? Math.round(number) : number.toPrecision(3)} ${units[unit]}`;
}

/** Downloads a file in the browser. */
export function save(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
