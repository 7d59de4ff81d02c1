// The tabs and the theme. Each tab is a module with `start(about)` and `shown(visible)`.
import * as annotate from "./annotate.js";
import * as data from "./data.js";
import * as runs from "./runs.js";
import * as trying from "./try.js";
import { $, request, showsProject, withErrorMessages } from "./parts.js";

const tabs = { annotate, try: trying, data, runs };
let given = {};   // which tabs the server has something for

function show() {
  const wanted = given[location.hash.slice(1)] === true ? location.hash.slice(1) : first;
  for (const [name, tab] of Object.entries(tabs)) {
    const visible = name === wanted;
    $(name).hidden = !visible;
    const link = document.querySelector(`nav [data-tab=${name}]`);
    if (visible) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
    tab.shown(visible);
  }
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* storage is disabled */ }
}

let first = "try";
try {
  const kept = localStorage.getItem("theme");
  if (kept) document.documentElement.dataset.theme = kept;
} catch { /* storage is disabled */ }
$("theme").onclick = theme;
$("gone-reload").onclick = () => location.reload();
withErrorMessages(async () => {
  const about = await request("about");
  showsProject(about.project);
  $("weights").textContent = about.weights ?? "";
  given = { annotate: about.project !== null, try: about.weights !== null, data: about.data !== null, runs: about.runs };
  first = Object.keys(given).find((name) => given[name]) ?? "try";
  for (const name of Object.keys(tabs)) {
    document.querySelector(`nav [data-tab=${name}]`).hidden = !given[name];
    if (given[name]) tabs[name].start(about);
  }
  addEventListener("hashchange", show);
  show();
})();
