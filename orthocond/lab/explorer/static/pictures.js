// What is drawn: pictures, heat maps, strips, and a preview of each direction.

const STRIP = [-3, -2, -1, 0, 1, 2, 3], PREVIEW = [-3, -1.5, 0, 1.5, 3];  // values of the slider
const SLOW = 100, TRIES = 10;  // milliseconds of a picture, above which there are no previews; how often it may be tried
let models = [], views = [], rows = [], state, busy = false, again = false, shown = [], previewing = 0;

const $ = (id) => document.getElementById(id);
const say = (text) => { $("status").textContent = text; };
const active = () => state.panels[state.active];
const modelOf = (panel) => models[panel.model];
const kindsOf = (m) => [...models[m].kinds, ...state.loaded.filter((k) => k.directions[0].vector.length === models[m].size), ...regionKinds(m)];
const kindOf = (panel) => kindsOf(panel.model).find((k) => k.kind === panel.kind) ?? models[panel.model].kinds[0];
const valuesOf = (kind) => state.values[kind.kind] ?? [];
const nameOf = (panel, i) => state.names[`${panel.model}:${kindOf(panel).kind}`]?.[i] ?? kindOf(panel).directions[i]?.name ?? String(i);

function fail(error) {
  console.error(error);
  $("problem").textContent = `${error.message ?? error} Undo or reload; if it stays, make the page again with orthocond explore.`;
  $("problem").hidden = false;
  say("Stopped.");
}

// The latent of a sample after the sliders; some sliders may be elsewhere, { index: sigma }.
function latentOf(panel, sample, elsewhere = {}) {
  const model = modelOf(panel), { directions } = kindOf(panel), values = valuesOf(kindOf(panel));
  const z = latent(state.seed, sample, model.size, model.prior).map((x) => x * state.truncation);
  const given = directions.map((d, i) => ({ vector: d.vector, value: elsewhere[i] ?? values[i] ?? null })).filter((g) => g.value !== null);
  let steps = given.map((g) => g.value * model.sigma);
  if (state.mode === "set") {
    steps = solve(given.map((a) => given.map((b) => dot(a.vector, b.vector))), steps.map((t, i) => t - dot(z, given[i].vector)));
  }
  given.forEach(({ vector }, i) => { for (let j = 0; j < z.length; j++) z[j] += steps[i] * vector[j]; });
  return z;
}

// Where a slider stands; if it was not touched and sets coordinates, the coordinate of the sample.
function standing(panel, sample, i) {
  const value = valuesOf(kindOf(panel))[i] ?? null;
  if (value !== null || state.mode === "add") return value ?? 0;
  const direction = kindOf(panel).directions[i];
  return direction ? dot(latentOf(panel, sample), direction.vector) / modelOf(panel).sigma : 0;
}

const pause = (milliseconds = 0) => new Promise((resolve) => setTimeout(resolve, milliseconds));  // in which the browser draws
const samples = () => [...Array(state.samples).keys()];

async function refresh() {
  if (busy) { again = true; return; }
  busy = true;
  try {
    do {
      again = false;
      await drawPanels();
      await overlays();
    } while (again);
    await pause();
    await strips();
    $("problem").hidden = true;
  } catch (error) { fail(error); } finally { busy = false; }
  if (again) refresh(); else previews();
}

async function drawPanels() {
  const start = performance.now();
  for (const [p, panel] of [...state.panels.entries()]) {
    const batch = await modelOf(panel).images(samples().map((i) => latentOf(panel, i)));
    if (!views[p] || state.panels[p] !== panel) continue;
    shown[p] = batch;
    draw(views[p].canvas, batch, Math.sqrt(batch.count), 480);
    views[p].canvas.setAttribute("aria-label", describe(panel));
  }
  const spent = performance.now() - start, count = state.panels.length * state.samples;
  const updates = Number(document.body.dataset.updates ?? 0) + 1;
  document.body.dataset.updates = updates;
  document.body.dataset.milliseconds = spent.toFixed(1);
  if (updates > 1) $("speed").textContent = `${spent.toFixed(0)} ms for ${count} picture${count > 1 ? "s" : ""}`;
}

function describe(panel) {
  const set = valuesOf(kindOf(panel)).map((v, i) => (v ? `${nameOf(panel, i)} ${fixed(v, 1)}` : "")).filter(Boolean);
  const keys = state.tool === "walk" ? "Arrow keys walk." : "Arrow keys move the rectangle, with Shift they resize it, Enter finds its directions.";
  return `${modelOf(panel).name}, seed ${state.seed}${set.length ? `, ${set.join(", ")}` : ""}. ${keys}`;
}

// Where the chosen direction acts: the mean change of each pixel from one sigma below to one above.
async function overlays() {
  for (const [p, panel] of [...state.panels.entries()]) {
    let change = null;
    if (state.heat) {
      const ends = samples().flatMap((s) => [-1, 1].map((t) => latentOf(panel, s, { [state.picked]: standing(panel, s, state.picked) + t })));
      change = await modelOf(panel).images(ends);
    }
    const over = views[p]?.over;
    if (!over) continue;
    over.width = views[p].canvas.width; over.height = views[p].canvas.height;  // which clears it
    if (change) drawHeat(over, change, Math.sqrt(change.count / 2));
    const box = draft ?? state.region?.box;
    if (box) drawBox(over, box, draft !== null);
  }
}

function drawHeat(canvas, batch, columns) {
  const { channels, height, width, length, data } = batch, area = height * width, count = batch.count / 2;
  const change = new Float32Array(count * area);
  for (let i = 0; i < count; i++) for (let p = 0; p < area; p++) for (let c = 0; c < channels; c++) {
    change[i * area + p] += Math.abs(data[2 * i * length + c * area + p] - data[(2 * i + 1) * length + c * area + p]) / channels;
  }
  const most = change.reduce((a, b) => Math.max(a, b), 1e-6);
  const context = canvas.getContext("2d"), side = canvas.width / columns, tall = side * height / width;
  for (let i = 0; i < count; i++) {
    const image = new ImageData(width, height);
    for (let p = 0; p < area; p++) {
      const t = change[i * area + p] / most;
      image.data.set([255, 60 + 160 * t, 30, 225 * Math.min(1, 1.2 * t)], 4 * p);
    }
    context.drawImage(canvasOf(image), (i % columns) * side, Math.floor(i / columns) * tall, side, tall);
  }
}

function drawBox(canvas, [x0, y0, x1, y1], dashed) {
  const context = canvas.getContext("2d"), columns = Math.sqrt(state.samples);
  const w = canvas.width / columns, h = canvas.height / columns, width = Math.max(2, canvas.width / 200);
  for (const [color, line] of [["#000000", 2 * width], ["#00e5ff", width]]) {
    context.lineWidth = line; context.strokeStyle = color; context.setLineDash(dashed ? [4 * width, 3 * width] : []);
    context.strokeRect(x0 * w, y0 * h, (x1 - x0) * w, (y1 - y0) * h);
  }
}

async function strips() {
  for (const [p, panel] of [...state.panels.entries()]) {
    const batch = await modelOf(panel).images(STRIP.map((t) => latentOf(panel, 0, { [state.picked]: t })));
    if (again || !views[p]) return;
    draw(views[p].strip, batch, STRIP.length, 900);
    views[p].strip.setAttribute("aria-label", `${modelOf(panel).name}: ${nameOf(panel, state.picked)} from -3 to 3 sigma`);
  }
  $("strip-title").textContent = `Strip: ${nameOf(active(), state.picked)}, from −3 to 3 σ`;
}

// A small strip beside each slider, while nothing else is to be done.
async function previews() {
  const mine = ++previewing, panel = active();
  try {
    for (let i = 0; modelOf(panel).quickest > SLOW; i++) {  // the machine may have been busy
      await pause(200);
      if (i === TRIES || mine !== previewing || busy) return;
      await modelOf(panel).images([latentOf(panel, 0)]);
    }
    for (const [i, row] of rows.entries()) {
      await pause(i ? 0 : 120);
      if (mine !== previewing || busy) return;
      const batch = await modelOf(panel).images(PREVIEW.map((t) => latentOf(panel, 0, { [i]: t })));
      if (mine !== previewing) return;
      draw(row.preview, batch, PREVIEW.length, 240);
    }
    document.body.dataset.previews = Number(document.body.dataset.previews ?? 0) + 1;
  } catch (error) { fail(error); }
}
