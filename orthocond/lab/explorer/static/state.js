// What the person has chosen: in one object, in the address of the page, and undone step by step.

const REACH = 4, MOST_PANELS = 6;  // ends of a slider in sigma; pictures side by side
const START = { seed: 0, samples: 1, truncation: 1, mode: "add", tool: "walk", heat: false, panels: [], active: 0, picked: 0, across: 0,
  down: 1, values: {}, names: {}, region: null, loaded: [] };

const isObject = (v) => v !== null && typeof v === "object" && !Array.isArray(v);
const isIndex = (v) => Number.isInteger(v) && v >= 0 && v < 10000;
const everyValue = (v, test) => isObject(v) && Object.values(v).every(test);
const FITS = {
  seed: (v) => Number.isInteger(v) && v >= 0 && v <= 999999,
  samples: (v) => [1, 4, 9].includes(v),
  truncation: (v) => Number.isFinite(v) && v >= 0 && v <= 1.5,
  mode: (v) => ["add", "set"].includes(v),
  tool: (v) => ["walk", "region"].includes(v),
  heat: (v) => typeof v === "boolean",
  panels: (v) => Array.isArray(v) && v.length <= MOST_PANELS && v.every((p) => isObject(p) && isIndex(p.model) && typeof p.kind === "string"),
  active: isIndex, picked: isIndex, across: isIndex, down: isIndex,
  values: (v) => everyValue(v, (row) => Array.isArray(row) && row.every((x) => x === null || (Number.isFinite(x) && Math.abs(x) <= REACH))),
  names: (v) => everyValue(v, (row) => everyValue(row, (name) => typeof name === "string")),
  region: (v) => v === null || (isObject(v) && FITS.seed(v.seed) && Array.isArray(v.box) && v.box.length === 4
    && v.box.every((x) => Number.isFinite(x) && x >= 0 && x <= 1) && v.box[0] < v.box[2] && v.box[1] < v.box[3]),
  loaded: (v) => Array.isArray(v) && v.every((k) => isObject(k) && typeof k.kind === "string" && k.kind.startsWith("file:") && typeof k.title === "string"
    && areDirections(k.directions) && k.directions.every((d) => typeof d.name === "string" && !d.scores && !d.factors) && areGroups(k.ties, k.directions.length)),
};

// What Directions in Python takes: rows of length 1, at most as many as they have numbers, with sizes that are not negative.
const isSize = (v) => v == null || (Number.isFinite(v) && v >= 0);
const areDirections = (rows) => Array.isArray(rows) && rows.length > 0 && rows.every((d) => isObject(d) && Array.isArray(d.vector)
  && d.vector.length === rows[0].vector.length && d.vector.every(Number.isFinite) && Math.abs(Math.sqrt(dot(d.vector, d.vector)) - 1) <= 1e-3
  && isSize(d.importance) && isSize(d.effect)) && rows.length <= rows[0].vector.length;

// Whether these are groups of directions that tie: two or more of them, each in one group only.
function areGroups(ties, count) {
  return Array.isArray(ties) && ties.every((group) => Array.isArray(group) && group.length > 1 && group.every((i) => Number.isInteger(i) && i >= 0 && i < count))
    && new Set(ties.flat()).size === ties.flat().length;
}

const encode = (state) => {
  const changed = Object.fromEntries(Object.entries(state).filter(([k, v]) => JSON.stringify(v) !== JSON.stringify(START[k])));
  return btoa(unescape(encodeURIComponent(JSON.stringify(changed)))).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
};

// The state in an address; what is damaged or of another page is as at the start.
function decode(text) {
  let found = {};
  try { found = JSON.parse(decodeURIComponent(escape(atob(text.replace(/-/g, "+").replace(/_/g, "/"))))); } catch { /* no address of ours */ }
  const known = isObject(found) ? Object.entries(found).filter(([k, v]) => Object.hasOwn(FITS, k) && FITS[k](v)) : [];
  return { ...structuredClone(START), ...Object.fromEntries(known) };
}

class History {
  constructor(state) { this.past = []; this.now = JSON.stringify(state); }
  record(state) {
    const text = JSON.stringify(state);
    if (text === this.now) return;
    this.past.push(this.now); this.now = text;
    if (this.past.length > 200) this.past.shift();
  }
  undo() {
    if (!this.past.length) return null;
    this.now = this.past.pop();
    return JSON.parse(this.now);
  }
}
