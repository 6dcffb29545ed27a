// Numbers as text, random latents and small matrices.

const minus = (text) => (/[1-9]/.test(text) ? text.replace("-", "−") : text.replace("-", ""));
const fixed = (value, digits = 2) => minus(value.toFixed(digits));

// Three significant digits: 0.500, 12.3, 1230; a power of ten where zeros would have to be counted.
function significant(value) {
  const [digits, power] = value.toExponential(2).split("e").map(Number);
  if (value === 0) return "0";
  if (power < -3 || power > 4) return `${fixed(digits)} × 10${[...String(power)].map((c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]).join("")}`;
  return fixed(Number(value.toPrecision(3)), Math.max(0, 2 - power));
}

function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

// The latent of a sample: the same for every model with as many dimensions and the same prior.
function latent(seed, sample, size, prior) {
  const next = randomNumbers(seed * 7919 + sample * 104729 + 1);
  const z = new Float64Array(size);
  for (let i = 0; i < size; i++) {
    z[i] = prior === "uniform" ? 2 * next() - 1 : Math.sqrt(-2 * Math.log(1 - next())) * Math.cos(2 * Math.PI * next());
  }
  return z;
}

const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);

// Solve a symmetric positive definite system by elimination; equal rows are told apart by a ridge.
function solve(matrix, right) {
  const n = right.length, a = matrix.map((row, i) => [...row, right[i]].map((x, j) => (i === j ? x + 1e-9 : x)));
  for (let k = 0; k < n; k++) for (let i = k + 1; i < n; i++) {
    const f = a[i][k] / a[k][k];
    for (let j = k; j <= n; j++) a[i][j] -= f * a[k][j];
  }
  const x = Array(n).fill(0);
  for (let i = n - 1; i >= 0; i--) x[i] = (a[i][n] - x.reduce((sum, v, j) => (j > i ? sum + v * a[i][j] : sum), 0)) / a[i][i];
  return x;
}

// Groups of equal importance, as Directions.ties in Python: neighbors by importance within a tolerance, in chains.
function tiesOf(importances, tolerance, size) {
  if (tolerance == null) return [];
  const order = [...importances.keys()].sort((i, j) => importances[j] - importances[i]);
  const rounding = size * 2 ** -23 * importances[order[0]], groups = [[order[0]]];
  for (let k = 1; k < order.length; k++) {
    const above = importances[order[k - 1]];
    if (above - importances[order[k]] <= Math.max(tolerance * above, rounding)) groups[groups.length - 1].push(order[k]);
    else groups.push([order[k]]);
  }
  return groups.filter((group) => group.length > 1).map((group) => group.sort((i, j) => i - j));
}

// Eigenvalues, largest first, and eigenvectors as rows, of a symmetric matrix given as rows: cyclic Jacobi.
function symmetricEigen(matrix) {
  const n = matrix.length;
  const a = matrix.map((row) => Float64Array.from(row));
  const v = a.map((_, i) => Float64Array.from({ length: n }, (_, j) => (i === j ? 1 : 0)));
  for (let sweep = 0; sweep < 60; sweep++) {
    let off = 0, all = 0;
    for (let p = 0; p < n; p++) for (let q = 0; q < n; q++) (all += a[p][q] ** 2, off += p === q ? 0 : a[p][q] ** 2);
    if (off <= 1e-22 * all) break;
    for (let p = 0; p < n; p++) for (let q = p + 1; q < n; q++) {
      if (a[p][q] === 0) continue;
      const theta = (a[q][q] - a[p][p]) / (2 * a[p][q]);
      const t = Math.sign(theta || 1) / (Math.abs(theta) + Math.sqrt(theta * theta + 1));
      const c = 1 / Math.sqrt(t * t + 1), s = t * c;
      for (let k = 0; k < n; k++) { const x = a[k][p], y = a[k][q]; a[k][p] = c * x - s * y; a[k][q] = s * x + c * y; }
      for (let k = 0; k < n; k++) { const x = a[p][k], y = a[q][k]; a[p][k] = c * x - s * y; a[q][k] = s * x + c * y; }
      for (let k = 0; k < n; k++) { const x = v[p][k], y = v[q][k]; v[p][k] = c * x - s * y; v[q][k] = s * x + c * y; }
    }
  }
  const order = [...Array(n).keys()].sort((i, j) => a[j][j] - a[i][i]);
  return { values: order.map((i) => a[i][i]), vectors: order.map((i) => v[i]) };
}

// Directions of a region: those with the largest share of their effect inside of it, v'Av / v'(A + B + ridge)v.
function directionsOfRegion(inside, outside, count) {
  const n = inside.length;
  const total = inside.map((row, i) => row.map((x, j) => x + outside[i][j]));
  const ridge = 0.02 * total.reduce((sum, row, i) => sum + row[i], 0) / n || 1e-12;
  const { values, vectors } = symmetricEigen(total.map((row, i) => row.map((x, j) => (i === j ? x + ridge : x))));
  const half = vectors.map((v, i) => v.map((x) => x / Math.sqrt(values[i])));  // rows w with w'(total + ridge)w = 1
  const transformed = half.map((u) => { const au = inside.map((row) => dot(row, u)); return half.map((w) => dot(w, au)); });
  const found = symmetricEigen(transformed);
  return found.vectors.slice(0, count).map((c, k) => {
    const v = new Float64Array(n);
    c.forEach((x, i) => half[i].forEach((y, j) => { v[j] += x * y; }));
    const length = Math.sqrt(dot(v, v));
    return { vector: v.map((x) => x / length), share: Math.max(0, found.values[k]) };
  });
}
