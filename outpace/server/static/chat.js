// The page: one conversation, its tokens coloured by who wrote them, figures per drafter.
"use strict";

const at = (id) => document.getElementById(id);
const messages = [];
const totals = new Map();
let model = null;
let running = null;

function headers() {
  const out = { "Content-Type": "application/json" };
  if (at("key").value) out.Authorization = `Bearer ${at("key").value}`;
  return out;
}

async function refusal(response) {
  if (response.status === 401) at("keyline").hidden = false;
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

async function connect() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await refusal(response));
    model = (await response.json()).data[0];
    at("model").textContent = model.id;
    at("drafter").replaceChildren(...model.drafters.map((name) => new Option(name, name)));
  } catch (error) {
    at("model").textContent = `not connected: ${error.message}`;
  }
}

function turn(role, text) {
  const box = document.createElement("div");
  box.className = `turn ${role}`;
  box.textContent = text;
  at("talk").append(box);
  box.scrollIntoView({ block: "end" });
  return box;
}

function body() {
  const system = at("system").value.trim();
  const out = {
    model: model.id,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: Number(at("temperature").value) || 0,
    max_tokens: Math.max(1, Math.floor(Number(at("length").value)) || 256),
    stream: true,
    stream_options: { include_usage: true },
    speculation: { drafter: at("drafter").value, detailed: true },
  };
  if (at("seed").value !== "") out.seed = Number(at("seed").value);
  return out;
}

// Lines of a stream of events, less what is not data.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

// An answer that grows: tokens become text when their bytes are whole characters.
class Answer {
  constructor() {
    this.box = turn("assistant", "");
    this.words = this.box.appendChild(document.createElement("span"));
    this.words.className = at("colours").checked ? "words coloured" : "words";
    this.cost = this.box.appendChild(document.createElement("span"));
    this.cost.className = "cost quiet";
    this.decoder = new TextDecoder();
    this.text = "";
    this.count = this.kept = 0;
    this.first = null;
  }

  take(choice) {
    this.text += choice.delta.content || "";
    const tokens = choice.speculation || [];
    if (!tokens.length) return;
    const now = performance.now();
    if (this.first === null) this.first = now;
    for (const token of tokens) {
      this.count += 1;
      this.kept += token.accepted ? 1 : 0;
      let piece = this.decoder.decode(new Uint8Array(token.bytes), { stream: true });
      if (!this.words.textContent) piece = piece.replace(/^ /, "");
      if (!piece) continue;
      const mark = document.createElement("mark");
      mark.className = token.accepted ? "accepted" : "emitted";
      mark.title = token.accepted ? "guessed by a drafter" : "added by the model";
      mark.textContent = piece;
      this.words.append(mark);
    }
    const seconds = (now - this.first) / 1000;
    const speed = seconds > 0 ? ((this.count - 1) / seconds).toFixed(1) : "-";
    this.say(`${this.count} tokens, ${speed} tokens/s, ${this.kept} guessed`);
    this.box.scrollIntoView({ block: "end" });
  }

  say(line) {
    this.cost.textContent = line;
  }

  end(usage, metrics) {
    const rate = (100 * this.kept) / Math.max(1, this.count);
    this.say(
      `${usage.completion_tokens} tokens, ${metrics.tokens_per_second.toFixed(1)} tokens/s, ` +
        `${metrics.mean_emitted.toFixed(2)} emitted per pass, ${rate.toFixed(0)} % guessed, ` +
        `drafter ${metrics.drafter}, seed ${metrics.seed}`,
    );
    count(usage, metrics);
  }
}

function count(usage, metrics) {
  const zero = { answers: 0, tokens: 0, later: 0, seconds: 0, passes: 0, accepted: 0, drafted: 0 };
  const sum = totals.get(metrics.drafter) || zero;
  const later = Math.max(0, usage.completion_tokens - 1);
  sum.answers += 1;
  sum.tokens += usage.completion_tokens;
  sum.later += later;
  sum.seconds += metrics.seconds - metrics.prefill_seconds;
  sum.passes += metrics.passes;
  for (const one of Object.values(metrics.by_drafter)) {
    sum.accepted += one.accepted;
    sum.drafted += one.drafted;
  }
  totals.set(metrics.drafter, sum);
  const rows = [...totals].map(([name, s]) => {
    const row = document.createElement("tr");
    const cells = [
      name, s.answers, s.tokens,
      s.seconds > 0 ? (s.later / s.seconds).toFixed(1) : "-",
      s.passes ? (s.later / s.passes).toFixed(2) : "-",
      s.drafted ? `${s.accepted} / ${s.drafted}` : "-",
    ];
    for (const cell of cells) row.insertCell().textContent = cell;
    return row;
  });
  at("figures").tBodies[0].replaceChildren(...rows);
}

async function ask(text) {
  if (model === null) await connect();
  if (model === null) return;
  messages.push({ role: "user", content: text });
  turn("user", text);
  const answer = new Answer();
  running = new AbortController();
  busy(true);
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(body()), signal: running.signal,
    });
    if (!response.ok) throw new Error(await refusal(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.choices.length) answer.take(event.choices[0]);
      else if (event.metrics) answer.end(event.usage, event.metrics);
    }
  } catch (error) {
    if (error.name === "AbortError") answer.say("stopped");
    else {
      answer.box.classList.add("wrong");
      answer.say(error.message);
    }
  }
  if (answer.text) messages.push({ role: "assistant", content: answer.text });
  else messages.pop();
  running = null;
  busy(false);
}

function busy(on) {
  at("send").hidden = on;
  at("stop").hidden = !on;
  if (!on) at("text").focus();
}

at("say").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || running) return;
  at("text").value = "";
  ask(text);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("say").requestSubmit();
  }
});
at("stop").addEventListener("click", () => running && running.abort());
at("reset").addEventListener("click", () => {
  if (running) running.abort();
  messages.length = 0;
  at("talk").replaceChildren();
});
at("colours").addEventListener("change", () => {
  for (const words of document.querySelectorAll(".words")) {
    words.classList.toggle("coloured", at("colours").checked);
  }
});
at("key").addEventListener("change", connect);
at("settings").addEventListener("submit", (event) => event.preventDefault());
connect();
