// Sliders, selections, dragging, keys.

const WALK = 6, KEY_STEP = 0.25;  // sigma across a picture; sigma of an arrow key
const MEANINGS = {
  effect: "Root mean square change of a pixel for one σ, where pixels go from −1 to 1. The bar shows it. It can be compared between kinds. Sliders are sorted by it, unless the text of the kind says otherwise.",
  importance: "How much the method that found the directions makes of one; the text of the kind says what it is. It cannot be compared between kinds.",
  predictability: "How often a network tells from two pictures that this direction moved between them. From the evaluation of the run.",
  activeness: "How much pixels vary while the direction moves, on average. From the evaluation of the run.",
  changes: "Which known factors of a sprite the direction moves: shares of its movement, each factor in units of its spread. 100 % of one factor is a disentangled direction.",
};
let past;

function changed(record = true) {
  if (record) past.record(state);
  $("undo").disabled = !past.past.length;
  window.history.replaceState(null, "", `#${encode(state)}`);
  refresh();
}

// Make the state fit the models, whatever an address, a file or another page has put into it.
function settle() {
  state.panels = state.panels.filter((panel) => panel.model < models.length);
  if (!state.panels.length) state.panels = models.slice(0, MOST_PANELS).map((model, m) => ({ model: m, kind: model.kinds[0].kind }));
  for (const panel of state.panels) panel.kind = kindOf(panel).kind;
  state.active = Math.min(state.active, state.panels.length - 1);
  const last = kindOf(active()).directions.length - 1;
  for (const key of ["picked", "across", "down"]) state[key] = Math.min(state[key], last);
}

function options(select, entries, chosen) {
  select.replaceChildren(...entries.map(([value, text]) => new Option(text, value, false, value === chosen)));
}

// The heading of the page names a single generator already.
const panelTitle = (panel) => `${models.length > 1 ? `${modelOf(panel).name}: ` : ""}${kindOf(panel).title}`;

// Everything outside of the pictures, from the state.
function show() {
  settle();
  showPanels();
  for (const id of ["seed", "samples", "truncation", "mode", "tool"]) $(id).value = state[id];
  $("heat").checked = state.heat;
  document.body.classList.toggle("heated", state.heat);
  $("truncation-value").textContent = fixed(state.truncation);
  $("clear-region").hidden = !state.region;
  for (const label of document.querySelectorAll(".walks")) label.hidden = state.tool !== "walk";
  const walks = state.tool === "walk" ? "Drag on a picture, or use the arrow keys, to walk along two directions."
    : "Drag a rectangle on a picture to find the directions that act there. By keyboard: arrows move it, with Shift they resize it, Enter takes it.";
  $("hint").textContent = `${walks}${state.heat ? " The heat map is bright where the chosen direction changes the picture most." : ""}`;
  const panel = active(), kind = kindOf(panel);
  options($("active"), state.panels.map((p, i) => [i, panelTitle(p)]), state.active);
  $("active-label").hidden = state.panels.length < 2;
  options($("kind"), kindsOf(panel.model).map((k) => [k.kind, k.title]), kind.kind);
  for (const key of ["across", "down"]) options($(key), kind.directions.map((_, i) => [i, nameOf(panel, i)]), state[key]);
  $("compare").disabled = state.panels.length >= MOST_PANELS || kindsOf(panel.model).length < 2;
  $("about").textContent = kind.about;
  $("ties").textContent = kind.ties.map((group) => `${group.map((i) => nameOf(panel, i)).join(", ")}: these ${group.length} are arbitrary up to rotation.`).join(" ");
  $("ties").hidden = !kind.ties.length;
  showRows(panel, kind);
}

// One slider for each direction. Rows are kept while they are of the same directions, and with them the focus.
let rowsOf = "";

function showRows(panel, kind) {
  const key = JSON.stringify([panel.model, kind.kind, kind.directions.map((_, i) => nameOf(panel, i)), state.region, kind.directions.length]);
  if (key !== rowsOf) {
    rowsOf = key;
    const focus = rows.findIndex((r) => r.row.contains(document.activeElement));
    const part = focus < 0 ? "" : ["name", "slider", "pick"].find((p) => rows[focus][p] === document.activeElement);
    rows = kind.directions.map((d, i) => rowOf(panel, kind, d, i));
    $("directions").replaceChildren(...rows.map((r) => r.row));
    if (part) rows[focus]?.[part].focus();
    showMeanings(kind);
  }
  rows.forEach((_, i) => syncRow(i));
}

function syncRow(i) {
  const { row, pick, slider, output } = rows[i], value = valuesOf(kindOf(active()))[i] ?? null;
  const stands = standing(active(), 0, i);
  row.classList.toggle("picked", i === state.picked);
  pick.checked = i === state.picked;
  if (Number(slider.value) !== stands) slider.value = stands;
  output.textContent = `${fixed(stands)} σ`;
  output.classList.toggle("untouched", value === null);
  slider.setAttribute("aria-valuetext", value === null ? "not moved" : `${fixed(value)} sigma`);
}

function element(tag, properties = {}, attributes = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function rowOf(panel, kind, direction, i) {
  const name = nameOf(panel, i);
  const pick = element("input", { type: "radio", name: "picked", title: "Choose for the strip and the heat map" }, { "aria-label": `Choose ${name} for the strip and the heat map` });
  const label = element("input", { type: "text", value: name, maxLength: 60, title: "Give it a name" }, { "aria-label": `Name of direction ${i}` });
  const output = element("output");
  const slider = element("input", { type: "range", min: -REACH, max: REACH, step: 0.05 }, { "aria-label": `${name}, in sigma`, "aria-describedby": `facts-${i}` });
  const preview = element("canvas", { title: `What ${name} does, from −3 to 3 σ` }, { "aria-hidden": "true" });
  const choose = () => { state.picked = i; rows.forEach((_, k) => syncRow(k)); changed(); };
  pick.addEventListener("change", choose);
  preview.addEventListener("click", choose);
  label.addEventListener("change", () => { (state.names[`${panel.model}:${kind.kind}`] ??= {})[i] = label.value.trim() || direction.name; show(); changed(); });
  slider.addEventListener("input", () => { setValue(i, Number(slider.value)); syncRow(i); changed(false); });
  slider.addEventListener("change", () => changed());
  const row = element("div", { className: "direction" }, { role: "listitem" }, pick, label, output, preview, slider, factsOf(kind, direction, i));
  return { row, pick, name: label, output, slider, preview };
}

function factsOf(kind, direction, i) {
  const size = (d) => d.effect ?? d.importance ?? 0;
  const most = Math.max(...kind.directions.map(size), 1e-12);
  const facts = element("div", { className: "facts", id: `facts-${i}` }, {}, element("span", { className: "bar" }, { "aria-hidden": "true" }));
  facts.firstChild.append(element("span")); facts.firstChild.firstChild.style.width = `${(100 * size(direction)) / most}%`;
  const numbers = { effect: direction.effect, importance: differs(kind) ? direction.importance : null, ...direction.scores };
  for (const [key, value] of Object.entries(numbers)) if (value != null) facts.append(element("span", { textContent: `${key} ${significant(value)}` }));
  const shares = sharesOf(direction.factors);
  if (shares.length) facts.append(element("span", { className: "changes", textContent: `changes ${shares.join(", ")}` }));
  const group = kind.ties.find((g) => g.includes(i));
  if (group) facts.append(element("span", { className: "tie", textContent: `one of ${group.length} that are arbitrary up to rotation` }));
  return facts;
}

const differs = (kind) => kind.directions.some((d) => d.importance !== kind.directions[0].importance);

// The factors that a direction moves most, as shares: the first, and others above a fifth.
function sharesOf(factors = {}) {
  const total = Object.values(factors).reduce((a, b) => a + b, 0);
  if (!total) return [];
  const sorted = Object.entries(factors).sort(([, a], [, b]) => b - a);
  return sorted.filter(([, v], i) => i === 0 || v > 0.2 * total).map(([name, v]) => `${name} ${Math.round((100 * v) / total)} %`);
}

function showMeanings(kind) {
  const known = new Set(kind.directions.flatMap((d) => [...(differs(kind) ? ["importance"] : []), ...(d.effect == null ? [] : ["effect"]), ...Object.keys(d.scores ?? {}), ...(sharesOf(d.factors).length ? ["changes"] : [])]));
  $("meanings").replaceChildren(...Object.entries(MEANINGS).filter(([key]) => known.has(key))
    .flatMap(([key, text]) => [element("dt", { textContent: key }), element("dd", { textContent: text })]));
}

// Sliders of all panels move together: the i-th direction of each kind that is shown.
function setValue(i, value) {
  for (const kind of new Set(state.panels.map((panel) => kindOf(panel).kind))) {
    const values = (state.values[kind] ?? []).slice();
    while (values.length <= i) values.push(null);
    values[i] = Math.max(-REACH, Math.min(REACH, value));
    state.values[kind] = values;
  }
}

// Other directions take the place of those of a kind: names and values of the old ones are not theirs.
function forget(kind) {
  delete state.values[kind];
  for (const m of models.keys()) delete state.names[`${m}:${kind}`];
}

function walk(dx, dy, from) {
  setValue(state.across, from[0] + dx);
  if (state.down !== state.across) setValue(state.down, from[1] + dy);
  for (const i of [state.across, state.down]) syncRow(i);
}

const walkStart = () => [state.across, state.down].map((i) => standing(active(), 0, i));

// Pictures

function showPanels() {
  while (views.length > state.panels.length) { const { figure, below } = views.pop(); figure.remove(); below.remove(); }
  while (views.length < state.panels.length) views.push(makeView(views.length));
  document.body.classList.toggle("single", views.length === 1);
  views.forEach((view, p) => {
    view.caption.textContent = panelTitle(state.panels[p]);
    view.figure.classList.toggle("active", views.length > 1 && p === state.active);
    view.remove.hidden = views.length < 2;
    view.remove.setAttribute("aria-label", `Remove the picture of ${panelTitle(state.panels[p])}`);
    view.picture.classList.toggle("region", state.tool === "region");
    view.title.hidden = views.length < 2;
    view.title.textContent = `${panelTitle(state.panels[p])}: ${nameOf(state.panels[p], state.picked)}`;
  });
}

function makeView(p) {
  const canvas = element("canvas", { tabIndex: 0 }, { role: "img" }), over = element("canvas", { className: "over" }, { "aria-hidden": "true" });
  const picture = element("div", { className: "picture" }, {}, canvas, over), caption = element("span");
  const remove = element("button", { textContent: "×", title: "Remove this picture" });
  remove.addEventListener("click", () => { state.panels.splice(p, 1); state.active = 0; show(); changed(); });
  const figure = element("figure", {}, {}, element("figcaption", {}, {}, caption, remove), picture);
  const strip = element("canvas", {}, { role: "img" }), title = element("p", { className: "hint" });
  const below = element("div", {}, {}, title, strip, element("div", { className: "ticks" }, { "aria-hidden": "true" }, ...STRIP.map((t) => element("span", { textContent: `${t < 0 ? "−" : ""}${Math.abs(t)} σ` }))));
  $("panels").append(figure); $("strips").append(below);
  const view = { figure, caption, remove, picture, canvas, over, strip, title, below };
  connectPicture(view, p);
  return view;
}

function connectPicture({ picture, canvas }, p) {
  let start = null;
  const place = (event) => {
    const box = canvas.getBoundingClientRect(), columns = Math.sqrt(state.samples);
    return [((event.clientX - box.left) / box.width) * columns, ((event.clientY - box.top) / box.height) * columns];
  };
  const rectangle = (event) => {
    const cell = start.place.map(Math.floor), clip = (v) => Math.max(0, Math.min(1, v));
    const [a, b] = start.place.map((v, k) => clip(v - cell[k])), [c, d] = place(event).map((v, k) => clip(v - cell[k]));
    return [Math.min(a, c), Math.min(b, d), Math.max(a, c), Math.max(b, d)];
  };
  const activate = () => { if (state.active !== p) { state.active = p; show(); changed(false); } };
  picture.addEventListener("pointerdown", (event) => {
    activate();
    start = { place: place(event), x: event.clientX, y: event.clientY, from: walkStart() };
    picture.setPointerCapture(event.pointerId);
    event.preventDefault(); canvas.focus();
  });
  picture.addEventListener("pointermove", (event) => {
    if (!start) return;
    const width = canvas.getBoundingClientRect().width;
    if (state.tool === "region") { draft = rectangle(event); refresh(); return; }
    walk((WALK * (event.clientX - start.x)) / width, (WALK * (event.clientY - start.y)) / width, start.from);
    changed(false);
  });
  picture.addEventListener("pointerup", async (event) => {
    if (!start) return;
    const drawn = rectangle(event);
    start = null;
    if (state.tool === "region") await takeRegion(drawn); else { show(); changed(); }
  });
  picture.addEventListener("pointercancel", () => { start = null; draft = null; changed(); });
  canvas.addEventListener("focus", activate);
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (state.tool === "region") { if (boxByKey(event)) event.preventDefault(); return; }
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    walk(...step.map((s) => s * KEY_STEP), walkStart());
    changed();
    say(describe(active()));
  });
}

// A second picture of the same generator, along directions of a kind that is not shown yet.
function addPanel() {
  const { model } = active(), taken = state.panels.filter((p) => p.model === model).map((p) => p.kind);
  const kind = kindsOf(model).find((k) => !taken.includes(k.kind)) ?? kindsOf(model)[0];
  state.panels.push({ model, kind: kind.kind });
  state.active = state.panels.length - 1;
}

async function undo() {
  const before = past.undo();
  if (!before) return say("There is nothing to undo.");
  state = before;
  await ensureRegion();
  show(); changed(false);
  say("Undone.");
}

function connect() {
  const on = (id, event, action, word = () => "") => $(id).addEventListener(event, () => { action($(id)); show(); changed(); if (word()) say(word()); });
  const seed = () => `Seed ${state.seed}.`;
  on("seed", "change", (e) => { state.seed = Math.max(0, Math.min(999999, Math.round(Number(e.value) || 0))); }, seed);
  on("random", "click", () => { state.seed = Math.floor(Math.random() * 1000000); }, seed);
  on("samples", "change", (e) => { state.samples = Number(e.value); });
  on("mode", "change", (e) => { state.mode = e.value; });
  on("tool", "change", (e) => { state.tool = e.value; draft = null; });
  on("heat", "change", (e) => { state.heat = e.checked; });
  on("active", "change", (e) => { state.active = Number(e.value); });
  on("kind", "change", (e) => { active().kind = e.value; Object.assign(state, { picked: 0, across: 0, down: 1 }); });
  on("compare", "click", addPanel, () => `${state.panels.length} pictures, the last along ${kindOf(active()).title} directions.`);
  on("across", "change", (e) => { state.across = Number(e.value); });
  on("down", "change", (e) => { state.down = Number(e.value); });
  on("reset", "click", () => { state = { ...structuredClone(START), panels: state.panels, names: state.names, loaded: state.loaded, tool: state.tool }; draft = null; },
    () => "Everything is as at the start; names are kept.");
  $("truncation").addEventListener("input", (e) => { state.truncation = Number(e.target.value); $("truncation-value").textContent = fixed(state.truncation); changed(false); });
  $("truncation").addEventListener("change", () => changed());
  $("undo").addEventListener("click", () => undo().catch(fail));
  $("clear-region").addEventListener("click", removeRegion);
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches?.("input[type=text], input[type=number]");
    if ((event.ctrlKey || event.metaKey) && !event.shiftKey && event.key.toLowerCase() === "z" && !typing) { event.preventDefault(); undo().catch(fail); }
  });
  window.addEventListener("hashchange", () => restore(location.hash).then(() => { show(); changed(); }).catch(fail));
  for (const [id, action] of Object.entries(EXPORTS)) $(id).addEventListener("click", () => action().catch((error) => say(error.message)));
  $("load-json").addEventListener("change", (e) => loadDirections(e.target.files[0]).catch((error) => say(error.message)).finally(() => { e.target.value = ""; }));
}
