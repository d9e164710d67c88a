// The page: one conversation, its tokens marked by who wrote them, the tree of every pass, speed
// against plain decoding, figures per drafter. Texts of models are set as text, never as markup:
// Markdown becomes elements that are made here, one by one.
"use strict";

const PLAIN = "none";
const STYLES = 5; // marks that the style sheet has for drafters
const at = (id) => document.getElementById(id);
const messages = [];
const totals = new Map(); // method spec -> sums over this page's answers
const writers = new Map(); // drafter -> number of its mark
const passes = new WeakMap(); // element -> what its pass did
let model = null;
let key = ""; // in memory only
let running = null;

function make(tag, classes = "", text = "") {
  const out = document.createElement(tag);
  if (classes) out.className = classes;
  if (text) out.textContent = text;
  return out;
}

const decimal = (value, digits = 1) => (Number.isFinite(value) ? value.toFixed(digits) : "-");
const percent = (value) => (value > 0 && value < 0.005 ? "<1%" : `${Math.round(100 * value)}%`);
const count = (number, noun, many = `${noun}s`) => `${number} ${number === 1 ? noun : many}`;

// The name of a method without its settings, where that is enough to tell it from the others.
function brief(spec) {
  const name = (one) => one.split("[")[0];
  const known = new Set([...(model?.drafters ?? []), ...writers.keys(), spec]);
  return [...known].some((one) => one !== spec && name(one) === name(spec)) ? spec : name(spec);
}

// ---- talking to the server

function headers() {
  const out = { "Content-Type": "application/json" };
  if (key) out.Authorization = `Bearer ${key}`;
  return out;
}

async function refusal(response) {
  if (response.status === 401) {
    at("entry").hidden = false;
    aside(true);
    at("key").focus();
  }
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

async function connect() {
  model = null;
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await refusal(response));
    model = (await response.json()).data[0];
    at("model").textContent = model.id;
    at("drafter").replaceChildren(...model.drafters.map((name) => new Option(name, name)));
    at("entry").hidden = true;
    figures();
  } catch (error) {
    at("model").textContent = `not connected: ${error.message}`;
  }
}

function body(history, drafter, seed) {
  return {
    model: model.id,
    messages: history,
    temperature: Number(at("temperature").value) || 0,
    max_tokens: Math.max(1, Math.floor(Number(at("length").value)) || 256),
    seed,
    stream: true,
    stream_options: { include_usage: true },
    speculation: { drafter, trace: true },
  };
}

// Objects of a stream of events.
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

// Send a body; hand every chunk with a choice to `take`. Gives the last chunk, with the figures.
async function stream(sent, take) {
  running = new AbortController();
  busy(true);
  let last = null;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(sent), signal: running.signal,
    });
    if (!response.ok) throw new Error(await refusal(response));
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.choices.length) take(chunk);
      else last = chunk;
    }
    if (last === null) throw new Error("the stream broke off");
    return last;
  } finally {
    running = null;
    busy(false);
  }
}

// ---- speed

// The speed of plain decoding: as measured by this page's own plain answers, else no less than
// what a pass of one token would give if it took as long as the passes of this answer.
function plainly(rate, emitted) {
  const sum = totals.get(PLAIN);
  if (sum && sum.seconds > 0) return { rate: sum.later / sum.seconds, measured: true };
  return { rate: rate / emitted, measured: false };
}

function bar(name, rate, most, classes) {
  const rail = make("span", "rail");
  const fill = rail.appendChild(make("span", `fill ${classes}`));
  fill.style.display = "block";
  fill.style.width = `${Math.min(100, (100 * rate) / most)}%`;
  const label = make("span", "name", brief(name));
  label.title = name;
  return [label, rail, make("span", "number", `${decimal(rate)} tokens/s`)];
}

function speed(drafter, rate, emitted) {
  at("rate").textContent = decimal(rate);
  at("bars").hidden = !(rate > 0);
  if (!(rate > 0)) return;
  if (drafter === PLAIN) {
    at("bars").replaceChildren(...bar("plain decoding", rate, rate, "plain"));
    at("plain").textContent = "This is plain decoding: one token per pass.";
    return;
  }
  const plain = plainly(rate, emitted);
  const most = Math.max(rate, plain.rate);
  at("bars").replaceChildren(
    ...bar(drafter, rate, most, ""),
    ...(plain.measured ? bar("plain, measured", plain.rate, most, "plain")
      : bar("plain, predicted", plain.rate, most, "guess")),
  );
  const each = `${decimal(emitted, 2)} tokens emitted per pass. `;
  at("plain").textContent = plain.measured
    ? `${each}Plain decoding is measured, by the plain answers of this page: ` +
      `${decimal(rate / plain.rate, 2)} times its speed.`
    : `${each}Plain decoding is predicted: passes as long as these, with one token each. Plain passes ` +
      `are shorter, so this answer is at most ${decimal(emitted, 2)} times as fast; ` +
      "\u201cRun plainly too\u201d measures it.";
}

// ---- Markdown

const INLINE = /(`+)([^`]|[^`][^]*?[^`])\1(?!`)|\*\*(?=\S)([^]*?\S)\*\*|\*(?=[^\s*])([^*]*[^\s*])\*|\[([^\]\n]+)\]\((https?:[^\s)]+)\)/;
const BLOCK = {
  fence: /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/, heading: /^(#{1,6})\s+(.*)$/, rule: /^ {0,3}([-*_])( *\1){2,} *$/,
  item: /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/, quote: /^\s*>\s?(.*)$/,
  columns: /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/,
};
const holdsMarkdown = (text) =>
  /^ {0,3}(`{3}|~{3}|#{1,6}\s|\s*[-*+]\s|\d{1,9}[.)]\s|>\s)/m.test(text) || /`[^`\n]+`|\*\*\S[^\n]*\*\*/.test(text)
  || text.split("\n").some((line, n, all) => opensTable(line, all[n + 1]));

// The cells of a row; a bar behind a backslash is text.
const cells = (line) => line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/)
  .map((cell) => cell.trim().replaceAll("\\|", "|"));
const opensTable = (line, below = "") =>
  line.includes("|") && BLOCK.columns.test(below) && cells(line).length === cells(below).length;

function inline(into, text) {
  let rest = text;
  for (let found = INLINE.exec(rest); found; found = INLINE.exec(rest)) {
    into.append(rest.slice(0, found.index));
    const [, , code, strong, em, label, address] = found;
    if (code !== undefined) into.append(make("code", "", code));
    else if (strong !== undefined) inline(into.appendChild(make("strong")), strong);
    else if (em !== undefined) inline(into.appendChild(make("em")), em);
    else {
      const link = into.appendChild(make("a", "", label));
      link.href = address;
      link.rel = "noopener noreferrer";
      link.target = "_blank";
    }
    rest = rest.slice(found.index + found[0].length);
  }
  into.append(rest);
  return into;
}

function codeBlock(code, language) {
  const box = make("div", "code");
  const head = box.appendChild(make("div", "codehead"));
  head.append(make("span", "", language || "code"), copier("Copy code", () => code));
  box.appendChild(make("pre")).append(make("code", "", code));
  return box;
}

function copier(label, text) {
  const button = make("button", "copy", label);
  button.type = "button";
  button.addEventListener("click", async () => {
    const done = await copied(text());
    button.textContent = done ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}

// Pages that are not served safely have no clipboard of their own; there the old way is left.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = document.body.appendChild(make("textarea", "heard"));
    field.value = text;
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

// Rows of cells, the names of the columns first; short rows are filled up, long ones cut.
function tabled(head, below, rows) {
  const sides = cells(below).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "middle" : "right") : ""));
  const box = make("div", "table");
  const table = box.appendChild(make("table"));
  const row = (part, kind, line) => {
    const given = cells(line);
    part.appendChild(make("tr")).append(...sides.map((side, n) => inline(make(kind, side), given[n] ?? "")));
  };
  row(table.appendChild(make("thead")), "th", head);
  const body = table.appendChild(make("tbody"));
  for (const line of rows) row(body, "td", line);
  return box;
}

// The elements of a text in Markdown.
function formatted(text) {
  const out = document.createDocumentFragment();
  const lines = text.split("\n");
  const lists = []; // open lists: [indent, element]
  let words = null;
  for (let n = 0; n < lines.length; n += 1) {
    const line = lines[n];
    const fence = BLOCK.fence.exec(line);
    const item = BLOCK.item.exec(line);
    const heading = BLOCK.heading.exec(line);
    const quote = BLOCK.quote.exec(line);
    if (fence || heading || quote || !line.trim()) words = null;
    if (fence || heading || quote) lists.length = 0;
    if (fence) {
      const code = [];
      for (n += 1; n < lines.length && !lines[n].trim().startsWith(fence[1]); n += 1) code.push(lines[n]);
      out.append(codeBlock(code.join("\n"), fence[2]));
    } else if (heading) {
      inline(out.appendChild(make(`h${Math.min(6, heading[1].length + 2)}`)), heading[2]);
    } else if (opensTable(line, lines[n + 1])) {
      lists.length = 0;
      words = null;
      let end = n + 2;
      const ends = (next) => !next.trim() || BLOCK.fence.test(next) || BLOCK.heading.test(next) || BLOCK.quote.test(next);
      while (end < lines.length && !ends(lines[end])) end += 1;
      out.append(tabled(line, lines[n + 1], lines.slice(n + 2, end)));
      n = end - 1;
    } else if (BLOCK.rule.test(line)) {
      lists.length = 0;
      words = null;
      out.append(make("hr"));
    } else if (item) {
      while (lists.length && lists.at(-1)[0] > item[1].length) lists.pop();
      const kind = /\d/.test(item[2]) ? "OL" : "UL";
      if (lists.at(-1)?.[0] === item[1].length && lists.at(-1)[1].tagName !== kind) lists.pop();
      if (!lists.length || lists.at(-1)[0] < item[1].length) {
        const list = make(kind);
        if (kind === "OL") list.start = parseInt(item[2], 10);
        (lists.at(-1)?.[1].lastElementChild ?? out).append(list);
        lists.push([item[1].length, list]);
      }
      words = lists.at(-1)[1].appendChild(make("li"));
      inline(words, item[3]);
    } else if (quote) {
      inline(out.appendChild(make("blockquote")), quote[1]);
    } else if (line.trim()) {
      if (words) words.append("\n");
      else {
        if (!/^\s/.test(line)) lists.length = 0;
        words = (lists.at(-1)?.[1].lastElementChild ?? out).appendChild(make("p"));
      }
      inline(words, line.trim());
    }
  }
  return out;
}

// ---- what survives a reload: the conversation, in this tab alone; never the key

const KEPT = "outpace.conversation";

function keep() {
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(messages));
  } catch {
    // a browser that keeps nothing, or has no room
  }
}

function restore() {
  try {
    for (const { role, content } of JSON.parse(sessionStorage.getItem(KEPT) || "[]")) {
      messages.push({ role, content });
      if (role === "user") turn("user", content);
      else new Answer(null).recall(content);
    }
  } catch {
    messages.length = 0;
  }
  mayRepeat();
}

// Only the last answer can be made anew.
function mayRepeat() {
  const all = [...document.querySelectorAll(".repeat")];
  for (const button of all) button.hidden = button !== all.at(-1);
}

// ---- an answer

function turn(role, text) {
  at("hint").hidden = true;
  const box = make("div", `turn ${role}`, text);
  at("talk").append(box);
  box.scrollIntoView({ block: "end" });
  return box;
}

function mark(name) {
  if (name === "target") return "target";
  if (!writers.has(name)) {
    writers.set(name, writers.size % STYLES);
    legend();
  }
  return `by${writers.get(name)}`;
}

function legend() {
  const line = (classes, words, full = "") => {
    const out = make("li");
    out.append(make("span", `token ${classes}`, "word"), words);
    out.title = full;
    return out;
  };
  at("legend").replaceChildren(
    ...(writers.size
      ? [...writers].map(([name, number]) => line(`by${number}`, `guessed by ${brief(name)}`, name))
      : [line("by0", "guessed by a drafter")]),
    line("target", "by the model itself"),
  );
}

class Answer {
  constructor(sent) {
    this.sent = sent;
    this.drafter = sent?.speculation.drafter;
    this.box = turn("assistant", "");
    this.words = this.box.appendChild(make("div", "words"));
    this.words.classList.toggle("coloured", at("colours").checked);
    this.page = this.box.appendChild(make("div", "page"));
    this.page.hidden = true;
    const foot = this.box.appendChild(make("div", "foot"));
    this.cost = foot.appendChild(make("span", "quiet"));
    this.again = foot.appendChild(make("button", "again", "Run plainly too"));
    this.again.type = "button";
    this.again.hidden = true;
    this.again.addEventListener("click", () => compare(this));
    this.view = foot.insertBefore(make("button", "view"), this.again);
    this.view.type = "button";
    this.view.hidden = true;
    this.view.addEventListener("click", () => this.look(this.page.hidden));
    this.copy = foot.insertBefore(copier("Copy", () => this.text), this.again);
    this.repeat = foot.insertBefore(make("button", "repeat", "Regenerate"), this.again);
    this.repeat.type = "button";
    this.repeat.addEventListener("click", () => regenerate(this));
    this.copy.hidden = this.repeat.hidden = true;
    this.text = "";
    this.tokens = this.kept = this.passes = 0;
    this.first = null;
  }

  take(chunk) {
    this.text += chunk.choices[0].delta.content || "";
    const trace = chunk.outpace;
    if (!trace) return;
    const now = performance.now();
    if (this.first === null) this.first = now;
    const below = this.below();
    if (trace.draft) this.passes += 1;
    const written = make("span", "pass");
    for (const { text, by } of trace.tokens) {
      this.tokens += 1;
      this.kept += by === "target" ? 0 : 1;
      const token = make("span", `token ${mark(by)}`, text);
      token.dataset.by = by;
      written.append(token);
    }
    passes.set(written, { number: this.passes, tokens: trace.tokens, draft: trace.draft });
    written.tabIndex = this.words.childElementCount ? -1 : 0; // arrow keys lead to the others
    written.setAttribute("role", "group");
    written.setAttribute("aria-label", `${trace.tokens.map((one) => one.text).join("")}: ` +
      caption(passes.get(written)));
    this.words.append(written);
    const rate = (1000 * (this.tokens - 1)) / (now - this.first);
    const emitted = this.passes ? (this.tokens - 1) / this.passes : 1;
    this.say(`${count(this.tokens, "token")}, ${decimal(rate)} tokens/s, ${this.kept} guessed`);
    speed(this.drafter, rate, emitted);
    if (below) this.box.scrollIntoView({ block: "end" });
  }

  say(line) {
    this.cost.textContent = line;
  }

  // Show it as a page, or token by token.
  look(page) {
    hide(true);
    this.page.hidden = !page;
    this.words.hidden = page;
    this.view.textContent = page ? "Who wrote what" : "As a page";
  }

  // It has ended: Markdown is shown as it is meant.
  settle() {
    this.copy.hidden = this.repeat.hidden = false;
    mayRepeat();
    if (!holdsMarkdown(this.text)) return;
    this.page.replaceChildren(formatted(this.text));
    this.view.hidden = !this.sent;
    this.look(true);
  }

  // One of an earlier load of this page; who wrote what is not known any more.
  recall(text) {
    this.text = text;
    this.words.textContent = text;
    this.settle();
  }

  end({ usage, metrics }) {
    this.rate = metrics.tokens_per_second;
    this.metrics = metrics;
    const guessed = percent(this.kept / Math.max(1, this.tokens));
    sum(usage, metrics);
    this.say(
      `${count(usage.completion_tokens, "token")}, ${decimal(this.rate)} tokens/s, ` +
        `${decimal(metrics.mean_emitted, 2)} emitted per pass, ${guessed} guessed, ` +
        `drafter ${brief(metrics.drafter)}, seed ${metrics.seed}`,
    );
    this.cost.title = metrics.drafter;
    speed(this.drafter, this.rate, metrics.mean_emitted);
    const below = this.below();
    this.again.hidden = this.drafter === PLAIN;
    if (below) this.box.scrollIntoView({ block: "end" });
  }

  // Whether the reader is at the end of the conversation, and has not gone back.
  below() {
    return at("talk").scrollHeight - at("talk").scrollTop - at("talk").clientHeight < 90;
  }

  fail(error) {
    if (error.name === "AbortError") return this.say("stopped");
    this.box.classList.add("wrong");
    return this.say(error.message);
  }
}

async function ask(text) {
  if (model === null) await connect();
  if (model === null) return;
  messages.push({ role: "user", content: text });
  turn("user", text);
  await answer();
}

// Remove the last answer, and let the model write another one.
async function regenerate(old) {
  if (running) return;
  if (model === null) await connect();
  if (model === null) return;
  if (messages.at(-1)?.role === "assistant") messages.pop();
  if (messages.at(-1)?.role !== "user") return;
  hide(true);
  old.box.remove();
  await answer();
}

// Answer the last message.
async function answer() {
  const text = messages.at(-1).content;
  keep();
  const system = at("system").value.trim();
  const history = system ? [{ role: "system", content: system }, ...messages] : [...messages];
  const given = at("seed").value;
  const seed = given === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number(given);
  const made = new Answer(body(history, at("drafter").value, seed));
  try {
    made.end(await stream(made.sent, (chunk) => made.take(chunk)));
    at("told").textContent = `Answer: ${made.text}`;
  } catch (error) {
    made.fail(error);
  }
  // A conversation that was begun anew meanwhile goes on without this answer.
  if (messages.at(-1)?.content === text && messages.at(-1).role === "user") {
    if (made.text) messages.push({ role: "assistant", content: made.text });
    else messages.pop();
    keep();
    if (made.text) made.settle();
    if (made.box.getBoundingClientRect().bottom > innerHeight / 2) made.box.scrollIntoView({ block: "end" });
  }
  at("text").focus();
  figures();
}

// The same request without a drafter: both speeds, and whether the texts are equal.
async function compare(answer) {
  if (running) return;
  answer.again.disabled = true;
  answer.compared?.remove();
  const box = (answer.compared = answer.box.appendChild(make("div", "compared")));
  const line = box.appendChild(make("p", "quiet", "plain decoding: waiting"));
  box.scrollIntoView({ block: "nearest" });
  let text = "";
  let tokens = 0;
  try {
    const sent = { ...answer.sent, speculation: { ...answer.sent.speculation, drafter: PLAIN } };
    const { usage, metrics } = await stream(sent, (chunk) => {
      text += chunk.choices[0].delta.content || "";
      tokens += chunk.outpace ? chunk.outpace.tokens.length : 0;
      line.textContent = `plain decoding: ${count(tokens, "token")}`;
    });
    sum(usage, metrics);
    const rate = metrics.tokens_per_second;
    const most = Math.max(rate, answer.rate);
    const bars = make("div", "bars");
    bars.append(...bar(answer.drafter, answer.rate, most, ""),
      ...bar("plain decoding", rate, most, "plain"));
    const result = make("p");
    const ratio = `${decimal(answer.rate / rate, 2)} times the speed of plain decoding`;
    const same = text === answer.text && tokens === answer.tokens;
    result.className = same ? "same" : "differ";
    result.textContent = same
      ? `${ratio}, measured; the texts are equal (${count(tokens, "token")}).`
      : `${ratio}, measured; the texts differ ${difference(text, answer.text)}. Rounding may ` +
        "decide between two tokens that are about as likely.";
    box.replaceChildren(bars, result);
    if (!same) {
      const more = box.appendChild(make("details"));
      more.append(make("summary", "", "The plain text"), make("pre", "", text));
    }
    at("told").textContent = result.textContent;
    speed(answer.drafter, answer.rate, answer.metrics.mean_emitted);
    box.scrollIntoView({ block: "nearest" });
  } catch (error) {
    line.textContent = error.name === "AbortError" ? "stopped" : error.message;
  }
  answer.again.disabled = false;
  figures();
}

function difference(one, other) {
  const [a, b] = [[...one], [...other]];
  const place = a.findIndex((char, index) => char !== b[index]);
  return `from character ${(place < 0 ? a.length : place) + 1} on`;
}

// ---- figures

function sum(usage, metrics) {
  const zero = { tokens: 0, later: 0, seconds: 0, passes: 0, accepted: 0, drafted: 0 };
  const own = totals.get(metrics.drafter) || zero;
  const later = Math.max(0, usage.completion_tokens - 1);
  own.tokens += usage.completion_tokens;
  own.later += later;
  own.seconds += metrics.seconds - metrics.prefill_seconds;
  own.passes += metrics.passes;
  for (const one of Object.values(metrics.by_drafter)) {
    own.accepted += one.accepted;
    own.drafted += one.drafted;
  }
  totals.set(metrics.drafter, own);
  rows("mine", [...totals].map(([name, s]) => [
    named(name), s.tokens, decimal(s.later / s.seconds), decimal(s.later / s.passes, 2),
    share(s.accepted, s.drafted),
  ]));
}

const share = (part, all) => (all ? `${part} / ${all} (${percent(part / all)})` : "-");

function named(spec) {
  const out = make("span", "", brief(spec));
  out.title = spec;
  return out;
}

function rows(id, table) {
  at(id).tBodies[0].replaceChildren(...table.map((cells) => {
    const row = make("tr");
    for (const cell of cells) row.insertCell().append(cell);
    return row;
  }));
}

// What /metrics says: name -> [labels, value].
function read(text) {
  const out = new Map();
  for (const line of text.split("\n")) {
    const found = /^outpace:(\w+?)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, char) => (char === "n" ? "\n" : char));
    }
    if (!out.has(found[1])) out.set(found[1], []);
    out.get(found[1]).push([labels, Number(found[3])]);
  }
  return out;
}

async function figures() {
  try {
    const response = await fetch("metrics", { headers: headers() });
    if (!response.ok) return;
    const found = read(await response.text());
    const of = (name) => found.get(name) || [];
    const by = (name, drafter) => of(`spec_decode_${name}_total`)
      .filter(([labels]) => labels.drafter === drafter);
    rows("all", of("spec_decode_num_drafts_total").map(([{ drafter }, drafts]) => {
      const [drafted, accepted] = ["num_draft_tokens", "num_accepted_tokens"]
        .map((name) => by(name, drafter)[0]?.[1] ?? 0);
      const depths = by("num_accepted_tokens_per_pos", drafter)
        .sort(([a], [b]) => a.position - b.position).map(([, kept]) => kept / drafts);
      return [named(drafter), drafts, share(accepted, drafted), decimal(accepted / drafts, 2),
        columns(depths)];
    }));
    const now = (name) => of(name)[0]?.[1] ?? 0;
    at("load").textContent = `Now ${now("num_requests_running")} running, ` +
      `${now("num_requests_waiting")} waiting; others share passes and slow an answer down.`;
  } catch {
    at("load").textContent = "The figures of the server cannot be read.";
  }
}

function columns(shares) {
  const out = make("span", "depths");
  out.setAttribute("role", "img");
  out.title = shares.map(percent).join(", ") || "none";
  out.setAttribute("aria-label", out.title);
  for (const value of shares.slice(0, 16)) {
    out.appendChild(make("i")).style.height = `${Math.max(4, 100 * value)}%`;
  }
  return out;
}

// ---- the tree of a pass

function caption({ number, tokens, draft }) {
  if (!draft) return "the prompt\u2019s pass, 1 token emitted by the model";
  const emitted = `${count(tokens.length, "token")} emitted`;
  if (!draft.drafted) return `pass ${number}, nothing was guessed, ${emitted}`;
  const hidden = draft.drafted - draft.tokens.length;
  return `pass ${number}, ${draft.by}: ${draft.kept.length} of ` +
    `${count(draft.drafted, "guess", "guesses")} accepted, ${emitted}` + (hidden ? `; ${hidden} not shown` : "");
}

// Boxes, parents first; the accepted path is the top row.
function layout(draft) {
  const kept = new Set(draft.kept);
  const end = draft.kept.length ? draft.kept.at(-1) : -1;
  const asked = new Set([-1, ...draft.kept]);
  if (!draft.added) asked.delete(end); // a stop came first
  const children = new Map();
  draft.parents.forEach((parent, node) => {
    children.set(parent, [...(children.get(parent) || []), node]);
  });
  const spots = [{ text: draft.pending, role: "pending", level: 0, row: 0, parent: null }];
  let row = 0;
  const hang = (node, above) => {
    const all = children.get(node) || [];
    const below = all.filter((child) => kept.has(child));
    if (node === end && draft.added) below.push(null);
    below.push(...all.filter((child) => !kept.has(child)));
    below.forEach((child, order) => {
      row += order > 0 ? 1 : 0;
      const level = spots[above].level + 1;
      if (child === null) {
        spots.push({ ...draft.added, role: "added", level, row, parent: above });
        return;
      }
      const role = kept.has(child) ? "accepted" : asked.has(node) ? "refused" : "unreached";
      const [p, q] = [draft.p[child], draft.q[child]];
      spots.push({ text: draft.tokens[child], p, q, role, level, row, parent: above });
      hang(child, spots.length - 1);
    });
  };
  hang(-1, 0);
  return spots;
}

const SIGNS = { " ": "\u00b7", "\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d" };
const ROLES = { accepted: "accepted", added: "the model\u2019s own", refused: "refused",
  unreached: "not reached", pending: "pending" };

// A token with its blanks to be seen, cut if it is long.
function visible(text) {
  const signs = [...text].map((char) => SIGNS[char] ||
    (/\p{C}/u.test(char) ? `\\x${char.codePointAt(0).toString(16).padStart(2, "0")}` : char));
  return signs.length > 18 ? `${signs.slice(0, 17).join("")}\u2026` : signs.join("");
}

const BROAD = new RegExp("[\\u1100-\\u115f\\u2e80-\\ua4cf\\uac00-\\ud7a3\\uf900-\\ufaff\\ufe30-\\ufe6f" +
  "\\uff00-\\uff60]|\\p{Emoji_Presentation}", "u"); // two columns wide
const wide = (text) => [...text].reduce((all, char) => all + (BROAD.test(char) ? 2 : 1), 0);

function shape(tag, attributes, text = "") {
  const out = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) out.setAttribute(name, value);
  if (text) out.textContent = text;
  return out;
}

const [LEAST, HIGH, ROW, LETTER, GAP, EDGE] = [92, 42, 52, 7.9, 34, 4];

function picture(draft, said) {
  const spots = layout(draft);
  for (const spot of spots) {
    spot.label = visible(spot.text);
    spot.width = Math.max(LEAST, 20 + LETTER * wide(spot.label));
    spot.y = EDGE + spot.row * ROW;
  }
  const left = [EDGE];
  for (let level = 0; spots.some((spot) => spot.level === level); level += 1) {
    const widths = spots.filter((spot) => spot.level === level).map((spot) => spot.width);
    left.push(left[level] + Math.max(...widths) + GAP);
  }
  for (const spot of spots) spot.x = left[spot.level];
  const [width, height] = [left.at(-1) - GAP + EDGE, Math.max(...spots.map((s) => s.y)) + HIGH + EDGE];
  const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": said });
  const taken = (spot) => spot.role === "accepted" || spot.role === "added";
  for (const spot of [...spots].sort((a, b) => taken(a) - taken(b))) {
    if (spot.parent !== null) svg.append(edge(spots[spot.parent], spot));
  }
  svg.append(...spots.map(boxed));
  return svg;
}

function edge(from, to) {
  const [x, y, end] = [from.x + from.width, from.y + HIGH / 2, to.y + HIGH / 2];
  const bend = to.x - GAP / 2;
  const way = y === end ? `M${x} ${y}H${to.x}` : `M${x} ${y}H${bend - 8}Q${bend} ${y} ${bend} ${y + 8}` +
    `V${end - 8}Q${bend} ${end} ${bend + 8} ${end}H${to.x}`;
  return shape("path", { class: `edge ${to.role}`, d: way });
}

function boxed(spot) {
  const { x, y, width, role, p, q } = spot;
  const out = shape("g", { class: `node ${role}` });
  const shown = [["p", p], ["q", q]].filter(([, value]) => typeof value === "number");
  out.append(
    shape("title", {}, [JSON.stringify(spot.text), ROLES[role],
      ...shown.map(([name, value]) => `${name} ${value}`)].join(", ")),
    shape("rect", { class: "box", x, y, width, height: HIGH, rx: 7 }),
    shape("text", { class: "letters", x: x + 10, y: y + 17 }, spot.label),
  );
  const half = (width - 26) / 2;
  shown.forEach(([name, value], place) => {
    const from = x + 10 + place * (half + 6);
    const long = shown.length === 1 ? width - 20 : half;
    out.append(
      shape("text", { x: from, y: y + 30 }, `${name} ${percent(value)}`),
      shape("rect", { class: "rail", x: from, y: y + 34, width: long, height: 3, rx: 1.5 }),
      shape("rect", { class: `bar-${name}`, x: from, y: y + 34, width: long * value, height: 3, rx: 1.5 }),
    );
  });
  if (role === "refused") {
    out.append(shape("text", { class: "sign", x: x + width - 17, y: y + 16 }, "\u00d7"));
  }
  if (role === "pending") out.append(shape("text", { x: x + 10, y: y + 31 }, "pending"));
  return out;
}

const tree = { shown: null, pinned: false, timer: 0 };

function show(element, pin = false) {
  clearTimeout(tree.timer);
  if (tree.pinned && !pin) return;
  if (tree.shown !== element) {
    hide(true);
    const done = passes.get(element);
    const said = caption(done);
    at("what").textContent = said[0].toUpperCase() + said.slice(1);
    at("branches").replaceChildren(...(done.draft ? [picture(done.draft, said)] : []));
    element.classList.add("now");
    element.setAttribute("aria-describedby", "tree");
    tree.shown = element;
    at("tree").hidden = false;
    at("branches").scrollTo(0, 0);
  }
  tree.pinned = pin;
  at("tree").classList.toggle("pinned", pin);
  place();
}

// Below the words, or above them if there is more room; narrow screens have it at their foot.
function place() {
  const panel = at("tree");
  panel.style.left = panel.style.top = "";
  if (matchMedia("(max-width: 60rem)").matches) {
    const over = tree.shown.getBoundingClientRect().bottom + 8 - panel.getBoundingClientRect().top;
    const meant = tree.pinned || tree.shown === document.activeElement; // not a mouse passing by
    if (meant && over > 0) at("talk").scrollBy(0, over);
    return;
  }
  const word = tree.shown.getClientRects()[0] || tree.shown.getBoundingClientRect();
  const all = tree.shown.getBoundingClientRect();
  const { width, height } = panel.getBoundingClientRect();
  const fits = all.bottom + 8 + height < innerHeight || all.top < innerHeight - all.bottom;
  panel.style.left = `${Math.max(12, Math.min(word.left, innerWidth - width - 12))}px`;
  panel.style.top = `${Math.max(8, fits ? all.bottom + 8 : all.top - height - 8)}px`;
}

function hide(now = false) {
  clearTimeout(tree.timer);
  if (!now) {
    if (!tree.pinned) tree.timer = setTimeout(() => hide(true), 180);
    return;
  }
  tree.shown?.classList.remove("now");
  tree.shown?.removeAttribute("aria-describedby");
  tree.shown = null;
  tree.pinned = false;
  at("tree").hidden = true;
}

const passOf = (event) => event.target.closest?.(".pass");

at("talk").addEventListener("mouseover", (event) => passOf(event) && show(passOf(event)));
at("talk").addEventListener("mouseout", (event) => passOf(event) && hide());
at("tree").addEventListener("mouseenter", () => clearTimeout(tree.timer));
at("tree").addEventListener("mouseleave", () => hide());
at("talk").addEventListener("focusin", (event) => passOf(event) && show(passOf(event)));
at("talk").addEventListener("focusout", (event) => passOf(event) && hide());
at("talk").addEventListener("click", (event) => passOf(event) && show(passOf(event), true));
at("talk").addEventListener("scroll", () => tree.shown && place());
document.addEventListener("click", (event) => {
  if (!passOf(event) && !event.target.closest?.("#tree")) hide(true);
});
document.addEventListener("keydown", (event) => event.key === "Escape" && hide(true));
at("talk").addEventListener("keydown", (event) => {
  const here = passOf(event);
  if (!here) return;
  const all = here.parentElement.children;
  const next = {
    ArrowRight: here.nextElementSibling, ArrowLeft: here.previousElementSibling,
    Home: all[0], End: all[all.length - 1],
  }[event.key];
  if (event.key === "Enter" || event.key === " ") show(here, true);
  else if (next) {
    here.tabIndex = -1;
    next.tabIndex = 0;
    hide(true);
    next.focus();
  } else return;
  event.preventDefault();
});

// ---- the forms

function busy(on) {
  at("send").hidden = on;
  at("stop").hidden = !on;
  for (const button of document.querySelectorAll(".again, .repeat")) button.disabled = on;
}

function aside(on) {
  at("side").classList.toggle("open", on);
  at("more").setAttribute("aria-expanded", String(on));
  at("more").textContent = on ? "Conversation" : "Settings";
}

at("say").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || running) return;
  at("text").value = "";
  aside(false);
  ask(text);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("say").requestSubmit();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("more").addEventListener("click", () => aside(at("more").getAttribute("aria-expanded") !== "true"));
at("reset").addEventListener("click", () => {
  running?.abort();
  hide(true);
  messages.length = 0;
  keep();
  at("talk").replaceChildren(at("hint"));
  at("hint").hidden = false;
  aside(false);
});
at("colours").addEventListener("change", () => {
  for (const words of document.querySelectorAll(".words")) {
    words.classList.toggle("coloured", at("colours").checked);
  }
});
at("entry").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value;
  at("key").value = "";
  connect();
});
at("settings").addEventListener("submit", (event) => event.preventDefault());
legend();
restore();
connect();
