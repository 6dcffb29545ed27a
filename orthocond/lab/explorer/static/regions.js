// Directions of a rectangle, found in the page from finite differences.

const REGION_SAMPLES = 8, REGION_DIRECTIONS = 8, LEAST_SIDE = 0.03;
let draft = null, found = { key: "", kinds: [] };  // the rectangle being drawn; the directions of the last one, for each model

const regionKinds = (m) => (state.region && found.key === JSON.stringify(state.region) ? [found.kinds[m]] : []);

// Find the directions of the region in the state, unless they are known. They depend on the region alone.
async function ensureRegion() {
  const key = JSON.stringify(state.region);
  if (!state.region || found.key === key) return;
  const kinds = [];
  for (const model of models) kinds.push(await kindOfRegion(model, state.region));
  found = { key, kinds };
}

async function kindOfRegion(model, { box, seed }) {
  const leading = model.kinds.find((k) => k.kind === "jacobian");
  const basis = model.size > 64 && leading ? leading.directions.map((d) => d.vector)
    : [...Array(model.size).keys()].map((i) => Float64Array.from({ length: model.size }, (_, j) => (i === j ? 1 : 0)));
  const zero = () => basis.map(() => new Float64Array(basis.length));
  const inside = zero(), outside = zero(), h = 0.25 * model.sigma;
  let pixels = 0;
  for (let s = 0; s < REGION_SAMPLES; s++) {
    say(`Finding the directions of the region in ${model.name}: ${s + 1} of ${REGION_SAMPLES}.`);
    await pause();
    const z = latent(seed, s, model.size, model.prior);
    const batch = await model.images(basis.flatMap((d) => [-h, h].map((t) => z.map((x, j) => x + t * d[j]))));
    gather(batch, basis.length, box, inside, outside);
    pixels = batch.length;
  }
  const directions = directionsOfRegion(inside.map((r) => [...r]), outside.map((r) => [...r]), Math.min(REGION_DIRECTIONS, basis.length));
  return {
    kind: "region", title: "region that was drawn", ties: [], tie_tol: null,
    about: "The directions that act inside the rectangle and as little as possible outside. Importance is the share of a direction's effect inside; they are sorted by it.",
    directions: directions.map(({ vector, share }, i) => {
      const whole = new Float64Array(model.size);
      basis.forEach((d, k) => d.forEach((x, j) => { whole[j] += vector[k] * x; }));
      const square = vector.reduce((sum, x, a) => sum + x * vector.reduce((part, y, b) => part + y * (inside[a][b] + outside[a][b]), 0), 0);
      // Pixels here go from 0 to 1, and the differences are over half a sigma.
      return { name: `region ${i}`, vector: [...whole], importance: share, effect: 4 * Math.sqrt(square / (REGION_SAMPLES * pixels)) };
    }),
  };
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

// Whether a rectangle holds the middle of no pixel, so that nothing can change inside.
function isBetweenPixels({ width, height }, [x0, y0, x1, y1]) {
  const middles = (from, to, count) => Math.ceil(to * count - 0.5) - Math.ceil(from * count - 0.5);
  return !middles(x0, x1, width) || !middles(y0, y1, height);
}

// Take the rectangle that was drawn as the region, and show its directions.
async function takeRegion(box) {
  draft = null;
  const least = Math.min(box[2] - box[0], box[3] - box[1]);
  if (least < LEAST_SIDE || shown.slice(0, state.panels.length).some((picture) => isBetweenPixels(picture, box))) { say("The rectangle is too small."); return refresh(); }
  const before = JSON.stringify(state.region);
  state.region = { box: box.map((x) => Number(x.toFixed(4))), seed: state.seed };
  try { await ensureRegion(); } catch (error) { state.region = null; return fail(error); }
  if (JSON.stringify(state.region) !== before) forget("region");
  state.panels = state.panels.map((panel) => ({ ...panel, kind: "region" }));
  Object.assign(state, { picked: 0, across: 0, down: 1 });
  show(); changed();
  say(`Found ${kindOf(active()).directions.length} directions of the region.`);
}

function removeRegion() {
  draft = null; state.region = null;
  show(); changed();
  say("The region is removed.");
}

// The rectangle by keyboard: arrows move it, with Shift they resize it, Enter takes it, Escape gives it up.
function boxByKey(event) {
  const [x0, y0, x1, y1] = draft ?? state.region?.box ?? [0.3, 0.3, 0.7, 0.7];
  if (event.key === "Enter") { takeRegion([x0, y0, x1, y1]); return true; }
  if (event.key === "Escape") { draft = null; say("No rectangle."); refresh(); return true; }
  const step = { ArrowLeft: [-0.05, 0], ArrowRight: [0.05, 0], ArrowUp: [0, -0.05], ArrowDown: [0, 0.05] }[event.key];
  if (!step) return false;
  const clip = (v, low, high) => Math.max(low, Math.min(high, v));
  const [dx, dy] = event.shiftKey ? [0, 0] : [clip(step[0], -x0, 1 - x1), clip(step[1], -y0, 1 - y1)];
  const [wx, wy] = event.shiftKey ? step : [0, 0];
  draft = [x0 + dx, y0 + dy, clip(x1 + dx + wx, x0 + 0.05, 1), clip(y1 + dy + wy, y0 + 0.05, 1)];
  const percent = draft.map((v) => Math.round(100 * v));
  say(`Rectangle from ${percent[0]} to ${percent[2]} percent across, ${percent[1]} to ${percent[3]} percent down. Enter finds its directions.`);
  refresh();
  return true;
}
