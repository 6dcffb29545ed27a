// Start: load the generators, restore the state in the address, show.

async function restore(hash) {
  state = decode(hash.slice(1));
  await ensureRegion();
}

async function start() {
  models = await loadModels(JSON.parse(payload("models-data")));
  const warnings = models.map((model) => model.warning).filter(Boolean);
  $("warning").textContent = warnings.join(" "); $("warning").hidden = !warnings.length;
  await restore(location.hash);
  show();
  past = new History(state);
  connect();
  $("undo").disabled = true;
  await refresh();
  say("Ready.");
  document.body.dataset.ready = "true";
}

start().catch(fail);
