// Files: pictures, animations, directions.

const FRAMES = 16;

function download(name, blob) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  say(`Saved ${name}.`);
}

const fileName = (end) => `${modelOf(active()).name.replace(/[^\w.-]+/g, "-")}-seed${state.seed}${end}`;

// Canvases as one, side by side or below each other.
function joined(canvases, beside) {
  const whole = document.createElement("canvas"), sum = (key) => canvases.reduce((s, c) => s + c[key], 0), most = (key) => Math.max(...canvases.map((c) => c[key]));
  whole.width = beside ? sum("width") : most("width"); whole.height = beside ? most("height") : sum("height");
  let at = 0;
  for (const c of canvases) { whole.getContext("2d").drawImage(c, beside ? at : 0, beside ? 0 : at); at += beside ? c.width : c.height; }
  return whole;
}

const png = (canvas) => new Promise((resolve) => canvas.toBlob(resolve, "image/png"));

// There and back along the chosen direction, all panels side by side.
async function animation() {
  const { GIFEncoder, quantize, applyPalette } = await imported("gifenc");
  const there = [...Array(FRAMES).keys()], encoder = GIFEncoder(), batches = [];
  for (const panel of state.panels) {
    batches.push(await modelOf(panel).images(there.map((i) => latentOf(panel, 0, { [state.picked]: (6 * i) / (FRAMES - 1) - 3 }))));
  }
  for (const i of [...there, ...there.slice(1, -1).reverse()]) {
    const frame = joined(batches.map((batch) => {
      const canvas = document.createElement("canvas");
      draw(canvas, { ...batch, count: 1, data: batch.data.subarray(i * batch.length, (i + 1) * batch.length) }, 1, 256);
      return canvas;
    }), true);
    const { data } = frame.getContext("2d").getImageData(0, 0, frame.width, frame.height);
    const palette = quantize(data, 256);
    encoder.writeFrame(applyPalette(data, palette), frame.width, frame.height, { palette, delay: 60 });
  }
  encoder.finish();
  return new Blob([encoder.bytes()], { type: "image/gif" });
}

// The directions of the active panel, as Directions.load in Python reads them.
function directionsFile() {
  const panel = active(), kind = kindOf(panel);
  const directions = kind.directions.map((d, i) => ({ name: nameOf(panel, i), vector: [...d.vector], importance: d.importance ?? 0,
    ...(d.effect == null ? {} : { effect: d.effect }) }));
  return new Blob([JSON.stringify({ z_dim: modelOf(panel).size, kind: kind.kind, tie_tol: kind.tie_tol ?? null, ties: kind.ties, directions })], { type: "application/json" });
}

async function loadDirections(file) {
  if (!file) return;
  const panel = active(), size = modelOf(panel).size;
  let content;
  try { content = JSON.parse(await file.text()); } catch { throw new Error(`${file.name} is not a file of directions: it is no JSON.`); }
  const given = content?.directions;
  if (!areDirections(given) || given[0].vector.length !== size) {
    throw new Error(`${file.name} needs at most ${size} directions of length 1 with ${size} numbers each, and no negative importance or effect, as this page and Directions.save write them.`);
  }
  const directions = given.map((d, i) => ({ name: String(d.name ?? "").trim() || String(i), vector: d.vector, importance: d.importance ?? 0,
    ...(d.effect == null ? {} : { effect: d.effect }) }));
  const tie_tol = Number.isFinite(content.tie_tol) ? content.tie_tol : null;
  const kind = { kind: `file:${file.name}`, title: `from ${file.name}`, about: "Loaded from a file.", tie_tol, directions,
    ties: areGroups(content.ties, directions.length) ? content.ties : tiesOf(directions.map((d) => d.importance), tie_tol, size) };
  forget(kind.kind);
  state.loaded = [...state.loaded.filter((k) => k.kind !== kind.kind), kind];
  panel.kind = kind.kind; state.picked = 0;
  show(); changed();
  say(`Loaded ${directions.length} directions from ${file.name}.`);
}

const EXPORTS = {
  "save-png": async () => download(fileName(".png"), await png(joined(views.map((v) => v.canvas), true))),
  "save-strip": async () => download(fileName("-strip.png"), await png(joined(views.map((v) => v.strip), false))),
  "save-gif": async () => { say("Making the animation…"); download(fileName(".gif"), await animation()); },
  "save-json": async () => download(fileName("-directions.json"), directionsFile()),
  "copy-link": async () => {
    try { await navigator.clipboard.writeText(location.href); } catch { throw new Error("The browser allows no copying here; the address of the page is the link."); }
    say("The link is copied. It restores this state in the same file.");
  },
};
