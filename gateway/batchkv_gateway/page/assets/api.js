// Requests to the gateway. A failed one raises a Fault, whose message says what to do.

export const NATIVE = "/batchkv/v1";

export class Fault extends Error {
  constructor(message, status = 0, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const SIGNING_IN = ["/page/login", "/page/exchange"]; // which say themselves what is wrong

// Gets called when the gateway wants a key that this page has not: its session has ended.
let refused = () => {};

export function onRefused(then) {
  refused = then;
}

const LOST = "The gateway does not answer. Check that `batchkv serve` runs, then try again.";

export async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, {
      ...options,
      headers: { "x-batchkv-request": "1", ...options.headers },
      credentials: "same-origin",
      redirect: "error",
    });
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw new Fault(LOST);
  }
  if (!answer.ok) {
    if (answer.status === 401 && !SIGNING_IN.includes(path)) refused();
    throw faultOf(answer.status, await answer.text());
  }
  return answer;
}

export async function getJson(path) {
  return (await ask(path)).json();
}

export async function sendJson(method, path, value) {
  const headers = value === undefined ? {} : { "content-type": "application/json" };
  const body = value === undefined ? undefined : JSON.stringify(value);
  const text = await (await ask(path, { method, headers, body })).text();
  return text ? JSON.parse(text) : null;
}

export function faultOf(status, text) {
  let found = null;
  try {
    found = JSON.parse(text).error;
  } catch {
    // Not the gateway's own answer: a proxy's page, or half an answer.
  }
  if (found && typeof found.message === "string") {
    return new Fault(sentence(found.message), status, found.code ?? "");
  }
  return new Fault(`The gateway answered with status ${status}. Its log says why.`, status);
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

// A file as the body of a request, with its progress from 0 to 1. fetch() does not report it.
export function upload(path, file, headers, onProgress) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", path);
    request.setRequestHeader("x-batchkv-request", "1");
    request.setRequestHeader("content-type", "application/octet-stream");
    for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => {
      if (event.lengthComputable) onProgress(event.loaded / event.total);
    };
    request.onerror = () => reject(new Fault(LOST));
    request.onload = () => {
      if (request.status >= 200 && request.status < 300) {
        resolve(JSON.parse(request.responseText));
      } else {
        if (request.status === 401) refused();
        reject(faultOf(request.status, request.responseText));
      }
    };
    request.send(file);
  });
}

// The data of each server-sent event of an answer, until it ends.
export async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.releaseLock();
  }
}
