// The generators: unpacked from the page, run by ONNX Runtime.

const payload = (id) => document.getElementById(id).textContent.trim();
const bytesOf = (id) => {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(payload(id));
  const text = atob(payload(id)), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
};
const unzipped = async (id) =>
  new Uint8Array(await new Response(new Blob([bytesOf(id)]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer());
const imported = async (id) => {
  const url = URL.createObjectURL(new Blob([await unzipped(id)], { type: "text/javascript" }));
  try { return await import(url); } finally { URL.revokeObjectURL(url); }
};

async function loadModels(descriptions) {
  if (typeof DecompressionStream === "undefined") throw new Error("This browser is too old: it has no DecompressionStream.");
  const [ort, wasm] = await Promise.all([imported("ort"), unzipped("ort-wasm")]);
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmBinary = wasm;
  const models = [];
  for (const description of descriptions) {
    try {
      const session = await ort.InferenceSession.create(await unzipped(description.onnx), { executionProviders: ["wasm"] });
      models.push(new Model(ort, session, description));
    } catch (error) { throw unable(description, error); }
  }
  return models;
}

const unable = ({ name }, error) => new Error(`The generator ${name} cannot run in this page: ${error.message}`);

class Model {
  constructor(ort, session, description) {
    Object.assign(this, { ort, session, ...description });
    this.size = description.z_dim;
    this.queue = Promise.resolve();
    this.quickest = Infinity;  // milliseconds of a picture
  }

  // Pictures of latents as { width, height, channels, data }, data in [0, 1] and N x C x H x W. One call at a time.
  images(latents) {
    const result = this.queue.then(() => this.run(latents)).catch((error) => { throw unable(this, error); });
    this.queue = result.catch(() => {});
    return result;
  }

  async run(latents) {
    const parts = [], start = performance.now();
    const step = this.batch ?? latents.length;
    for (let start = 0; start < latents.length; start += step) {
      const part = latents.slice(start, start + step);
      while (this.batch && part.length < step) part.push(part[part.length - 1]);
      const flat = new Float32Array(part.length * this.size);
      part.forEach((z, i) => flat.set(z, i * this.size));
      const input = new this.ort.Tensor("float32", flat, [part.length, ...this.latent_shape]);
      const output = await this.session.run({ [this.session.inputNames[0]]: input });
      parts.push(output[this.session.outputNames[0]]);
    }
    const [, channels, height, width] = parts[0].dims;
    const count = latents.length, length = channels * height * width;
    const data = new Float32Array(count * length);
    parts.forEach((part, i) => data.set(part.data.subarray(0, Math.min(part.data.length, (count - i * step) * length)), i * step * length));
    const [low, high] = this.range;
    for (let i = 0; i < data.length; i++) data[i] = (data[i] - low) / (high - low);
    if (data.some(Number.isNaN)) throw new Error("its pixels are not numbers.");
    this.quickest = Math.min(this.quickest, (performance.now() - start) / count);
    return { count, channels, height, width, length, data };
  }
}

// One picture of a batch as pixels for a canvas; strengths are drawn as gray where there is one channel.
function pixels(batch, index) {
  const { channels, height, width, length, data } = batch;
  const area = height * width, image = new ImageData(width, height);
  for (let p = 0; p < area; p++) {
    for (let c = 0; c < 3; c++) image.data[4 * p + c] = 255 * data[index * length + Math.min(c, channels - 1) * area + p] + 0.5;
    image.data[4 * p + 3] = 255;
  }
  return image;
}

function canvasOf(image) {
  const canvas = document.createElement("canvas");
  canvas.width = image.width; canvas.height = image.height;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// The pictures of a batch in one canvas, in rows of so many, each enlarged without inventing edges.
function draw(canvas, batch, columns, least) {
  const rows = Math.ceil(batch.count / columns);
  const scale = Math.max(1, Math.round(least / (columns * batch.width)));
  canvas.width = columns * batch.width * scale; canvas.height = rows * batch.height * scale;
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = true; context.imageSmoothingQuality = "high";
  for (let i = 0; i < batch.count; i++) {
    const x = (i % columns) * batch.width * scale, y = Math.floor(i / columns) * batch.height * scale;
    context.drawImage(canvasOf(pixels(batch, i)), x, y, batch.width * scale, batch.height * scale);
  }
}
