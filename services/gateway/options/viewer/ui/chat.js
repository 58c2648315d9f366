// The chat with the model. Its requests are always traced.

import { call, get } from "./api.js";
import { markdown } from "./markdown.js";
import { byId, element, seconds } from "./text.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

export class Chat {
  constructor(traces) {
    this.traces = traces;
    this.model = "";
    this.messages = [];
    this.stopping = null;
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("chat-text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    byId("chat-stop").addEventListener("click", () => this.stopping?.abort());
    byId("chat-new").addEventListener("click", () => {
      this.stopping?.abort();
      this.messages = [];
      byId("messages").replaceChildren();
    });
    byId("chat-settings").addEventListener("toggle", () => this.#listModels());
  }

  /** Offers the model and its adapters for selection. */
  async #listModels() {
    const { data } = await get("v1/models");
    const chosen = byId("chat-model").value || this.model;
    const options = data.map(({ id }) => element("option", { value: id, textContent: id, selected: id === chosen }));
    byId("chat-model").replaceChildren(...options);
  }

  /** Sends the message that the user wrote. What arrives of the answer becomes part of the
   * conversation. Without any output, the message does not. */
  async #send() {
    const asked = byId("chat-text").value.trim();
    if (!asked || this.stopping) return;
    byId("chat-text").value = "";
    const messages = this.messages;
    messages.push({ role: "user", content: asked });
    say("user", asked);
    const answer = say("assistant", "…");
    const traceId = random(16);
    this.#busy(new AbortController());
    const began = performance.now();
    let content = "";
    try {
      const usage = await this.#stream(traceId, (text, thought) => write(answer, (content = text), thought));
      messages.push({ role: "assistant", content });
      this.#after(usage, (performance.now() - began) / 1000, traceId);
    } catch (error) {
      answer.classList.add("failed");
      const why = error.name === "AbortError" ? "stopped" : error.message;
      answer.textContent = content ? `${answer.textContent} [${why}]` : why;
      if (content) messages.push({ role: "assistant", content });
      else messages.pop();
    } finally {
      this.#busy(null);
    }
  }

  /** Streams an answer. Calls `show` with the answer's text and reasoning so far. Returns the token
   * counts. */
  async #stream(traceId, show) {
    const system = byId("chat-system").value.trim();
    const body = {
      model: byId("chat-model").value || this.model,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      stream: true,
      stream_options: { include_usage: true },
    };
    for (const name of NUMBERS) {
      const value = byId(`chat-${name}`).valueAsNumber;
      if (!Number.isNaN(value)) body[name] = value;
    }
    const answer = await call("v1/chat/completions", {
      method: "POST",
      body: JSON.stringify(body),
      headers: { "Content-Type": "application/json", traceparent: `00-${traceId}-${random(8)}-01` },
      signal: this.stopping.signal,
    });
    let [text, thought, usage] = ["", "", null];
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      text += event.choices[0]?.delta.content ?? "";
      thought += event.choices[0]?.delta.reasoning ?? "";
      usage = event.usage ?? usage;
      show(text, thought);
    }
    return usage;
  }

  #after(usage, took, traceId) {
    const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
    const text = usage
      ? `${usage.prompt_tokens} + ${usage.completion_tokens} tokens, ${cached} cached, ${seconds(took)}. `
      : `${seconds(took)}. `;
    const link = element("button", { class: "link", type: "button", textContent: "Where the time went" });
    link.addEventListener("click", () => this.traces.openSoon(traceId));
    byId("messages").append(element("div", { class: "after" }, text, link));
    toEnd();
  }

  #busy(stopping) {
    this.stopping = stopping;
    byId("chat-send").hidden = stopping !== null;
    byId("chat-stop").hidden = stopping === null;
  }
}

function say(role, content) {
  const made = element("div", { class: role, textContent: content });
  byId("messages").append(made);
  toEnd();
  return made;
}

function write(answer, text, thought) {
  const thinking = thought ? [element("p", { class: "says", textContent: thought })] : [];
  answer.replaceChildren(...thinking, ...(text ? markdown(text) : thought ? [] : ["…"]));
  toEnd();
}

function toEnd() {
  byId("messages").scrollTop = byId("messages").scrollHeight;
}

/** Yields the JSON value of each server-sent event before [DONE]. Skips comments, which only keep the
 * connection open. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection ended before the answer was complete");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts.filter((one) => !one.startsWith(":"))) {
      const data = part.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function random(bytes) {
  return [...crypto.getRandomValues(new Uint8Array(bytes))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
