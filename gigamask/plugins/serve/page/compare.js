// The second model of Try: its best mask for the same prompts, beside the first one's.
import { $, request } from "./parts.js";
import { decoded, drawMasks } from "./masks.js";

const OTHER = [213, 94, 0];

let other = null;

export function start(about) { other = about.compared; }

/** Shows the second model's mask; none without prompts. */
export async function compare(picture, steps, json, isCurrent) {
  $("compared").hidden = !other || !picture;
  if (!other || !picture) return;
  const mask = steps.length ? await request(`images/${picture.id}/compare`, { json }) : null;
  if (!isCurrent()) return;
  const canvas = $("compared-canvas"), size = [picture.height, picture.width];
  Object.assign(canvas, { width: picture.width, height: picture.height });
  canvas.style.setProperty("--ratio", picture.width / picture.height);
  const context = canvas.getContext("2d");
  context.drawImage(picture.bitmap, 0, 0);
  if (mask) context.drawImage(drawMasks([decoded(mask)], [OTHER], size, { line: Math.max(1, Math.round(picture.width / 500)) }), 0, 0);
  const score = mask ? `, predicted IoU ${mask.predicted_iou.toFixed(3)}` : "";
  $("compared-caption").textContent = `${other}${score} (orange); the first model, ${$("weights").textContent}, is blue`;
}
