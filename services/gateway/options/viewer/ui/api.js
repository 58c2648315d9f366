// Sends requests to the page's server, with the API key that the user entered in this browser tab.

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

/** Returns the response to a request. Throws Refused with the server's message for an error. */
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
    // A body that is not JSON is shown as text.
  }
  return new Refused(answer.status, message);
}
