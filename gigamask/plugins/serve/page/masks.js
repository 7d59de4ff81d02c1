// Decode COCO RLE masks (column-major run lengths as text) and draw them.

/** Decodes COCO's compressed counts to run lengths (rleFrString of pycocotools' maskApi.c). */
export function lengths(counts) {
  const found = [];
  let at = 0;
  while (at < counts.length) {
    let value = 0, shift = 0, more = true;
    while (more) {
      const digit = counts.charCodeAt(at) - 48;
      value |= (digit & 31) << shift;
      more = (digit & 32) !== 0;
      at += 1;
      shift += 5;
      if (!more && digit & 16) value |= -1 << shift;
    }
    if (found.length > 2) value += found[found.length - 2];
    found.push(value);
  }
  return found;
}

/** Decodes a mask, cropped to its box, to `{x, y, width, height, data}` with one byte per pixel, row by row, 1 inside. */
export function decoded({ segmentation: { size: [high], counts }, box: [x0, y0, x1, y1] }) {
  const width = Math.max(x1 - x0 + 1, 0), height = Math.max(y1 - y0 + 1, 0), data = new Uint8Array(width * height);
  let at = 0, inside = false;
  for (const length of lengths(counts)) {
    const end = at + length;
    while (inside && at < end) {
      const x = Math.floor(at / high), stop = Math.min(end, (x + 1) * high);
      for (let y = at - x * high; y < stop - x * high; y += 1) data[(y - y0) * width + x - x0] = 1;
      at = stop;
    }
    at = end;
    inside = !inside;
  }
  return { x: x0, y: y0, width, height, data };
}

/** Whether a pixel is inside a mask. */
export function contains({ x: x0, y: y0, width, height, data }, x, y) {
  return x >= x0 && y >= y0 && x < x0 + width && y < y0 + height && data[(y - y0) * width + x - x0] === 1;
}

/** Draws masks in colours `[r, g, b]` on a new canvas, later ones on top, with an outline of `line` pixels. */
export function drawMasks(masks, colours, [height, width], { alpha = 120, line = 1 } = {}) {
  const canvas = new OffscreenCanvas(width, height), context = canvas.getContext("2d");
  const image = context.createImageData(width, height), out = new Uint32Array(image.data.buffer);
  masks.forEach(({ x: x0, y: y0, width: wide, height: high, data }, number) => {
    const [r, g, b] = colours[number];
    const fill = (alpha << 24) | (b << 16) | (g << 8) | r, edge = (0xff << 24) | (b << 16) | (g << 8) | r;
    for (let y = 0; y < high; y += 1) {
      for (let x = 0; x < wide; x += 1) {
        const i = y * wide + x;
        if (!data[i]) continue;
        const border = x < line || y < line || x >= wide - line || y >= high - line
          || !data[i - line] || !data[i + line] || !data[i - line * wide] || !data[i + line * wide];
        out[(y + y0) * width + x + x0] = border ? edge : fill;
      }
    }
  });
  context.putImageData(image, 0, 0);
  return canvas;
}

/** Returns masks as a PNG, white on black. */
export async function png(masks, [height, width]) {
  const canvas = new OffscreenCanvas(width, height), context = canvas.getContext("2d");
  const image = context.createImageData(width, height), out = new Uint32Array(image.data.buffer).fill(0xff000000);
  for (const { x: x0, y: y0, width: wide, data } of masks) data.forEach((inside, i) => {
    if (inside) out[(y0 + Math.floor(i / wide)) * width + x0 + (i % wide)] = 0xffffffff;
  });
  context.putImageData(image, 0, 0);
  return canvas.convertToBlob({ type: "image/png" });
}

/** A colour for each number, distinct from its neighbours: golden-angle steps around the colour wheel. */
export function hue(number) {
  return hsl((number * 137.508) % 360, 75, number % 2 ? 48 : 60);
}

/** A colour for a value from 0 to 1, approximately viridis. */
export function ramp(share) {
  const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1), low = Math.min(Math.floor(place), stops.length - 2);
  return stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * (place - low)));
}

function hsl(h, s, l) {
  const a = (s / 100) * Math.min(l / 100, 1 - l / 100);
  return [0, 8, 4].map((n) => {
    const k = (n + h / 30) % 12;
    return Math.round(255 * (l / 100 - a * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  });
}
