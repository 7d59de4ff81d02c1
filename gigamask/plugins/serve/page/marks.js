// Draw prompts on a canvas in image coordinates; `unit` is the size of a screen pixel.

/** Returns the box of two pixels, x0 y0 x1 y1. */
export function boxOf(start, now) {
  const [xs, ys] = [0, 1].map((axis) => [start[axis], now[axis]].sort((a, b) => a - b));
  return [xs[0], ys[0], xs[1], ys[1]];
}

/** Draws the prompts of an object. */
export function drawSteps(context, steps, unit) {
  for (const { box } of steps) if (box) outline(context, box, unit, []);
  for (const { point, foreground } of steps) if (point) dot(context, point, foreground, unit);
}

/** Draws the box that is being dragged. */
export const drawBox = (context, from, to, unit) => outline(context, boxOf(from, to), unit, [6 * unit, 4 * unit]);

/** Draws the box of first and last pixels. */
function outline(context, [x0, y0, x1, y1], unit, dashes) {
  context.setLineDash(dashes);
  for (const [width, colour] of [[4, "#0008"], [2, "#fff"]]) {
    context.lineWidth = width * unit;
    context.strokeStyle = colour;
    context.strokeRect(x0, y0, x1 + 1 - x0, y1 + 1 - y0);
  }
  context.setLineDash([]);
}

/** Draws a point: + on the object, - outside it. */
function dot(context, pixel, foreground, unit) {
  const [x, y] = pixel.map((index) => index + 0.5);
  context.beginPath();
  context.arc(x, y, 6 * unit, 0, 7);
  context.fillStyle = foreground ? "#009e73" : "#d55e00";
  context.fill();
  context.lineWidth = 2 * unit;
  context.strokeStyle = "#fff";
  context.stroke();
  context.beginPath();
  context.moveTo(x - 3 * unit, y);
  context.lineTo(x + 3 * unit, y);
  if (foreground) { context.moveTo(x, y - 3 * unit); context.lineTo(x, y + 3 * unit); }
  context.stroke();
}
