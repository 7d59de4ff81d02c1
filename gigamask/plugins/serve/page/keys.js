// Which keys are pressed, on any keyboard, and which of them belong to the control that has the focus.

const PLACES = { BracketLeft: "[", BracketRight: "]", Minus: "-", Equal: "=" };
const UNREADABLE = ["Dead", "Process", "Unidentified"];   // what layouts with accents and input methods give
const ARROWS = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End", "PageUp", "PageDown"];

const byAltGr = (event) => event.getModifierState("AltGraph") || (event.ctrlKey && event.altKey);

/** Returns the names that a pressed key may go by, the likeliest first; none for shortcuts of the browser. */
export function namesOf(event) {
  const { key, code } = event, letter = key.length === 1;
  if (byAltGr(event)) return letter ? [key] : [];
  const place = /^Key[A-Z]$/.test(code) ? code.slice(3).toLowerCase() : PLACES[code];
  const printed = UNREADABLE.includes(key) || (letter && key > "~") ? place : letter ? key.toLowerCase() : key;
  if (event.altKey || ((event.ctrlKey || event.metaKey) && !["z", "y"].includes(printed))) return [];
  const digit = !event.shiftKey && /^Digit[0-9]$/.test(code) ? code.slice(5) : null;   // French keyboards print others
  return [digit, printed].filter(Boolean);
}

/** Whether an element takes all keys, as a field for text does. */
export function takesText({ tagName, type, isContentEditable }) {
  if (tagName === "INPUT") return !["checkbox", "radio", "range", "color", "button", "submit"].includes(type);
  return ["SELECT", "TEXTAREA"].includes(tagName) || isContentEditable;
}

/** Whether a key is for the control that has the focus: Enter of a button, an arrow of a slider. */
export function belongsTo({ tagName, type }, key) {
  if (tagName === "BUTTON" || tagName === "A" || type === "color") return ["Enter", " "].includes(key);
  return type === "checkbox" ? key === " " : type === "range" && ARROWS.includes(key);
}
