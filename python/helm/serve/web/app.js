// The chat page. It talks to /v1/chat/completions of the server that it came from, and to nobody
// else. Text of models and users reaches the document as text alone.

const PREFIX = "helm.conversation.";
const SETTINGS = "helm.settings";
const CURRENT = "helm.current"; // of this tab
const KEY = "helm.key"; // of this tab
const SAMPLING = ["temperature", "top_p", "max_tokens", "seed"];
const SAVE_EVERY_MS = 2000; // while an answer comes
// Longer text is shown without a search for marks, whose time may grow with the square.
const LONGEST_INLINE = 6000; // characters of a paragraph
const LONGEST_LINE = 1000; // of a fence, heading, rule or table's divider
const MOST_NESTED = 8; // lists in each other

const $ = (id) => document.getElementById(id);
const conversations = new Map(); // by id
const views = new WeakMap(); // of messages that are shown
let current = null; // the conversation that is shown
let settings = { system: "", thinking: "" };
let model = "";
let leaving = false; // whether the browser takes the page away
let answering = null; // {conversation, message, controller}, while an answer comes

// ---- What is kept in the browser ----

function stored(store, name, otherwise) {
  try {
    return JSON.parse(store.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function keep(store, name, value) {
  try {
    store.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    notify("This browser keeps no more: its storage is full or turned off.");
    return false;
  }
}

function readConversation(id) {
  const found = stored(localStorage, PREFIX + id, null);
  const whole = found && typeof found.title === "string" && Array.isArray(found.messages)
    && found.messages.every((m) => m && typeof m.role === "string" && typeof m.content === "string");
  if (whole) conversations.set(id, { system: "", changed: 0, ...found, id });
  else conversations.delete(id);
}

function readAll() {
  for (let i = 0; i < localStorage.length; i++) {
    const name = localStorage.key(i);
    if (name.startsWith(PREFIX)) readConversation(name.slice(PREFIX.length));
  }
}

function save(conversation) {
  conversation.changed = Date.now();
  keep(localStorage, PREFIX + conversation.id, conversation);
}

function newestFirst() {
  return [...conversations.values()].sort((a, b) => b.changed - a.changed);
}

function begun() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  const id = [...bytes].map((b) => b.toString(16).padStart(2, "0")).join("");
  return { id, title: "", system: settings.system, messages: [], changed: Date.now() };
}

// ---- Elements ----

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const use = document.createElementNS(space, "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

function button(name, label, action, named = false) {
  const made = el("button", { class: "quiet", type: "button", title: label }, icon(name));
  if (named) {
    made.dataset.named = "";
    made.append(label);
  } else made.setAttribute("aria-label", label);
  made.addEventListener("click", () => action(made));
  return made;
}

function notify(text, label = "", action = null) {
  const close = button("close", "Close this message", hideNotice);
  const parts = [el("span", {}, text)];
  if (action) {
    const act = el("button", { class: "quiet", type: "button" }, label);
    act.addEventListener("click", () => {
      hideNotice();
      action();
    });
    parts.push(act);
  }
  $("notice").replaceChildren(...parts, close);
  $("notice").hidden = false;
}

function hideNotice() {
  const inside = $("notice").contains(document.activeElement);
  $("notice").hidden = true;
  if (inside) $("input").focus();
}

const announce = (text) => ($("status").textContent = text);

async function copy(text, asked) {
  const label = asked.lastChild.nodeType === Node.TEXT_NODE ? asked.lastChild : null;
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // only https and localhost may use the clipboard
    const area = el("textarea", { class: "hidden", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    asked.focus();
  }
  announce(done ? "Copied" : "Copying failed");
  if (!label || !done) return;
  label.data = "Copied";
  setTimeout(() => (label.data = "Copy"), 1500);
}

// ---- Markdown, as nodes ----

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const DIVIDER = /^\s*\|?(\s*:?-+:?\s*\|)+\s*(:?-+:?\s*)?$/;
const INLINE = new RegExp([
  /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/, // 1, 2: code
  /\*\*(?=\S)([\s\S]*?\S)\*\*/, // 3: strong
  /\*(?=[^\s*])([^*\n]*?[^\s*])\*(?!\*)/, // 4: emphasis
  /\[([^\]\n]+)\]\((https?:\/\/[^\s()]+)\)/, // 5, 6: a link
  /(https?:\/\/[^\s<>"'()\]`*]*[^\s<>"'()\]`*.,;:!?])/, // 7: an address
].map((r) => r.source).join("|"), "g");

const like = (form, line) => (line.length > LONGEST_LINE ? null : form.exec(line));

function blocksOf(text) {
  const lines = text.split("\n");
  const blocks = [];
  let i = 0;
  const take = (kind, wanted) => {
    const start = i;
    do i++; while (i < lines.length && wanted(lines[i]));
    blocks.push({ kind, lines: lines.slice(start, i) });
  };
  const plain = (line) => line.trim() && !like(FENCE, line) && !like(HEADING, line)
    && !like(RULE, line) && !ITEM.test(line) && !line.startsWith(">");
  while (i < lines.length) {
    const line = lines[i];
    const fence = like(FENCE, line);
    if (!line.trim()) i++;
    else if (fence) {
      const closes = (l) => l.trim().startsWith(fence[1]) && !l.trim().replaceAll(fence[1][0], "");
      const start = ++i;
      while (i < lines.length && !closes(lines[i])) i++;
      blocks.push({ kind: "code", language: fence[2], lines: lines.slice(start, i++) });
    } else if (like(HEADING, line)) take("heading", () => false);
    else if (like(RULE, line)) take("rule", () => false);
    else if (line.startsWith(">")) take("quote", (l) => l.startsWith(">"));
    else if (ITEM.test(line)) {
      take("list", (l) => ITEM.test(l) || /^\s{2,}\S/.test(l) || (plain(l) && lines[i - 1].trim()));
    } else if (line.includes("|") && like(DIVIDER, lines[i + 1] ?? "")) {
      take("table", (l) => l.includes("|"));
    } else take("text", plain);
  }
  return blocks;
}

function inline(parent, text, depth = 0) {
  if (text.length > LONGEST_INLINE || depth > 4) {
    parent.append(text);
    return parent;
  }
  let end = 0;
  for (const m of text.matchAll(INLINE)) {
    parent.append(text.slice(end, m.index));
    end = m.index + m[0].length;
    if (m[1]) parent.append(el("code", {}, m[2]));
    else if (m[3]) inline(parent.appendChild(el("strong")), m[3], depth + 1);
    else if (m[4]) inline(parent.appendChild(el("em")), m[4], depth + 1);
    else {
      const href = m[6] ?? m[7];
      const link = el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" });
      link.append(m[5] ?? href);
      parent.append(link);
    }
  }
  parent.append(text.slice(end));
  return parent;
}

function listOf(lines, depth = 0) {
  const first = ITEM.exec(lines[0]);
  const indent = first[1].length;
  const ordered = /\d/.test(first[2]);
  const list = el(ordered ? "ol" : "ul");
  if (ordered) list.start = parseInt(first[2], 10);
  for (let i = 0; i < lines.length;) {
    const text = [ITEM.exec(lines[i])?.[3] ?? lines[i].trim()];
    const start = ++i;
    while (i < lines.length && !(ITEM.exec(lines[i])?.[1].length <= indent)) i++;
    const inner = lines.slice(start, i);
    const nested = depth < MOST_NESTED ? inner.findIndex((line) => ITEM.test(line)) : -1;
    text.push(...inner.slice(0, nested < 0 ? inner.length : nested).map((line) => line.trim()));
    const item = inline(el("li"), text.join("\n"));
    if (nested >= 0) item.append(listOf(inner.slice(nested), depth + 1));
    list.append(item);
  }
  return list;
}

function tableOf(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((c) => c.trim());
  const right = cells(lines[1]).map((c) => /^-+:$/.test(c));
  const cell = (tag, text, i) => inline(el(tag, right[i] ? { class: "right" } : {}), text);
  const row = (line, tag) => el("tr", {}, ...cells(line).map((c, i) => cell(tag, c, i)));
  const body = el("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return el("div", { class: "table", tabindex: "0" },
    el("table", {}, el("thead", {}, row(lines[0], "th")), body));
}

function codeOf(language, lines) {
  const text = lines.join("\n");
  const copies = button("copy", "Copy", (asked) => copy(text, asked), true);
  return el("div", { class: "code" },
    el("div", { class: "code-head" }, el("span", {}, language || "text"), copies),
    el("pre", { tabindex: "0" }, el("code", {}, text)));
}

function nodeOf(block) {
  const { kind, lines } = block;
  if (kind === "code") return codeOf(block.language, lines);
  if (kind === "list") return listOf(lines);
  if (kind === "table") return tableOf(lines);
  if (kind === "rule") return el("hr");
  if (kind === "quote") return inline(el("blockquote"), lines.map((l) => l.replace(/^> ?/, "")).join("\n"));
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]);
    return inline(el(`h${Math.min(marks.length + 2, 5)}`), text);
  }
  return inline(el("p"), lines.join("\n"));
}

/** Shows Markdown in `body`; only blocks that changed are made anew. */
function showMarkdown(body, text) {
  const blocks = blocksOf(text);
  const shown = [...body.children];
  blocks.forEach((block, i) => {
    const source = JSON.stringify(block);
    if (shown[i]?.source === source) return;
    const node = nodeOf(block);
    node.source = source;
    if (shown[i]) shown[i].replaceWith(node);
    else body.append(node);
  });
  shown.slice(blocks.length).forEach((node) => node.remove());
}

// ---- Views ----

function showList() {
  const shown = newestFirst().map((conversation) => {
    const open = el("button", { type: "button" }, conversation.title || "New conversation");
    if (conversation === current) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => {
      show(conversation);
      closeSidebar();
      $("input").focus();
    });
    return el("li", {}, open);
  });
  $("conversations").replaceChildren(...shown);
}

function show(conversation) {
  current = conversation;
  keep(sessionStorage, CURRENT, conversation.id);
  $("messages").replaceChildren();
  conversation.messages.forEach(showMessage);
  showAround();
  toEnd();
}

/** Everything but the messages' text. */
function showAround() {
  const { title, messages } = current;
  $("title").textContent = title || "New conversation";
  document.title = title ? `${title} · HELM` : "HELM";
  $("export").disabled = $("delete").disabled = !messages.length;
  $("messages").querySelector(".empty")?.remove();
  if (!messages.length) {
    $("messages").append(el("div", { class: "empty" }, icon("helm"),
      el("h2", {}, "What shall we work on?"),
      el("p", {}, "What you write goes to this server alone.")));
  }
  messages.forEach(showMeta);
  showList();
  showControls();
}

function showControls() {
  const stoppable = answering !== null;
  if (stoppable && document.activeElement === $("send")) $("input").focus();
  if (!stoppable && document.activeElement === $("stop")) $("input").focus();
  $("stop").hidden = !stoppable;
  $("send").hidden = stoppable;
  $("send").disabled = !$("input").value.trim();
}

function showMessage(message) {
  const mine = message.role === "user";
  const view = {
    article: el("article", { class: mine ? "user" : "assistant", "aria-label": mine ? "You" : "Model" }),
    body: el("div", { class: "body" }),
    meta: el("div", { class: "meta" }),
    thought: null,
  };
  views.set(message, view);
  view.article.append(view.body, view.meta);
  $("messages").append(view.article);
  showText(message);
}

function showText(message) {
  const view = views.get(message);
  if (!view?.article.isConnected) return;
  if (message.role === "user") {
    view.body.textContent = message.content;
    return;
  }
  const coming = answering?.message === message;
  if (message.reasoning) showThought(view, message, coming && !message.content);
  if (message.content) {
    view.body.querySelector(".wait")?.remove();
    showMarkdown(view.body, message.content);
  } else if (coming && !message.reasoning) {
    const wait = el("div", { class: "wait", role: "img", "aria-label": "Waiting for the model" });
    wait.append(el("i"), el("i"), el("i"));
    view.body.replaceChildren(wait);
  } else view.body.replaceChildren();
}

function showThought(view, message, thinking) {
  if (!view.thought) {
    view.thought = el("details", { class: "thought" }, el("summary"), el("div"));
    view.body.before(view.thought);
  }
  const [summary, text] = view.thought.children;
  const took = message.thoughtSeconds ? ` for ${message.thoughtSeconds.toFixed(1)} s` : "";
  summary.textContent = thinking ? "Thinking …" : `Thought${took}`;
  text.textContent = message.reasoning;
}

function figures(message) {
  const { tokens, rate, first } = message.figures ?? {};
  const parts = [];
  if (tokens) parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
  if (rate) parts.push(`${rate.toFixed(1)} tokens/s`);
  if (first) parts.push(`first after ${first.toFixed(2)} s`);
  const ended = { stopped: "stopped", length: "cut at the limit of tokens", broken: "broke off" };
  const finish = message.finish ?? "broken";
  if (finish in ended && !message.error) parts.push(ended[finish]);
  return parts.join(" · ");
}

function showMeta(message) {
  const view = views.get(message);
  if (!view) return;
  const place = current.messages.indexOf(message);
  const last = current.messages.length - 1;
  const coming = answering?.conversation === current;
  const mine = message.role === "user";
  const parts = [];
  if (answering?.message === message) parts.push(el("span", { class: "figures" }, message.progress ?? ""));
  else {
    if (message.content && !mine) parts.push(button("copy", "Copy", (b) => copy(message.content, b)));
    if (!mine && place === last && !coming) parts.push(button("retry", "Retry", retry, !!message.error));
    if (mine && place >= last - 1 && !coming) parts.push(button("edit", "Edit this message", edit));
    if (mine && place === last && !coming) parts.push(button("retry", "Retry", retry));
    if (!mine) parts.push(el("span", { class: "figures" }, figures(message)));
  }
  const focused = view.meta.contains(document.activeElement);
  view.meta.replaceChildren(...parts);
  if (focused) $("input").focus();
  view.article.querySelector(".error")?.remove();
  if (message.error) view.meta.before(el("p", { class: "error" }, message.error));
}

const nearEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 80;
const toEnd = () => ($("log").scrollTop = $("log").scrollHeight);

// ---- The server ----

function headers() {
  const key = stored(sessionStorage, KEY, "");
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

/** The server's own words about a response that is an error. */
async function refusal(response) {
  let said = "";
  try {
    said = (await response.json()).error?.message ?? "";
  } catch { /* no JSON: the status has to do */ }
  const wait = response.headers.get("retry-after");
  if (response.status === 401) said = `${said || "The server wants an API key."} The key belongs into the settings.`;
  if (response.status === 429 && wait) said = `${said || "The server is busy."} Try again in ${wait} s.`;
  return said || `The server answered with status ${response.status}.`;
}

async function connect() {
  try {
    const response = await fetch("/v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await refusal(response));
    model = (await response.json()).data[0].id;
    $("model").textContent = model;
    return true;
  } catch (error) {
    $("model").textContent = "not connected";
    const text = error instanceof TypeError ? "The server cannot be reached." : error.message;
    if (text.includes("settings")) notify(text, "Settings", openSettings);
    else notify(text, "Try again", connect);
    return false;
  }
}

/** The data of each event of a stream; null for a comment, which says that the server lives. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    held = (held + (value ?? "")).replaceAll("\r\n", "\n");
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((l) => l.startsWith("data:")).map((l) => l.slice(5).trimStart());
      yield data.length ? data.join("\n") : null;
    }
    if (done) return;
  }
}

/** The messages as the API wants them: answers without text left out, what the user said beside
    each other joined, since many chat templates insist on turns. */
function asked(conversation) {
  const messages = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  for (const { role, content } of conversation.messages) {
    if (!content) continue;
    const last = messages.at(-1);
    if (last?.role === role) last.content += `\n\n${content}`;
    else messages.push({ role, content });
  }
  return messages;
}

function request(conversation) {
  const body = { model, messages: asked(conversation), stream: true, stream_options: { include_usage: true } };
  for (const name of SAMPLING) if (typeof settings[name] === "number") body[name] = settings[name];
  if (settings.thinking) body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  return body;
}

// ---- An answer ----

async function answer() {
  const conversation = current;
  const message = { role: "assistant", content: "", reasoning: "" };
  conversation.messages.push(message);
  answering = { conversation, message, controller: new AbortController() };
  showMessage(message);
  showAround();
  toEnd();
  announce("The model answers.");
  const times = { sent: performance.now(), first: 0, last: 0, saved: 0 };
  const clock = setInterval(() => showProgress(message, times), 500);
  try {
    if (!model && !(await connect())) throw new Error("There is no connection to the server.");
    await receive(conversation, message, times);
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else if (!leaving) message.error = error instanceof TypeError ? "The connection to the server was lost." : error.message;
  }
  clearInterval(clock);
  finish(conversation, message, times);
}

async function receive(conversation, message, times) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers(),
    body: JSON.stringify(request(conversation)),
    signal: answering.controller.signal,
  });
  if (!response.ok) throw new Error(await refusal(response));
  for await (const data of events(response)) {
    if (data === null) continue;
    if (data === "[DONE]") break;
    take(JSON.parse(data), message, times);
    draw(message);
    if (performance.now() - times.saved > SAVE_EVERY_MS) {
      times.saved = performance.now();
      save(conversation);
    }
  }
  if (!message.finish) throw new Error("The answer broke off: the server ended it without a reason.");
}

/** One chunk of the stream. */
function take(chunk, message, times) {
  if (chunk.error) throw new Error(chunk.error.message ?? "The server reported an error.");
  const choice = chunk.choices?.[0];
  const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
  const text = choice?.delta?.content ?? "";
  if (thought || text) {
    times.last = performance.now();
    times.first ||= times.last;
    if (thought) times.thought ||= times.last;
    if (text && times.thought && !message.thoughtSeconds) {
      message.thoughtSeconds = (times.last - times.thought) / 1000;
    }
    message.reasoning += thought;
    message.content += text;
  }
  if (choice?.finish_reason) message.finish = choice.finish_reason;
  if (chunk.usage) message.figures = measured(chunk.usage, times);
}

/** tokens: of the answer. rate: tokens/s after the first, by the server's clock where it tells.
    first: seconds to the first token, as seen here. */
function measured(usage, times) {
  const tokens = usage.completion_tokens;
  const timings = usage.helm?.timings ?? {};
  const seconds = (times.last - times.first) / 1000;
  const seen = tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : 0;
  const served = timings.decode_s > 0 ? timings.decode_tokens / timings.decode_s : 0;
  const rate = served || seen;
  return { tokens, rate, first: times.first ? (times.first - times.sent) / 1000 : 0 };
}

function showProgress(message, times) {
  const seconds = Math.floor((performance.now() - times.sent) / 1000);
  const doing = times.first ? "" : "waiting, ";
  message.progress = seconds ? `${doing}${seconds} s` : "";
  const span = views.get(message)?.meta.querySelector(".figures");
  if (span && answering?.message === message) span.textContent = message.progress;
}

let drawing = 0;

/** Shows the message before the next frame, however many chunks come until then. */
function draw(message) {
  drawing ||= requestAnimationFrame(() => {
    drawing = 0;
    const follow = nearEnd();
    showText(message);
    if (follow) toEnd();
  });
}

function finish(conversation, message, times) {
  cancelAnimationFrame(drawing);
  drawing = 0;
  answering = null;
  delete message.progress;
  if (times.thought && !message.thoughtSeconds) {
    message.thoughtSeconds = (times.last - times.thought) / 1000;
  }
  if (conversations.has(conversation.id)) save(conversation);
  const follow = nearEnd();
  if (current === conversation) showText(message);
  showAround();
  if (follow) toEnd();
  announce(message.error ?? (message.content || "The answer is empty."));
}

// ---- What the user does ----

function send() {
  const content = $("input").value.trim();
  if (!content || answering) return;
  hideNotice();
  $("input").value = "";
  grow();
  const message = { role: "user", content };
  current.messages.push(message);
  if (!current.title) current.title = content.replace(/\s+/g, " ").slice(0, 60);
  conversations.set(current.id, current);
  save(current);
  showMessage(message);
  answer();
}

const stop = () => answering?.controller.abort();

function dropAnswer() {
  const last = current.messages.at(-1);
  if (last?.role !== "assistant") return;
  views.get(last)?.article.remove();
  current.messages.pop();
}

function retry() {
  if (answering) return;
  dropAnswer();
  $("input").focus();
  answer();
}

/** Takes the last message back into the field, its answer goes. */
function edit() {
  if (answering) return;
  dropAnswer();
  const mine = current.messages.pop();
  views.get(mine)?.article.remove();
  if (!current.messages.length) current.title = "";
  save(current);
  $("input").value = mine.content;
  grow();
  showAround();
  $("input").focus();
}

function startNew() {
  show(begun());
  closeSidebar();
  $("input").focus();
}

function remove() {
  const gone = current;
  if (answering?.conversation === gone) stop();
  conversations.delete(gone.id);
  localStorage.removeItem(PREFIX + gone.id);
  show(newestFirst()[0] ?? begun());
  notify("The conversation is deleted.", "Undo", () => {
    conversations.set(gone.id, gone);
    save(gone);
    show(gone);
    $("input").focus();
  });
  $("input").focus();
}

function download() {
  const { title, system, messages } = current;
  const text = JSON.stringify({ title, model, system, messages }, null, 2);
  const href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40);
  el("a", { href, download: `${name || "conversation"}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10000);
}

function grow() {
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight}px`;
  showControls();
}

// ---- Settings and the list on narrow screens ----

function openSettings() {
  $("system").value = current.system;
  for (const name of SAMPLING) $(name).value = settings[name] ?? "";
  $("thinking").value = settings.thinking;
  $("key").value = stored(sessionStorage, KEY, "");
  $("settings").showModal();
}

function saveSettings() {
  settings = { system: $("system").value, thinking: $("thinking").value };
  for (const name of SAMPLING) {
    const value = $(name).valueAsNumber;
    if (!Number.isNaN(value)) settings[name] = value;
  }
  keep(localStorage, SETTINGS, settings);
  current.system = settings.system;
  if (conversations.has(current.id)) save(current);
  keep(sessionStorage, KEY, $("key").value.trim());
  $("settings").close();
  hideNotice();
  connect();
}

const narrow = matchMedia("(max-width: 48rem)");

function openSidebar() {
  $("sidebar").classList.add("open");
  $("shade").hidden = false;
  document.querySelector("main").inert = true;
  $("open-sidebar").setAttribute("aria-expanded", "true");
  $("close-sidebar").focus();
}

function closeSidebar() {
  if (!$("sidebar").classList.contains("open")) return;
  $("sidebar").classList.remove("open");
  $("shade").hidden = true;
  document.querySelector("main").inert = false;
  $("open-sidebar").setAttribute("aria-expanded", "false");
  $("open-sidebar").focus();
}

function onKey(event) {
  if (event.key !== "Escape" || $("settings").open) return;
  if ($("sidebar").classList.contains("open")) closeSidebar();
  else stop();
}

function onInputKey(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
}

/** Another tab has changed something. */
function onStorage(event) {
  if (!event.key?.startsWith(PREFIX)) return;
  const id = event.key.slice(PREFIX.length);
  if (answering?.conversation.id === id) return;
  readConversation(id);
  if (current.id === id) show(conversations.get(id) ?? begun());
  else showList();
}

function begin() {
  settings = { ...settings, ...stored(localStorage, SETTINGS, {}) };
  readAll();
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("settings-form").addEventListener("submit", (event) => {
    event.preventDefault();
    saveSettings();
  });
  $("input").addEventListener("input", grow);
  $("input").addEventListener("keydown", onInputKey);
  document.addEventListener("keydown", onKey);
  window.addEventListener("storage", onStorage);
  window.addEventListener("pagehide", () => {
    leaving = true;
    if (answering) save(answering.conversation);
  });
  window.addEventListener("pageshow", () => (leaving = false));
  narrow.addEventListener("change", closeSidebar);
  for (const [id, action] of Object.entries({
    stop, new: startNew, delete: remove, export: download, shade: closeSidebar,
    "open-settings": openSettings, "close-settings": () => $("settings").close(),
    "open-sidebar": openSidebar, "close-sidebar": closeSidebar,
  })) $(id).addEventListener("click", action);
  show(conversations.get(stored(sessionStorage, CURRENT, "")) ?? newestFirst()[0] ?? begun());
  $("input").focus();
  connect();
}

begin();
