// Requests to the server that this page came from, with the key that was given in this tab.

const KEY = "stepwell-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/** The answer of a call. Throws Refused with the server's sentence. */
export async function call(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(options.headers) });
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

export async function get(path) {
  return (await call(path)).json();
}

export async function post(path) {
  return (await call(path, { method: "POST" })).json();
}

async function refusal(answer) {
  const text = await answer.text();
  let message = text.slice(0, 200) || `status ${answer.status}`;
  try {
    const error = JSON.parse(text).error;
    message = typeof error === "string" ? error : error.message;
  } catch {
    // What is not JSON is shown as it is.
  }
  return new Refused(answer.status, message);
}
