// The loop of Annotate: train on what is accepted, let the better model propose masks for the rest,
// accept the certain ones, and see what a mask costs in each round.
import { $, counted, every, make, percent, renew, request, showMessage, withErrorMessages } from "./parts.js";
import { colour, lines, runCharts } from "./charts.js";

const EVERY_MS = 1500, LOST = 20, FEW = 20;   // fewer judged proposals tell nothing

let hooks = null, status = null, images = [], visible = false, before = "", known = null, stale = false, asked = 0;

export function start(given) {
  hooks = given;
  const post = (path, json, run = (work) => work()) => withErrorMessages(async () => {
    try { return await run(() => request(`project/loop/${path}`, { json: json?.() ?? {} })); } finally { await refresh(); }   // whatever came of it
  });
  $("a-train").onclick = post("train", () => ({ minutes: Number($("a-minutes").value) }));
  $("a-propose").onclick = post("propose");
  $("a-stop").onclick = post("stop");
  $("a-model").onchange = post("use", () => ({ model: Number($("a-model").value) }), hooks.apart);   // it may read the pixels otherwise
  $("a-threshold").oninput = count;
  const accept = post("accept", () => ({ threshold: Number($("a-threshold").value) }), hooks.apart);
  $("a-accept-certain").onclick = async () => {
    const done = await accept();
    if (done) showMessage(`${counted(done.accepted, "mask")} accepted`);
  };
  every(EVERY_MS, async () => {
    if (!visible || document.hidden) return;
    if (busy()) await refresh(); else if (stale && status) await judge();
  });
  withErrorMessages(refresh)();
}

export function shown(now) { visible = now; if (now && hooks) withErrorMessages(refresh)(); }

const busy = () => status && (status.training.state === "running" || status.proposing.running);

export async function refresh() {
  stale = false;
  const mine = asked += 1, found = await request("project/loop");
  if (mine !== asked) return;   // a newer one is coming
  status = found;
  const now = JSON.stringify([status.proposing, status.progress]), listed = (now !== before || !images.length) && (await hooks.reload());
  if (listed) [images, before] = [listed, now];
  await train();
  lost();
  propose();
  count();
  draw();
  guide();
}

/** Says that proposals may have been judged; how many were kept is asked soon. */
export function judged() { stale = true; }

async function judge() {
  stale = false;
  const { judged: counts } = await request("project/loop");
  status.judged = counts;
  count();
}

/** Shows the training: its curve while it runs, then what it brought. */
async function train() {
  const { training, rounds, model } = status, { state } = training, last = rounds.at(-1);
  const [{ top }, { bottom }] = ["a-train", "a-training"].map((id) => $(id).getBoundingClientRect());
  const watched = known !== null && known < rounds.length && bottom > 0 && top < innerHeight;
  known = rounds.length;
  $("a-train").disabled = state === "running";
  $("a-train").textContent = state === "stopped" ? "Continue to train" : "Train";
  $("a-stop").hidden = !busy();
  const run = state === "running" && training.run && (await request(`project/loop/run?name=${encodeURIComponent(training.run)}`).catch(() => null));
  $("a-training").textContent = state === "running" ? (run?.step ? (run.step < run.steps ? `training, step ${run.step} of ${run.steps}` : `comparing with the model before, on ${heldOut()}`) : "preparing the training")
    : state === "stopped" ? "the training was stopped; nothing is lost" : state === "failed" ? training.fault : "";
  $("a-training").className = state === "failed" ? "bad" : "state";
  $("a-training").classList.toggle("busy", state === "running");
  $("a-curve").replaceChildren(...(run ? runCharts([run], 0.5).curves.filter(Boolean).slice(0, 2) : []));
  const better = last?.verdict === "better", offered = better || (last?.verdict === "too few to tell" && last.after < last.before), used = model === rounds.length - 1;
  renew($("a-result"), ...(last ? [make("p", { className: better ? "good" : "", title: "mean number of clicks until 90 % of an object's mask is right, at most 20; masks that a model answered and nobody changed are left out" }, `Round ${rounds.length}: ${compared(last)}`),
  used || !offered ? null : make("button", { type: "button", className: better ? "main" : "", onclick: withErrorMessages(async () => { $("a-model").value = rounds.length - 1; await $("a-model").onchange(); }) }, "Use the new model")].filter(Boolean) : []));
  const names = [[-1, status.weights], ...rounds.map(({ after }, i) => [i, `round ${i + 1} (${after.toFixed(1)} clicks)`])];
  $("weights").textContent = names[model + 1][1];   // the page began with the first
  renew($("a-model"), ...names.map(([value, name]) => make("option", { value }, name)));
  $("a-model").value = model;
  if (watched) $("a-result").scrollIntoView({ block: "nearest" });
}

/** Says what a comparison can tell. */
function compared({ before: was, after, verdict, held_out_masks: masks, held_out_images: count, standard_error: error, class_accuracy: accuracy }) {
  const told = { "too few to tell": "Too few to tell which model is better: 20 masks of 5 images can.", better: "The new model is better.", worse: "The new model is worse; keep the other one.", "no difference": "No difference can be told; keep the other one, or annotate more." }[verdict];
  const gain = verdict === "too few to tell" ? "" : `, ${(was - after).toFixed(1)} ± ${error.toFixed(1)} fewer`;
  return `${was.toFixed(1)} → ${after.toFixed(1)} clicks to an IoU of 0.9${gain}, on ${counted(masks, "held-out mask")} of ${counted(count, "image")}${accuracy === null ? "" : `, class accuracy ${accuracy.toFixed(3)}`}. ${told}`;
}

/** Names the images whose annotations cannot be used. */
function lost() {
  const lines = status.unused;
  $("a-lost").hidden = !lines.length;
  $("a-lost-lines").replaceChildren(...lines.slice(0, LOST).map((line) => make("li", {}, line)), ...(lines.length > LOST ? [make("li", {}, `and ${lines.length - LOST} more`)] : []));
}

function heldOut() {
  const count = images.filter(({ truth, held_out: out }) => truth && out).length;
  return counted(count, "held-out image");
}

function propose() {
  const { running, done, total, failed, fault } = status.proposing;
  $("a-propose").disabled = running;
  $("a-proposing").textContent = running ? `image ${done + 1} of ${total}` : total ? `${done - failed} of ${total} images proposed` : "";
  $("a-proposing").classList.toggle("busy", running);
  if (fault) $("a-proposing").textContent += `; ${failed} failed: ${fault}`;
}

/** Shows what follows from the list of images. */
export function show(listed) {
  images = listed;
  if (!status) return;
  count();
  guide();
}

/** Says what to do next, by what is done. */
function guide() {
  const { training, rounds, model, proposing } = status, last = rounds.at(-1), has = (wanted) => images.some(({ status: one }) => one === wanted);
  const usable = images.filter(({ accepted }) => accepted), ready = usable.some(({ held_out: out }) => out) && usable.some(({ held_out: out }) => !out);
  $("a-guide").textContent = training.state === "running" ? "The model is being trained; you can go on annotating."
    : proposing.running ? "The model proposes masks for the rest; you can go on annotating."
    : last?.verdict === "better" && model < rounds.length - 1 ? "Next: use the new model, which needs fewer clicks."
    : has("proposed") ? "Next: order by least certain first, correct the proposals, and accept the certain ones at once."
    : !ready ? first(usable.length)
    : !rounds.length ? "Next: train the model on what is accepted, or annotate more first."
    : !has("not begun") ? "Next: export what is accepted."
    : last.verdict === "better" ? "Next: let the model annotate the rest, or annotate more and train again."
    : last.verdict === "too few to tell" ? "Next: let the model annotate the rest, or annotate more: too few masks are held out to tell which model is better."
    : "Next: annotate more images, then train again for longer; the last round did not help.";
}

/** Says what to do with the open image before the model can be trained. */
function first(begun) {
  const image = hooks.image(), objects = image?.objects ?? [], rest = objects.filter(({ accepted }) => !accepted).length, train = "With two images done, the model can be trained.";
  if (rest && begun) return `Next: accept ${rest === 1 ? "the object" : `the other ${rest} objects`}, then Done (N). ${train}`;
  if (rest) return "Next: correct the object with more clicks, and accept it with Enter.";
  if (objects.length && !image.done) return `Next: annotate what is left in this image, then Done (N). ${train}`;
  const how = matchMedia("(pointer: coarse)").matches ? "tap an object, tap what is not part of it with − points, and accept it." : "click an object, right-click what is not part of it, and accept it with Enter.";
  return `Next: ${image?.done ? "open another image and " : ""}${how}${begun ? ` ${train}` : ""}`;
}

/** Shows how many proposals the threshold accepts. */
function count() {
  const threshold = Number($("a-threshold").value), open = images.flatMap(({ open: values }) => values);
  const enough = open.filter((value) => value >= threshold).length;
  $("a-threshold-value").textContent = threshold.toFixed(2);
  $("a-accept-certain").disabled = !enough;
  $("a-accept-certain").textContent = `Accept ${enough} of ${open.length}`;
  const [judged, kept] = status.judged.slice(Math.round(100 * threshold)).reduce((sum, each) => [sum[0] + each[0], sum[1] + each[1]], [0, 0]);
  $("a-judged").textContent = judged < FEW ? "" : `Of ${judged} such proposals of this model that you judged, you kept ${kept} as they were: ${percent(kept / judged, 0)}.`;
  $("a-certain-part").hidden = !open.length;
  $("a-starter").hidden = status.weights !== "starter" || status.model >= 0;
}

/** Draws what a mask costs in each round, and how the models compare. */
function draw() {
  const rounds = status.progress.filter(({ masks }) => masks), xs = rounds.map(({ round }) => round);
  const curve = (name, value) => lines(name, [{ colour: colour(0), xs, ys: rounds.map(value), dots: true }], { x: "round in use", y: "a mask", zero: true, whole: true });
  const scores = status.rounds.flatMap(({ before: was, after }, i) => (i ? [after] : [was, after]));
  const came = status.progress.filter(({ origins }) => Object.keys(origins).length).map(({ round, origins }) => `${round ? `Round ${round}` : "The first model"}: ${Object.entries(origins).map(([how, number]) => `${number} ${how === "accepted" ? "looked at and accepted" : how === "accepted in bulk" ? "accepted unseen, not counted above" : how}`).join(", ")}`);
  $("a-costs").hidden = !came.length;
  $("a-gain").replaceChildren(...[
    ...(rounds.length > 1 ? [curve("Clicks", ({ clicks, masks }) => clicks / masks), curve("Seconds", ({ seconds, masks }) => seconds / masks)]
      : rounds.map(({ clicks, seconds, masks }) => make("p", { className: "faint" }, `${(clicks / masks).toFixed(1)} clicks and ${(seconds / masks).toFixed(1)} s so far`))),
    ...came.map((line) => make("p", { className: "faint" }, line)),
    scores.length ? lines("Clicks to an IoU of 0.9, held out", [{ colour: colour(2), xs: scores.map((_, i) => i), ys: scores, dots: true }], { x: "round", zero: true, whole: true }) : null,
  ].filter(Boolean));
}
