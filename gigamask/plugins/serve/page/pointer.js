// Where a pointer is on what an element shows: the one place that turns a pointer into a place of a picture.

/** Returns the box of an element's content in the page, inside its border and padding, in CSS pixels. */
export function contentBox(element) {
  const box = element.getBoundingClientRect(), style = getComputedStyle(element);
  const inset = (side) => parseFloat(style[`border${side}Width`]) + parseFloat(style[`padding${side}`]);
  const [left, top] = [inset("Left"), inset("Top")];
  return { x: box.left + left, y: box.top + top, width: box.width - left - inset("Right"), height: box.height - top - inset("Bottom") };
}

/** Returns how far a pointer is across and down the content of an element, each 0 to 1 within it. */
export function share(element, { clientX, clientY }) {
  const box = contentBox(element);
  return [(clientX - box.x) / (box.width || 1), (clientY - box.y) / (box.height || 1)];
}

/** Returns the pixel of a picture of `size` [width, height] that fills an element, limited to the picture. */
export function pixelOf(element, event, size) {
  return share(element, event).map((part, axis) => Math.min(Math.max(Math.floor(part * size[axis]), 0), size[axis] - 1));
}
