// What the views share: who looks, what the gateway reported, and the request for a new drawing.

export const app = {
  session: null, // { is_signed_in, has_session, name, sees_all }
  batches: new Map(), // id -> facts
  order: [], // ids, newest first
  workers: [],
  history: {}, // name of a worker -> [[seconds, tokens a second], ...]
  link: "", // "", "live", "lost"
  trouble: "",
  hasState: false, // whether the first events have come
  refresh: () => {}, // draws soon
  say: () => {}, // for screen readers
};

// The models that workers serve. A host serves several, by workers of its own.
export function servedModels() {
  const live = app.workers.filter((one) => !one.is_away);
  return [...new Set(live.flatMap((one) => (one.models?.length ? one.models : [one.model])))].filter(Boolean);
}

// A worker reports the speed of the last minute in which it had rows. Without rows it has none; with
// rows and no speed it has not measured one yet: its heartbeat brings the first.
export function speedNow(worker) {
  if (!worker.num_running) return 0;
  return worker.tokens_per_second || undefined;
}

// A batch of OpenAI's API keeps its id there also when its rows have left the queue.
export const idOf = (batch) => batch.openai_id ?? batch.batch_id;

export function takeEvent(name, data) {
  if (name === "history") {
    app.history = data;
  } else if (name === "workers") {
    app.workers = data;
    for (const worker of data) addPoint(worker);
  } else {
    for (const batch of data.changed) app.batches.set(idOf(batch), batch);
    const shown = new Set(data.order);
    for (const id of app.batches.keys()) if (!shown.has(id)) app.batches.delete(id);
    app.order = data.order;
    app.trouble = data.trouble;
    app.hasState = true;
  }
  app.refresh();
}

// Between the gateway's points, one a minute, the page adds what it sees itself.
function addPoint(worker) {
  if (worker.tokens_per_second === null) return; // an older version
  const points = (app.history[worker.name] ??= []);
  const now = Math.round(Date.now() / 1000);
  if (points.length && now - points.at(-1)[0] < 10) return;
  points.push([now, worker.is_away ? 0 : (speedNow(worker) ?? 0)]);
}
