// One queue for what a person does: each action begins when those before it have ended, so that
// nothing is lost however fast they are typed, and none sees a state that is about to change.

const waiting = [];
let running = null, changed = () => {}, failed = () => {};

/** Prepares the queue: `onChange` when it moves on, `onFailure(error, dropped)` when an action fails. */
export function start(onChange, onFailure) { [changed, failed] = [onChange, onFailure]; }

/** Returns what the action that runs is called, "" if none runs or it needs no name. */
export const label = () => running?.name ?? "";

/** Whether an action runs or waits. */
export const busy = () => running !== null;

/** Runs an action in its turn. If it fails, those that wait are dropped: they were meant for what it would have done. */
export function enqueue(name, work) {
  return new Promise((resolve) => {
    waiting.push({ name, work, resolve });
    if (!running) next();
  });
}

async function next() {
  running = waiting.shift() ?? null;
  changed();
  if (!running) return;
  const { work, resolve } = running;
  try {
    resolve(await work());
  } catch (error) {
    const dropped = waiting.splice(0);
    for (const each of [running, ...dropped]) each.resolve();
    failed(error, dropped.filter(({ name }) => name).length);
  }
  next();
}
