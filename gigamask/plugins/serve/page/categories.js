// The categories of a project: choose one for new objects, add, rename, merge, recolour and delete.
import * as queue from "./queue.js";
import { $, counted, make, refill, request, showChosen, showMessage, withErrorMessages } from "./parts.js";

const COLORS = ["#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#000000"];   // Okabe and Ito's

let categories = [], category = "", hooks = null, editing = null;
let coming = null;   // a category that is chosen before the server knows it
let asked = 0, taken = 0;   // lists that were asked for so far, and the last of those that are too old to be taken

/** Prepares the categories; the hooks are `images`, `act`, `apart`, `send` and `active`. */
export function start(given) {
  hooks = given;
  $("a-add-category").onsubmit = withErrorMessages(submit);
  $("a-edit-category").onclick = () => edit(editing === category ? null : category);
  $("a-delete-category").onclick = withErrorMessages(remove);
  $("a-new-category").oninput = say;
}

/** Returns what takes the categories of a list that is asked for now, unless newer ones come before it. */
export function taker() {
  const mine = asked += 1;
  return (found) => { if (mine > taken) { taken = mine; take(found); } };
}

/** Returns the answer to a change of the categories; lists that were asked for before are older. */
async function changed(path, json) {
  const answer = await request(path, { json });
  taken = asked;
  return answer;
}

function take(found) {
  categories = found;
  if (category !== coming && !categories.some(({ name }) => name === category)) category = categories[0].name;
  if (editing !== null && !categories.some(({ name }) => name === editing)) edit(null);
  list();
}

/** Returns the category of new objects. */
export const chosen = () => category;

/** Returns the colour of a category as red, green and blue; null for the only one. */
export function colour(name) {
  const { color } = categories.length > 1 ? categories.find((each) => each.name === name) ?? {} : {};
  return color ? [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)) : null;
}

/** Returns the action of a digit: the category of that number. */
export const atKey = (digit) => categories[digit - 1] && (() => categorize(categories[digit - 1].name));

function list() {
  refill($("a-categories"), categories.map(({ name, color }, i) => {
    const button = make("button", { type: "button", title: `for new objects and the selected one${i < 9 ? ` (${i + 1})` : ""}`, onclick: () => categorize(name) }, make("i"), name);
    button.firstChild.style.background = color;
    button.setAttribute("aria-pressed", name === category);
    button.dataset.key = name;
    return button;
  }));
}

function categorize(name) {
  category = name;
  list();
  showChosen($("a-categories"));
  if (editing !== null) edit(name);
  const quiet = hooks.active() === null;   // it may be meant for new objects alone
  if (!quiet || queue.busy()) hooks.act(() => hooks.active() !== null && hooks.send("assign", { objects: [hooks.active()], category: name }), quiet);
}

/** Adds a category, or saves the one that is edited. */
async function submit(event) {
  event.preventDefault();
  const name = $("a-new-category").value.trim(), color = $("a-color").value, old = editing;
  if (!name) return;
  $("a-new-category").value = "";
  $("a-marks").focus({ preventScroll: true });
  if (old !== null) { await change({ name: old, new_name: name, color }); return; }
  const before = category, known = categories.some((each) => each.name === name);
  $("a-color").value = COLORS[(COLORS.indexOf(color) + 1) % COLORS.length];   // of the next one
  const added = known || queue.enqueue("saving", async () => { take((await changed("project/categories", { categories: [{ name, color }] })).categories); return true; });
  categorize(name);
  await awaited(name, before, added);
}

/** Keeps a category chosen that the server knows only after a request: what is drawn meanwhile is sent after that. */
async function awaited(name, before, work) {
  coming = name;
  const done = await work;
  if (coming === name) coming = null;
  if (!done && category === name) category = before;
  list();
  return done;
}

async function remove() {
  const name = editing, rest = categories.find((each) => each.name !== name), { objects } = touched(name);
  if (!rest) { showMessage("the only category cannot be deleted; rename it"); return; }
  if (objects && !confirm(`${words(name)} would become ${rest.name}. Delete ${name}?`)) return;
  await change({ name, new_name: rest.name, color: rest.color });
}

async function change(json) {
  edit(null);
  const before = category;
  category = json.new_name;
  const done = await awaited(category, before, hooks.apart(() => changed("project/categories/change", json)));
  if (done) showMessage(`${counted(done.objects, "object")} in ${counted(done.images, "image")} changed`);
}

/** Begins to edit a category, or ends it. */
function edit(name) {
  editing = name;
  const one = categories.find((each) => each.name === name);
  $("a-new-category").value = one?.name ?? "";
  if (one) $("a-color").value = one.color;
  $("a-save-category").textContent = one ? "Save" : "Add";
  $("a-edit-category").setAttribute("aria-pressed", Boolean(one));
  $("a-delete-category").hidden = !one;
  if (one) $("a-new-category").focus();
  say();
}

/** Says how much the change of a category touches. */
function say() {
  const name = $("a-new-category").value.trim(), merges = editing !== null && name !== editing && categories.some((each) => each.name === name);
  $("a-category-note").textContent = editing === null ? "" : `${editing}: ${words(editing)}${merges ? `; merges with ${name}, which cannot be undone` : ""}`;
}

function touched(name) {
  const counts = hooks.images().map(({ categories: named }) => (named && Object.hasOwn(named, name) ? named[name] : 0));
  return { objects: counts.reduce((sum, each) => sum + each, 0), images: counts.filter(Boolean).length };
}

function words(name) {
  const { objects, images } = touched(name);
  return `${counted(objects, "object")} in ${counted(images, "image")}`;
}
