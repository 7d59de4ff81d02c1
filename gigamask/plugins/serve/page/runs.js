// Runs: curves, predictions, checkpoints and events of one run or two, refreshed while they train.
import { $, bytes, count, every, make, pictureUrl, renew, request, showMessage, withErrorMessages } from "./parts.js";
import { runCharts, short, zoomable } from "./charts.js";

const EVERY_MS = 2000;

let visible = false, started = false, held = [null, null], shownJson = ["", ""], verified = new Map();

export function start() { every(EVERY_MS, async () => { if (visible && !document.hidden) await refresh(); }); }

export function shown(now) {
  visible = now;
  if (now && !started) { started = true; withErrorMessages(begin)(); }
}

async function begin() {
  $("run-a").onchange = $("run-b").onchange = withErrorMessages(async () => { shownJson = ["", ""]; await refresh(); });
  $("smooth").oninput = draw;
  $("picture-slide").oninput = pictures;
  await refresh();
}

const chosen = () => [$("run-a").value, $("run-b").value];

async function refresh() {
  const runs = await request("runs");
  list(runs);
  const names = chosen();
  const found = await Promise.all(names.map((name) => (name ? request(`runs/run?name=${encodeURIComponent(name)}`) : null)));
  if (String(names) !== String(chosen())) return;
  const now = found.map((run) => JSON.stringify(run));
  if (now[0] === shownJson[0] && now[1] === shownJson[1]) return;
  shownJson = now;
  held = found;
  draw();
  facts();
  checkpoints();
  faults();
  framed();
  await differences();
}

/** Updates the two selections when runs have been added or removed. */
function list(runs) {
  const before = chosen(), label = ({ name, step, steps, live, fault }) => `${live ? "● " : ""}${name} (${count(step)}${steps ? ` of ${count(steps)}` : ""}${fault ? ", damaged" : ""})`;
  const filled = (select, none) => {
    const options = runs.map((run) => make("option", { value: run.name }, label(run)));
    if (none) options.unshift(make("option", { value: "" }, "none"));
    renew(select, ...options);
  };
  filled($("run-a"), !runs.length);
  filled($("run-b"), true);
  $("run-a").value = runs.some(({ name }) => name === before[0]) ? before[0] : runs[0]?.name ?? "";
  $("run-b").value = runs.some(({ name }) => name === before[1]) ? before[1] : "";
  if (!runs.length) $("run-facts").textContent = "No runs yet; a run appears as soon as it starts.";
}

function draw() {
  const { curves, scores } = runCharts(held.filter(Boolean), Number($("smooth").value));
  $("curves").replaceChildren(...[...scores, ...curves].filter(Boolean));
}

function facts() {
  $("live").hidden = !held.some((run) => run?.live);
  $("run-facts").textContent = held.filter(Boolean).map((run) => {
    const steps = run.event_counts.skipped_step ?? 0, samples = run.event_counts.skipped_sample ?? 0, resumed = run.event_counts.resumed ?? 0;
    const left = run.live && run.images_per_s && run.steps ? eta(run) : null;
    return [`${run.name}: ${run.recipe ?? "?"}, step ${count(run.step)}${run.steps ? ` of ${count(run.steps)}` : ""}`,
      run.images_per_s ? `${short(run.images_per_s)} images/s` : null, left, `${steps} steps skipped`, `${samples} samples skipped as unreadable`, resumed ? `resumed ${resumed} times` : null, run.fault ? `damaged and left out: ${run.fault}` : null].filter(Boolean).join(", ");
  }).join(" · ");
}

/** Estimates the remaining time of a run in training. */
function eta({ batch_size, steps, step, images_per_s: speed }) {
  const images = Number(batch_size); // a line of config.yaml
  if (!(images > 0)) return null;
  const minutes = ((steps - step) * images) / speed / 60;
  return minutes > 90 ? `about ${(minutes / 60).toFixed(1)} h left` : `about ${Math.ceil(minutes)} min left`;
}

function framed() {
  const made = held.map((run) => run?.pictures.filter(({ step }) => step !== null) ?? []);
  const steps = [...new Set(made.flat().map(({ step }) => step))].sort((a, b) => a - b), slide = $("picture-slide");
  $("pictures-part").hidden = !steps.length;
  const end = slide.value === slide.max;
  slide.max = Math.max(steps.length - 1, 0);
  if (end) slide.value = slide.max;
  slide.steps = steps;
  pictures();
}

function pictures() {
  const steps = $("picture-slide").steps ?? [], step = steps[$("picture-slide").value];
  if (step === undefined) return;
  $("picture-step").textContent = `step ${count(step)}`;
  const images = held.map((run) => {
    const before = run?.pictures.filter((each) => each.step !== null && each.step <= step).at(-1);
    return before && { src: pictureUrl(`runs/picture?name=${encodeURIComponent(run.name)}&file=${encodeURIComponent(before.name)}`, before.shows), alt: `${run.name} at step ${before.step}` };
  }).filter(Boolean);
  const there = [...$("pictures").children].map((image) => image.getAttribute("src"));
  if (String(there) !== String(images.map(({ src }) => src))) $("pictures").replaceChildren(...images.map((image) => zoomable(make("img", image))));
}

function checkpoints() {
  const runs = held.filter(Boolean), rows = runs.flatMap((run) => run.checkpoints.map((each) => row(run, each, runs.length > 1)));
  const head = [...(runs.length > 1 ? ["run"] : []), "checkpoint", "size", "score", "written", "checksums"];
  $("checkpoints").replaceChildren(rows.length ? make("div", { className: "wide" }, make("table", {}, make("tr", {}, ...head.map((name) => make("th", {}, name))), ...rows)) : make("p", { className: "faint" }, "no checkpoints yet"));
}

function row(run, each, several) {
  const cell = make("td"), key = `${run.name} ${each.name}`;
  const result = (fault) => cell.replaceChildren(fault ? make("span", { className: "bad", title: fault }, "damaged") : make("span", { className: "good" }, "intact"));
  if (each.fault) result(each.fault);
  else if (verified.has(key)) result(verified.get(key));
  else {
    const button = make("button", { type: "button", title: "read the whole checkpoint and compare its checksums" }, "verify");
    button.onclick = withErrorMessages(async () => {
      button.disabled = true;
      button.textContent = "reading …";
      try {
        const { fault } = await request(`runs/verify?name=${encodeURIComponent(run.name)}&step=${each.step}`, { json: {} });
        verified.set(key, fault);
        result(fault);
        if (fault) showMessage(fault);
      } catch (error) { button.disabled = false; button.textContent = "verify"; throw error; }
    });
    cell.append(button);
  }
  const cells = [`step ${count(each.step)}${each.best ? " ★ best" : ""}`, bytes(each.bytes), each.score === null ? "" : short(each.score), new Date(each.written).toLocaleString()];
  return make("tr", {}, ...(several ? [make("td", {}, run.name)] : []), ...cells.map((text) => make("td", {}, text)), cell);
}

function faults() {
  const describe = { skipped_sample: (each) => `unreadable sample skipped: ${each.reason ?? each.skipped_sample}`, skipped_step: (each) => `step skipped: ${each.skipped_step}`, resumed: (each) => `resumed from step ${each.step ?? "?"} after reaching ${each.reached}`,
    corrupt_checkpoints: (each) => `damaged checkpoint ignored: ${each.checkpoint}`, save_failed: (each) => `checkpoint not saved: ${each.save_failed}`, leak: (each) => `memory leak: ${JSON.stringify(each.leak)}` };
  const found = held.filter(Boolean).flatMap((run) => Object.entries(run.faults).flatMap(([kind, events]) => events.map((each) => ({ step: each.step ?? 0, line: `${held[1] ? `${run.name}: ` : ""}step ${each.step ?? "?"}: ${describe[kind]?.(each) ?? kind}` }))));
  $("faults-part").hidden = !found.length;
  $("faults").replaceChildren(...found.sort((a, b) => a.step - b.step).map(({ line }) => make("li", {}, line)));
}

async function differences() {
  const [one, other] = held;
  $("differences-part").hidden = !(one && other);
  if (!(one && other)) return;
  const found = await request(`runs/differences?one=${encodeURIComponent(one.name)}&other=${encodeURIComponent(other.name)}`);
  const text = (value) => (value == null ? "" : String(value));
  $("differences").replaceChildren(found.length
    ? make("table", {}, make("tr", {}, ...["flag", one.name, other.name].map((name) => make("th", {}, name))), ...found.map((each) => make("tr", {}, ...[each.flag, text(each.one), text(each.other)].map((value) => make("td", {}, value)))))
    : make("p", { className: "faint" }, "none"));
}
