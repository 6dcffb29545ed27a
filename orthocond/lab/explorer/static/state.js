// What the person has chosen: in one object, in the address of the page, and undone step by step.

const START = { seed: 0, samples: 1, truncation: 1, mode: "add", tool: "walk", heat: false, kind: "", picked: 0, across: 0, down: 1,
  values: {}, names: {}, region: null };

const encode = (state) => {
  const changed = Object.fromEntries(Object.entries(state).filter(([k, v]) => JSON.stringify(v) !== JSON.stringify(START[k])));
  return btoa(unescape(encodeURIComponent(JSON.stringify(changed)))).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
};

function decode(text) {
  try {
    const found = JSON.parse(decodeURIComponent(escape(atob(text.replace(/-/g, "+").replace(/_/g, "/")))));
    const fits = (k, v) => k in START && (START[k] === null || typeof v === typeof START[k]);
    return { ...structuredClone(START), ...Object.fromEntries(Object.entries(found).filter(([k, v]) => fits(k, v))) };
  } catch {
    return null;
  }
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
