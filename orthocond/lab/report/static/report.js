// Draws the charts of a report; switches lines on and off, and smooths them.
const specs = JSON.parse(document.getElementById("specs").textContent);
const legends = [];

// The mean of the values around each, of the same line; logarithmic quantities are smoothed as logarithms.
// The rows are new ones: Vega knows a row that it has seen by a hidden mark.
function smoothed(rows, reach, log) {
  const lines = new Map();
  for (const row of rows) {
    const key = JSON.stringify([row.line, row.of]);
    if (!lines.has(key)) lines.set(key, []);
    lines.get(key).push(row);
  }
  return [...lines.values()].flatMap((line) =>
    line.map((row, place) => {
      const near = line.slice(Math.max(0, place - reach), place + reach + 1);
      const values = near.map((other) => (log ? Math.log(other.value) : other.value));
      const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
      const { line: name, of, step } = row;
      return { line: name, of, step, value: Number((log ? Math.exp(mean) : mean).toPrecision(5)) };
    }),
  );
}

async function draw(place, element) {
  const spec = specs[place];
  const inner = element.appendChild(document.createElement("div"));  // Vega gives it a role and a label of its own
  const { view } = await window.vegaEmbed(inner, spec, { actions: false, renderer: "svg", mode: "vega-lite" });
  inner.setAttribute("aria-hidden", "true");
  return { view, rows: spec.datasets.rows, log: JSON.stringify(spec).includes('"type":"log"'), switchable: !!spec.params?.some((p) => p.name === "hidden") };
}

for (const section of document.querySelectorAll("main > section")) {
  const drawn = Promise.all([...section.querySelectorAll("[data-chart]")].map((e) => draw(Number(e.dataset.chart), e)));
  legends.push(drawn);
  const hidden = new Set();
  for (const button of section.querySelectorAll("[data-line]")) {
    button.addEventListener("click", async () => {
      const name = button.dataset.line;
      hidden.has(name) ? hidden.delete(name) : hidden.add(name);
      button.setAttribute("aria-pressed", String(!hidden.has(name)));
      for (const chart of await drawn) if (chart.switchable) chart.view.signal("hidden", [...hidden]).runAsync();
    });
  }
  section.querySelector(".smooth input")?.addEventListener("input", async (event) => {
    const reach = Number(event.target.value);
    for (const chart of await drawn)
      if (chart.switchable) chart.view.data("rows", smoothed(chart.rows, reach, chart.log)).runAsync();
  });
}

for (const button of document.querySelectorAll(".copy")) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.previousElementSibling.textContent);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
}

Promise.all(legends).then(() => (document.body.dataset.ready = "true"));
