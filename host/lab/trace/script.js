"use strict";
// Draws #data: {command, kv, model, device, shape, shapes, tokens, n_prompt, states, steps, attention}. A step is what a decoded token found:
// {position, resident_bytes, state: [layer * heads + head]}, state an index into states: runs of "number letter", keys, "|" and values where they
// differ; s sink, c stored (codes), t exact and waiting, x gone. attention: what the newest query pays, sqrt(p) * 63 as
// characters from "0" on, [step][layer][head][position].
const page = JSON.parse(document.getElementById("data").textContent);
const get = (id) => document.getElementById(id);
const { n_layer: layers, n_kv_head: heads } = page.shape;
const streams = layers * heads;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const count = (value) => value.toLocaleString("en");
const names = { s: "exact, as a sink", c: "stored", t: "exact, until it is encoded", x: "gone" };
const expand = (runs) => runs.replace(/(\d+)([a-z])/g, (_, n, letter) => letter.repeat(+n));
const states = page.states.map((text) => { const [k, v] = text.split("|"); return [expand(k), expand(v ?? k)]; });
const begins = page.steps.map(((sum) => (step) => { const at = sum; sum += streams * step.position; return at; })(0));
let at = 0, layer = 0, head = 0, timer = 0, described = -1;

function element(name, attributes, ...children) {
  const node = name.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const bytes = (n) => { const units = ["B", "kB", "MB", "GB", "TB"]; let i = 0; while (n >= 1000 && i < 4) { n /= 1000; i++; } return `${+n.toPrecision(4)} ${units[i]}`; };
const mass = (step, stream, position) => ((page.attention.charCodeAt(begins[step] + stream * page.steps[step].position + position) - 48) / 63) ** 2;
const held = (step, stream) => [...states[page.steps[step].state[stream]][0]].filter((c) => c !== "x").length;
// [step]: tokens that all streams together hold; [step][position]: the streams that hold a token.
const holders = page.steps.map((step) => Array.from({ length: step.position }, (_, i) => step.state.filter((number) => states[number][0][i] !== "x").length));
const reads = holders.map((step) => step.reduce((sum, n) => sum + n, 0));

// ---- with a cache and without ----

function showWork() {
  const canvas = document.querySelector("#work canvas"), ctx = canvas.getContext("2d"), cached = get("cached").checked;
  const rows = page.steps.length, tokens = page.steps[rows - 1].position;
  canvas.width = tokens * 6;
  canvas.height = rows * 6;
  const cell = (x, y, color, share) => { ctx.globalAlpha = share; ctx.fillStyle = style(color); ctx.fillRect(x * 6, y * 6, 5, 5); };
  for (let s = 0; s <= at; s++) {
    const n = page.steps[s].position, first = s === 0 ? 0 : page.steps[s - 1].position;
    for (let t = 0; t < n; t++) cell(t, s, t >= first ? "--computed" : cached ? "--read" : "--again", t < first && cached ? holders[s][t] / streams : 1);
  }
  const computed = (s) => (cached ? page.steps[s].position - (s ? page.steps[s - 1].position : 0) : page.steps[s].position) * streams;
  const read = (s) => (cached && s > 0 ? reads[s] : 0);
  const sum = (of) => { let all = 0; for (let s = 0; s <= at; s++) all += of(s); return all; };
  get("computed").textContent = count(computed(at));
  get("computed-all").textContent = count(sum(computed));
  get("read").textContent = count(read(at));
  get("read-all").textContent = count(sum(read));
}

// ---- schemes ----

// The model's own groups if it has them, else 8 query heads a key.
const width = (s) => s.key_dim + s.value_dim;
const groups = (s) => (s.n_kv_head > 1 && s.n_kv_head < s.n_head ? s.n_kv_head : Math.max(1, Math.round(s.n_head / 8)));
const schemes = {
  MHA: (s) => ({ boxes: s.n_head, elements: s.n_head * width(s) }),
  GQA: (s) => { const n = groups(s); return { boxes: n, elements: n * width(s) }; },
  MQA: (s) => ({ boxes: 1, elements: width(s) }),
  MLA: (s) => ({ boxes: 1, elements: s.joint || 4.5 * s.key_dim }), // else DeepSeek-V2's proportions: a latent of 4 heads, half a head rotated
};
const own = (s) => (s.joint ? "MLA" : s.n_kv_head === s.n_head ? "MHA" : s.n_kv_head === 1 ? "MQA" : "GQA");

function showScheme(name) {
  const shape = page.shape, { boxes } = schemes[name](shape), q = shape.n_head, svg = get("heads");
  const x = (i, n) => 360 + (i - (n - 1) / 2) * Math.min(60, 700 / Math.max(q, n));
  const width = Math.min(44, 600 / q), parts = [];
  for (let i = 0; i < q; i++) {
    const below = Math.floor((i * boxes) / q);
    parts.push(element("svg:line", { x1: x(i, q), y1: 32, x2: x(below, boxes), y2: 72 }), element("svg:rect", { x: x(i, q) - width / 2, y: 14, width, height: 18, fill: style("--exact") }));
  }
  for (let i = 0; i < boxes; i++) parts.push(element("svg:rect", { x: x(i, boxes) - width / 2, y: 72, width, height: 18, fill: style("--codes") }));
  const note = (y, words) => { const node = element("svg:text", { x: 4, y }, words); return node; };
  svg.replaceChildren(...parts, note(10, `${q} query heads`), note(106, name === "MLA" ? "one latent and a rotated part" : `${boxes} kv head${boxes > 1 ? "s" : ""}`));
  const body = page.shapes.map((s) => {
    const per = 2 * s.n_layer * schemes[name](s).elements;
    return element("tr", {}, element("th", { scope: "row" }, s.name), element("td", {}, count(per)), element("td", {}, bytes(per * 131072)));
  });
  get("sizes").replaceChildren(element("thead", {}, element("tr", {}, ...["16 bit, if it were " + name, "bytes a token", "131,072 tokens"].map((h) => element("th", { scope: "col" }, h)))), element("tbody", {}, ...body));
}

for (const name of Object.keys(schemes)) {
  const input = element("input", { type: "radio", name: "scheme", value: name });
  input.checked = name === own(page.shape);
  input.addEventListener("change", () => showScheme(name));
  get("scheme").append(element("label", {}, input, name === own(page.shape) ? ` ${name} (this model)` : ` ${name}`));
}

// ---- the run ----

const buttons = page.tokens.map((token, i) => {
  const line = element("i"), button = element("button", { type: "button" }, token.text.replace(/\n/g, "\u21b5") || "\u00a0", line);
  for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => describe(i));
  return button;
});
get("tokens").append(...buttons);

function describe(i) {
  const step = page.steps[at], stream = layer * heads + head;
  if (i >= step.position) return;
  described = i;
  const [k, v] = states[step.state[stream]];
  let kept = 0, most = 0;
  for (let s = 0; s < streams; s++) {
    if (states[step.state[s]][0][i] !== "x") kept++;
    most = Math.max(most, mass(at, s, i));
  }
  const percent = (p) => `${(100 * p).toPrecision(2)} %`;
  get("about-token").textContent = `Token ${i} \u201c${page.tokens[i].text}\u201d (${i < page.n_prompt ? "prompt" : "generated"}). Layer ${layer}, head ${head}: key ${names[k[i]]}, value ${names[v[i]]}; ` +
    `the newest query pays it ${percent(mass(at, stream, i))}. Held by ${kept} of ${streams} streams; at most ${percent(most)} anywhere.`;
}

function showRun() {
  const step = page.steps[at], stream = layer * heads + head, [k, v] = states[step.state[stream]];
  const color = (c) => (c === "x" ? "transparent" : `var(--${c === "c" ? "codes" : "exact"})`);
  buttons.forEach((button, i) => {
    button.className = i >= step.position ? "later" : k[i] === "x" && v[i] === "x" ? "gone" : i === step.position - 1 ? "newest" : "";
    if (i >= step.position) return;
    button.style.background = `linear-gradient(${color(k[i])} 50%, ${color(v[i])} 50%)`;
    button.lastChild.style.width = `${Math.sqrt(mass(at, stream, i)) * 100}%`;
  });
  if (described >= 0) describe(described); // it may be gone by now, or attended to otherwise
  const svg = get("streams"), size = 700 / Math.max(layers, 12), box = Math.min(size, 24);
  svg.setAttribute("viewBox", `0 0 ${layers * box} ${heads * box}`);
  svg.style.maxWidth = `${layers * box}px`;
  svg.replaceChildren(...Array.from({ length: streams }, (_, s) => {
    const l = Math.floor(s / heads), h = s % heads, n = held(at, s);
    const rect = element("svg:rect", { x: l * box, y: h * box, width: box, height: box, fill: style("--read"), "fill-opacity": 0.1 + (0.9 * n) / step.position }, element("svg:title", {}, `layer ${l}, head ${h}: ${n} of ${step.position} tokens`));
    if (s === stream) rect.setAttribute("class", "chosen");
    rect.addEventListener("click", () => { layer = l; head = h; get("layer").value = l; get("head").value = h; showRun(); });
    return rect;
  }));
}

function show() {
  const step = page.steps[at];
  get("step").value = at;
  get("where").textContent = `${at === 0 ? "prompt" : `token ${at} of ${page.steps.length - 1}`}; ${step.position} tokens seen, cache ${bytes(step.resident_bytes)}`;
  showWork();
  showRun();
}

function go(to) {
  at = Math.min(Math.max(to, 0), page.steps.length - 1);
  show();
}

function play() {
  const stop = timer !== 0 || at === page.steps.length - 1;
  clearInterval(timer);
  timer = stop ? 0 : setInterval(() => { go(at + 1); if (at === page.steps.length - 1) play(); }, 400);
  get("play").textContent = timer ? "pause" : "play";
}

get("about").textContent = `${page.model}, cache ${page.kv}, ${page.device}. `;
get("about").after(element("details", {}, element("summary", {}, "The command that made this page"), element("code", {}, page.command)));
get("step").max = page.steps.length - 1;
get("step").addEventListener("input", () => go(+get("step").value));
for (const [id, to] of [["first", () => 0], ["back", () => at - 1], ["next", () => at + 1], ["last", () => page.steps.length - 1]]) get(id).addEventListener("click", () => go(to()));
get("play").addEventListener("click", play);
get("cached").addEventListener("change", showWork);
for (const [id, n, set] of [["layer", layers, (x) => { layer = x; }], ["head", heads, (x) => { head = x; }]]) {
  get(id).append(...Array.from({ length: n }, (_, i) => element("option", { value: i }, String(i))));
  get(id).addEventListener("change", () => { set(+get(id).value); showRun(); });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
showScheme(own(page.shape));
show();
