// The page: controls, pictures, regions, exports.

const $ = (id) => document.getElementById(id);
const REACH = 4, STRIP = 7, WALK = 6;  // ends of a slider in sigma, pictures of a strip, sigma across a picture
let models = [], state, past, busy = false, again = false, region = null, shown = [];

const say = (text) => { $("status").textContent = text; };
function fail(error) {
  console.error(error);
  $("problem").textContent = `${error.message ?? error} Make the page again with \`orthocond explore\`; if it stays, the file may be damaged.`;
  $("problem").hidden = false;
  say("Stopped.");
}

const kindsOf = (model) => (region ? [...model.kinds, { ...region.kinds[models.indexOf(model)] }] : model.kinds);
const kindOf = (model) => kindsOf(model).find((k) => k.kind === state.kind) ?? model.kinds[0];
const valuesOf = (kind) => state.values[kind.kind] ?? [];
const nameOf = (kind, i) => state.names[kind.kind]?.[i] ?? kind.directions[i]?.name ?? String(i);

// The latent of a sample after the sliders, and further steps {index: sigma} on top of them.
function moved(model, sample, more = {}) {
  const z = latent(state.seed, sample, model.size, model.prior).map((x) => x * state.truncation);
  const kind = kindOf(model), values = valuesOf(kind);
  kind.directions.forEach(({ vector }, i) => {
    const given = values[i] ?? null, extra = more[i] ?? 0;
    if (given === null && extra === 0) return;
    const target = ((given ?? 0) + extra) * model.sigma;
    const step = state.mode === "set" && given !== null ? target - dot(z, vector) : target;
    for (let j = 0; j < z.length; j++) z[j] += step * vector[j];
  });
  return z;
}

async function refresh() {
  if (busy) { again = true; return; }
  busy = true;
  try {
    do {
      again = false;
      const start = performance.now();
      for (const [m, model] of models.entries()) {
        const batch = await model.images([...Array(state.samples).keys()].map((i) => moved(model, i)));
        shown[m] = batch;
        draw(model.canvas, batch, Math.sqrt(state.samples), 480);
        model.canvas.setAttribute("aria-label", describe(model));
      }
      const spent = performance.now() - start;
      document.body.dataset.updates = Number(document.body.dataset.updates ?? 0) + 1;
      document.body.dataset.milliseconds = spent.toFixed(1);
      say(`${spent.toFixed(0)} ms for ${models.length * state.samples} picture${models.length * state.samples > 1 ? "s" : ""}.`);
      await overlays();
    } while (again);
    await strips();
  } catch (error) { fail(error); } finally { busy = false; }
  if (again) refresh();
}

function describe(model) {
  const kind = kindOf(model);
  const set = valuesOf(kind).map((v, i) => (v ? `${nameOf(kind, i)} ${v.toFixed(1)}` : "")).filter(Boolean);
  return `${model.name}, seed ${state.seed}${set.length ? `, ${set.join(", ")}` : ""}. Arrow keys walk.`;
}

// Where the chosen direction acts: the mean change of each pixel between -1 and +1 sigma.
async function overlays() {
  for (const model of models) {
    const over = model.over, context = over.getContext("2d");
    over.width = model.canvas.width; over.height = model.canvas.height;
    context.clearRect(0, 0, over.width, over.height);
    if (state.heat) {
      const both = [];
      for (let i = 0; i < state.samples; i++) both.push(moved(model, i, { [state.picked]: -1 }), moved(model, i, { [state.picked]: 1 }));
      drawHeat(over, await model.images(both), Math.sqrt(state.samples));
    }
    if (state.region) drawRegion(over, state.region);
  }
}

function drawHeat(canvas, batch, columns) {
  const { channels, height, width, length, data } = batch, area = height * width;
  const change = new Float32Array((batch.count / 2) * area);
  for (let i = 0; i < batch.count / 2; i++) for (let p = 0; p < area; p++) for (let c = 0; c < channels; c++) {
    change[i * area + p] += Math.abs(data[2 * i * length + c * area + p] - data[(2 * i + 1) * length + c * area + p]) / channels;
  }
  const most = Math.max(1e-6, ...change);
  const context = canvas.getContext("2d"), side = canvas.width / columns, tall = side * height / width;
  for (let i = 0; i < batch.count / 2; i++) {
    const image = new ImageData(width, height);
    for (let p = 0; p < area; p++) {
      const t = change[i * area + p] / most;
      image.data.set([255, 60 + 160 * t, 30, 225 * Math.min(1, 1.2 * t)], 4 * p);
    }
    context.drawImage(canvasOf(image), (i % columns) * side, Math.floor(i / columns) * tall, side, tall);
  }
}

function drawRegion(canvas, [x0, y0, x1, y1]) {
  const context = canvas.getContext("2d"), columns = Math.sqrt(state.samples);
  const w = canvas.width / columns, h = canvas.height / columns;
  context.lineWidth = Math.max(2, canvas.width / 200); context.strokeStyle = "#00e5ff";
  context.strokeRect(x0 * w, y0 * h, (x1 - x0) * w, (y1 - y0) * h);
}

async function strips() {
  for (const model of models) {
    const latents = [...Array(STRIP).keys()].map((i) => moved(model, 0, { [state.picked]: (6 * i) / (STRIP - 1) - 3 }));
    draw(model.strip, await model.images(latents), STRIP, 900);
    const kind = kindOf(model);
    model.strip.setAttribute("aria-label", `${model.name}: ${nameOf(kind, state.picked)} from -3 to 3 sigma`);
  }
  $("strip-title").textContent = `Strip: ${nameOf(kindOf(models[0]), state.picked)}, −3 to 3 σ`;
}

// Regions: finite differences at some latents, inside and outside of the rectangle.
async function findRegion([x0, y0, x1, y1]) {
  const kinds = [];
  for (const model of models) {
    const leading = model.kinds.find((k) => k.kind === "jacobian");
    const basis = model.size > 64 && leading ? leading.directions.map((d) => d.vector)
      : [...Array(model.size).keys()].map((i) => Float64Array.from({ length: model.size }, (_, j) => (i === j ? 1 : 0)));
    const zero = () => basis.map(() => new Float64Array(basis.length));
    const inside = zero(), outside = zero(), h = 0.25 * model.sigma, samples = 8;
    for (let s = 0; s < samples; s++) {
      say(`Finding the directions of the region in ${model.name}: ${s + 1} of ${samples}.`);
      const z = s === 0 ? moved(model, 0) : latent(state.seed + 1000, s, model.size, model.prior);
      const latents = basis.flatMap((d) => [-h, h].map((t) => z.map((x, j) => x + t * d[j])));
      const batch = await model.images(latents);
      gather(batch, basis.length, [x0, y0, x1, y1], inside, outside);
    }
    const found = directionsOfRegion(inside.map((r) => [...r]), outside.map((r) => [...r]), Math.min(8, basis.length));
    const directions = found.map(({ vector, share }, i) => {
      const whole = new Float64Array(model.size);
      basis.forEach((d, k) => d.forEach((x, j) => { whole[j] += vector[k] * x; }));
      return { name: `region ${i}`, vector: [...whole], importance: share };
    });
    kinds.push({ kind: "region", title: "region that was drawn", about: "Importance is the share of a direction's effect inside the rectangle.", directions, ties: [] });
  }
  region = { kinds };
}

function gather(batch, count, [x0, y0, x1, y1], inside, outside) {
  const { channels, height, width, length, data } = batch;
  const within = (x, y) => x >= x0 * width && x < x1 * width && y >= y0 * height && y < y1 * height;
  const column = new Float64Array(count);
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {
    const sum = within(x + 0.5, y + 0.5) ? inside : outside;
    for (let c = 0; c < channels; c++) {
      const at = c * height * width + y * width + x;
      for (let k = 0; k < count; k++) column[k] = data[(2 * k + 1) * length + at] - data[2 * k * length + at];
      for (let i = 0; i < count; i++) if (column[i]) for (let j = 0; j < count; j++) sum[i][j] += column[i] * column[j];
    }
  }
}

// Controls

function changed(record = true) {
  if (record) past.record(state);
  $("undo").disabled = !past.past.length;
  window.history.replaceState(null, "", `#${encode(state)}`);
  refresh();
}

function show() {
  for (const id of ["seed", "samples", "truncation", "mode", "tool"]) $(id).value = state[id];
  $("heat").checked = state.heat;
  $("truncation-value").textContent = Number(state.truncation).toFixed(2);
  for (const model of models) model.picture.classList.toggle("region", state.tool === "region");
  $("hint").textContent = state.tool === "walk" ? "Drag on a picture, or use the arrow keys, to walk along two directions."
    : "Drag a rectangle on a picture to find the directions that act there.";
  const kinds = kindsOf(models[0]);
  if (!kinds.some((k) => k.kind === state.kind)) state.kind = kinds[0].kind;
  $("kind").replaceChildren(...kinds.map((k) => new Option(k.title, k.kind, false, k.kind === state.kind)));
  const kind = kindOf(models[0]);
  const last = kind.directions.length - 1;
  for (const key of ["picked", "across", "down"]) state[key] = Math.min(state[key], last);
  for (const key of ["across", "down"]) {
    $(key).replaceChildren(...kind.directions.map((_, i) => new Option(nameOf(kind, i), i, false, i === state[key])));
  }
  const tied = kind.ties.map((group) => group.map((i) => nameOf(kind, i)).join(", "));
  $("about").textContent = [kind.about, ...tied.map((names) => `${names}: arbitrary up to rotation, because they are equally important.`)].join(" ");
  $("directions").replaceChildren(...kind.directions.map((d, i) => rowOf(kind, d, i)));
}

function rowOf(kind, direction, i) {
  const row = document.createElement("div");
  row.className = `direction${i === state.picked ? " picked" : ""}`; row.setAttribute("role", "listitem");
  const pick = Object.assign(document.createElement("input"), { type: "radio", name: "picked", checked: i === state.picked, title: "Choose for the strip and the heat map" });
  pick.setAttribute("aria-label", `Choose ${nameOf(kind, i)} for the strip and the heat map`);
  pick.addEventListener("change", () => { state.picked = i; mark(); changed(); });
  const name = Object.assign(document.createElement("input"), { type: "text", value: nameOf(kind, i), maxLength: 60 });
  name.setAttribute("aria-label", `Name of direction ${i}`);
  name.addEventListener("change", () => { (state.names[kind.kind] ??= {})[i] = name.value.trim() || direction.name; show(); changed(); });
  const value = valuesOf(kind)[i] ?? null;
  const output = Object.assign(document.createElement("output"), { textContent: value === null ? "–" : value.toFixed(2) });
  const slider = Object.assign(document.createElement("input"), { type: "range", min: -REACH, max: REACH, step: 0.05, value: value ?? 0 });
  slider.setAttribute("aria-label", `${nameOf(kind, i)}, in sigma`);
  slider.addEventListener("input", () => { setValue(kind, i, Number(slider.value)); output.textContent = Number(slider.value).toFixed(2); changed(false); });
  slider.addEventListener("change", () => changed());
  const facts = document.createElement("div"); facts.className = "facts";
  const most = Math.max(...kind.directions.map((d) => d.importance ?? 0), 1e-12);
  const bar = document.createElement("span"); bar.className = "bar"; bar.innerHTML = `<span style="width:${100 * (direction.importance ?? 0) / most}%"></span>`;
  facts.append(bar);
  for (const key of ["importance", "effect", "score"]) {
    if (direction[key] != null) facts.append(Object.assign(document.createElement("span"), { textContent: `${key} ${direction[key].toPrecision(3)}` }));
  }
  const group = kind.ties.find((g) => g.includes(i));
  if (group) facts.append(Object.assign(document.createElement("span"), { className: "tie", textContent: `one of ${group.length} that are arbitrary up to rotation` }));
  row.append(pick, name, output, slider, facts);
  return row;
}

function mark() {
  [...$("directions").children].forEach((row, i) => row.classList.toggle("picked", i === state.picked));
}

function setValue(kind, i, value) {
  const values = valuesOf(kind).slice();
  while (values.length <= i) values.push(null);
  values[i] = Math.max(-REACH, Math.min(REACH, value));
  state.values[kind.kind] = values;
}

function walk(dx, dy, from) {
  const kind = kindOf(models[0]);
  setValue(kind, state.across, from[0] + dx);
  if (state.down !== state.across) setValue(kind, state.down, from[1] + dy);
}

const walkStart = () => [state.across, state.down].map((i) => valuesOf(kindOf(models[0]))[i] ?? 0);

function connectPicture(model) {
  let start = null;
  const place = (event) => {
    const box = model.canvas.getBoundingClientRect(), columns = Math.sqrt(state.samples);
    return [((event.clientX - box.left) / box.width) * columns, ((event.clientY - box.top) / box.height) * columns];
  };
  const rectangle = (event) => {
    const [x, y] = place(event), cell = start.place.map(Math.floor), clip = (v) => Math.max(0, Math.min(1, v));
    const [a, b] = [start.place[0] - cell[0], start.place[1] - cell[1]], [c, d] = [clip(x - cell[0]), clip(y - cell[1])];
    return [Math.min(a, c), Math.min(b, d), Math.max(a, c), Math.max(b, d)];
  };
  model.picture.addEventListener("pointerdown", (event) => {
    start = { place: place(event), x: event.clientX, y: event.clientY, from: walkStart() };
    model.picture.setPointerCapture(event.pointerId);
    event.preventDefault(); model.canvas.focus();
  });
  model.picture.addEventListener("pointermove", (event) => {
    if (!start) return;
    const width = model.canvas.getBoundingClientRect().width;
    if (state.tool === "walk") walk((WALK * (event.clientX - start.x)) / width, (WALK * (event.clientY - start.y)) / width, start.from);
    else state.region = rectangle(event);
    changed(false);
  });
  model.picture.addEventListener("pointerup", async (event) => {
    if (!start) return;
    if (state.tool === "region") {
      const drawn = rectangle(event);
      start = null;
      if (drawn[2] - drawn[0] < 0.03 || drawn[3] - drawn[1] < 0.03) { state.region = null; say("The rectangle is too small."); return changed(false); }
      state.region = drawn;
      await applyRegion();
    }
    start = null;
    show(); changed();
  });
  model.canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-0.25, 0], ArrowRight: [0.25, 0], ArrowUp: [0, -0.25], ArrowDown: [0, 0.25] }[event.key];
    if (!step) return;
    event.preventDefault();
    walk(...step, walkStart());
    show(); changed();
  });
}

async function applyRegion() {
  try {
    await findRegion(state.region);
    state.kind = "region"; state.picked = 0; state.across = 0; state.down = 1; delete state.values.region;
  } catch (error) { fail(error); }
}

function connect() {
  const on = (id, event, action) => $(id).addEventListener(event, () => { action($(id)); show(); changed(); });
  on("seed", "change", (e) => { state.seed = Math.max(0, Math.min(999999, Math.round(Number(e.value) || 0))); });
  on("random", "click", () => { state.seed = Math.floor(Math.random() * 1000000); });
  on("samples", "change", (e) => { state.samples = Number(e.value); });
  on("mode", "change", (e) => { state.mode = e.value; });
  on("tool", "change", (e) => { state.tool = e.value; });
  on("heat", "change", (e) => { state.heat = e.checked; });
  on("kind", "change", (e) => { state.kind = e.value; state.picked = 0; state.across = 0; state.down = 1; });
  on("across", "change", (e) => { state.across = Number(e.value); });
  on("down", "change", (e) => { state.down = Number(e.value); });
  on("reset", "click", () => { state = { ...structuredClone(START), kind: state.kind, names: state.names, tool: state.tool }; });
  $("truncation").addEventListener("input", (e) => { state.truncation = Number(e.target.value); $("truncation-value").textContent = state.truncation.toFixed(2); changed(false); });
  $("truncation").addEventListener("change", () => changed());
  $("undo").addEventListener("click", () => { const before = past.undo(); if (before) { state = before; show(); changed(false); } });
  window.addEventListener("hashchange", async () => { await restore(location.hash); show(); changed(); });
  for (const [id, action] of Object.entries(EXPORTS)) $(id).addEventListener("click", () => action().catch(fail));
  $("load-json").addEventListener("change", (e) => loadDirections(e.target.files[0]).catch((error) => say(error.message)));
}

// Exports

function download(name, blob) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  say(`Saved ${name}.`);
}

const fileName = (end) => `${models[0].name.replace(/[^\w.-]+/g, "-")}-seed${state.seed}${end}`;
const picture = (canvases) => {
  const whole = document.createElement("canvas");
  whole.width = Math.max(...canvases.map((c) => c.width)); whole.height = canvases.reduce((sum, c) => sum + c.height, 0);
  let y = 0;
  for (const c of canvases) { whole.getContext("2d").drawImage(c, 0, y); y += c.height; }
  return new Promise((resolve) => whole.toBlob(resolve, "image/png"));
};

async function animation() {
  const { GIFEncoder, quantize, applyPalette } = await imported("gifenc");
  const model = models[0], frames = 16, encoder = GIFEncoder();
  const there = [...Array(frames).keys()].map((i) => (6 * i) / (frames - 1) - 3);
  const batch = await model.images(there.map((t) => moved(model, 0, { [state.picked]: t })));
  const scale = Math.max(1, Math.round(256 / batch.width)), canvas = document.createElement("canvas");
  for (const i of [...there.keys(), ...[...there.keys()].reverse().slice(1, -1)]) {
    draw(canvas, { ...batch, count: 1, data: batch.data.subarray(i * batch.length, (i + 1) * batch.length) }, 1, batch.width * scale);
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const palette = quantize(data, 256);
    encoder.writeFrame(applyPalette(data, palette), canvas.width, canvas.height, { palette, delay: 60 });
  }
  encoder.finish();
  return new Blob([encoder.bytes()], { type: "image/gif" });
}

function directionsFile() {
  const model = models[0], kind = kindOf(model);
  const directions = kind.directions.map((d, i) => ({ name: nameOf(kind, i), vector: [...d.vector], importance: d.importance ?? 0 }));
  return new Blob([JSON.stringify({ z_dim: model.size, kind: kind.kind, directions })], { type: "application/json" });
}

async function loadDirections(file) {
  if (!file) return;
  let found;
  try { found = JSON.parse(await file.text()); } catch { throw new Error(`${file.name} is not a file of directions: it is no JSON.`); }
  const rows = found?.directions, size = models[0].size;
  if (!Array.isArray(rows) || !rows.length || rows.some((d) => !Array.isArray(d.vector) || d.vector.length !== size || !d.vector.every(Number.isFinite))) {
    throw new Error(`${file.name} needs directions with ${size} numbers each, as this page and Directions.save write them.`);
  }
  const kind = { kind: `file:${file.name}`, title: `from ${file.name}`, about: "Loaded from a file.", ties: [],
    directions: rows.map((d, i) => ({ name: String(d.name ?? i), vector: d.vector, importance: Number(d.importance ?? 0) })) };
  for (const model of models) if (model.size === size) model.kinds = [...model.kinds.filter((k) => k.kind !== kind.kind), kind];
  state.kind = kind.kind; state.picked = 0;
  show(); changed();
  say(`Loaded ${rows.length} directions from ${file.name}.`);
}

const EXPORTS = {
  "save-png": async () => download(fileName(".png"), await picture(models.map((m) => m.canvas))),
  "save-strip": async () => download(fileName("-strip.png"), await picture(models.map((m) => m.strip))),
  "save-gif": async () => { say("Making the animation…"); download(fileName(".gif"), await animation()); },
  "save-json": async () => download(fileName("-directions.json"), directionsFile()),
  "copy-link": async () => { await navigator.clipboard.writeText(location.href); say("The link is copied. It restores this state in the same file."); },
};

// Start

async function restore(hash) {
  state = decode(hash.slice(1)) ?? structuredClone(START);
  state.samples = [1, 4, 9].includes(state.samples) ? state.samples : 1;
  if (state.region) { const chosen = structuredClone(state); await applyRegion(); state = chosen; }
}

function place(model) {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  model.picture = Object.assign(document.createElement("div"), { className: "picture" });
  model.canvas = Object.assign(document.createElement("canvas"), { tabIndex: 0 }); model.canvas.setAttribute("role", "img");
  model.over = Object.assign(document.createElement("canvas"), { className: "over" }); model.over.setAttribute("aria-hidden", "true");
  model.strip = document.createElement("canvas"); model.strip.setAttribute("role", "img");
  caption.textContent = model.name;
  model.picture.append(model.canvas, model.over); figure.append(model.picture, caption);
  $("models").append(figure); $("strips").append(model.strip);
  connectPicture(model);
}

async function start() {
  models = await loadModels(JSON.parse(payload("models-data")));
  models.forEach(place);
  await restore(location.hash);
  past = new History(state);
  connect();
  show();
  await refresh();
  document.body.dataset.ready = "true";
}

start().catch(fail);
