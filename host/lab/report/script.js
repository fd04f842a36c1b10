"use strict";
// Draws the page from the run files' trees in #data: {command, runs: [tree]}; a tree is what `kvlab log show --json` prints, less /steps.
const page = JSON.parse(document.getElementById("data").textContent);
// Strategies that need no method: {name, what, pattern of the resolved spec, shape of the point}.
const controls = JSON.parse(document.getElementById("controls").textContent).map((control) => ({ ...control, pattern: new RegExp(control.pattern) }));
const colors = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bb7744", "#888888"]; // Paul Tol's bright
const text = (value) => (value === undefined || value === null ? "" : String(value));
const shown = (value) => (typeof value !== "number" ? text(value) : Number.isInteger(value) ? value.toLocaleString("en") : String(+value.toPrecision(6)));
const column = (run, group, name) => run[group]?.data?.[name]?.values ?? [];

// One flat row a run, named as `kvlab log export` names its columns.
function flat(run) {
  const row = { tree: run };
  for (const [key, value] of Object.entries(run)) {
    if (typeof value !== "object") row[key] = value;
    else for (const [name, item] of Object.entries(value)) if (typeof item !== "object") row[`${key.slice(1)}_${name}`] = item;
  }
  row.label = text(row.config_kv_given || row.config_kv);
  row.per_token = row.memory_resident_bytes / row.config_n_ctx;
  return row;
}
const rows = page.runs.map(flat);

function element(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// A labelled choice; calls change with the chosen value. Hidden if there is nothing to choose.
function choice(section, label, values, change) {
  const select = element("select", {}, ...values.map(([value, name]) => element("option", { value }, name)));
  const box = element("label", {}, `${label} `, select);
  box.hidden = values.length < 2;
  section.querySelector(".controls").append(box);
  select.addEventListener("change", () => change(select.value));
  return select;
}

// ---- tables ----

function table(place, columns, data) {
  const section = document.getElementById(place);
  if (data.length === 0) return void (section.hidden = true);
  const used = columns.filter(([key]) => data.some((row) => row[key] !== undefined));
  const body = element("tbody");
  const fill = (list) => body.replaceChildren(...list.map((row) => element("tr", {}, ...used.map(([key]) => {
    const value = row[key];
    const cell = element("td", { "data-key": key }, shown(value));
    if (typeof value === "number") cell.dataset.value = value;
    else cell.className = "text";
    return cell;
  }))));
  const heads = used.map(([key, name]) => {
    const button = element("button", { type: "button" }, name);
    const head = element("th", { scope: "col" }, button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const order = (a, b) => (typeof a[key] === "number" && typeof b[key] === "number" ? a[key] - b[key] : text(a[key]).localeCompare(text(b[key])));
      fill([...data].sort((a, b) => (down ? -order(a, b) : order(a, b))));
    });
    return head;
  });
  fill(data);
  section.querySelector(".scroll").append(element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body));
}

// ---- charts ----

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Error bars: points carry `se` (vertical).
const bars = {
  id: "bars",
  afterDatasetsDraw(chart) {
    const { ctx, chartArea: area, scales: { y } } = chart;
    ctx.save();
    ctx.beginPath();
    ctx.rect(area.left, area.top, area.width, area.height);
    ctx.clip();
    chart.data.datasets.forEach((set, i) => chart.getDatasetMeta(i).data.forEach((point, k) => {
      const { y: value, se } = set.data[k];
      if (!(se > 0) || !chart.isDatasetVisible(i)) return;
      ctx.strokeStyle = set.borderColor;
      ctx.beginPath();
      ctx.moveTo(point.x, y.getPixelForValue(value - se));
      ctx.lineTo(point.x, y.getPixelForValue(value + se));
      ctx.stroke();
    }));
    ctx.restore();
  },
};

function scale(title, type) {
  return { type: type ?? "linear", title: { display: true, text: title, color: style("--text") }, ticks: { color: style("--soft") }, grid: { color: style("--line") } };
}

function draw(section, datasets, x, y, tip) {
  const canvas = section.querySelector("canvas");
  Chart.getChart(canvas)?.destroy();
  new Chart(canvas, {
    type: "scatter", data: { datasets }, plugins: [bars],
    options: {
      animation: false, maintainAspectRatio: false, scales: { x, y },
      plugins: {
        legend: { labels: { color: style("--text"), usePointStyle: true, filter: (item) => !datasets[item.datasetIndex].hideLegend } },
        tooltip: { callbacks: { label: (item) => tip(item.raw, item.dataset) } },
      },
    },
  });
}

// Under a figure: the command that runs what it shows again and draws it.
function repeat(section, shown) {
  const figure = section.querySelector("figure");
  figure.querySelector(".repeat")?.remove();
  const commands = [...new Set(shown.map((row) => row.command_line)), page.command].join(" &&\n");
  figure.append(element("details", { class: "repeat" }, element("summary", {}, `Repeat this figure: one command, ${shown.length} ${shown.length === 1 ? "run" : "runs"}`), element("code", {}, commands)));
}

const redraws = [];
const whenShown = (redraw) => { redraws.push(redraw); redraw(); };

// ---- memory against quality ----

const measures = [["quality_kld_mean", "KLD to the base, nat", "quality_kld_se_chunk"], ["quality_ppl", "perplexity", "quality_ppl_se_chunk"]];
function drawQuality() {
  const section = document.getElementById("quality");
  const scored = rows.filter((row) => row.quality_ppl !== undefined && row.per_token > 0);
  const key = (row) => [row.config_model, `${text(row.config_text_sha256).slice(0, 8)}`, row.config_n_ctx, row.config_protocol].join(" | ");
  const groups = [...new Set(scored.map(key))];
  if (groups.length === 0) return void (section.hidden = true);
  let group = groups[0], measure = measures.find(([name]) => scored.some((row) => row[name] !== undefined));
  const redraw = () => {
    const points = scored.filter((row) => key(row) === group && row[measure[0]] !== undefined);
    const at = (row) => ({ x: row.per_token, y: row[measure[0]] });
    const sets = points.map((row, i) => {
      const color = colors[i % colors.length], few = row.quality_n_chunks < 16, control = controls.find(({ pattern }) => pattern.test(text(row.config_kv)));
      return { label: control ? `${row.label} (control: ${control.what})` : row.label, data: [{ ...at(row), se: row[measure[2]], row }], borderColor: color,
        backgroundColor: few ? "transparent" : color, pointRadius: control ? 8 : 5, pointStyle: control?.shape ?? "circle", borderWidth: control ? 2 : 1 };
    });
    const missing = controls.filter(({ pattern, what }) => {
      const line = points.filter((row) => pattern.test(text(row.config_kv))).map(at).sort((a, b) => a.x - b.x);
      if (line.length > 1) sets.push({ label: `control: ${what}`, data: line, showLine: true, pointRadius: 0, borderColor: style("--text"), borderWidth: 1, borderDash: [1, 3], hideLegend: true });
      return line.length === 0;
    });
    document.getElementById("missing").textContent = missing.length ? `Controls that these runs lack: ${missing.map(({ what, name }) => `${what} (${name})`).join(", ")}.` : "";
    const front = points.filter((a) => !points.some((b) => b !== a && b.per_token <= a.per_token && b[measure[0]] <= a[measure[0]] && (b.per_token < a.per_token || b[measure[0]] < a[measure[0]])));
    const line = front.map(at).sort((a, b) => a.x - b.x);
    sets.push({ label: "not beaten", data: line, showLine: true, pointRadius: 0, borderColor: style("--soft"), borderDash: [4, 4], hideLegend: true });
    repeat(section, points);
    draw(section, sets, scale("resident bytes a token"), scale(measure[1]),
      (point, set) => `${set.label}: ${shown(point.x)} bytes, ${shown(point.y)}${point.se ? ` +/- ${shown(point.se)}` : ""}`);
  };
  choice(section, "Runs of", groups.map((name) => [name, name]), (value) => { group = value; redraw(); });
  choice(section, "Quality", measures.filter(([name]) => scored.some((row) => row[name] !== undefined)).map(([name, title]) => [name, title]),
    (value) => { measure = measures.find(([name]) => name === value); redraw(); });
  whenShown(redraw);
}

// ---- speed ----

const speeds = rows.flatMap((row) => {
  const tests = column(row.tree, "/bench", "test").map((test, i) => ({
    row, file: row.file, kv: row.label, device: row.config_device, test, kind: /^tg/.test(test) ? "decode" : "prefill",
    context: column(row.tree, "/bench", "depth")[i], tokens_per_s: column(row.tree, "/bench", "tokens_per_s")[i],
    sd: column(row.tree, "/bench", "sd")[i], repetitions: column(row.tree, "/bench", "repetitions")[i],
  }));
  const own = row.quality_prefill_tokens_per_s;
  if (own !== undefined) tests.push({ row, file: row.file, kv: row.label, device: row.config_device, test: row.config_command, kind: row.config_command, context: row.config_n_ctx, tokens_per_s: own });
  return tests;
});
function drawSpeed() {
  const section = document.getElementById("speed");
  const kinds = [...new Set(speeds.map((s) => s.kind))];
  if (kinds.length === 0) return void (section.hidden = true);
  let kind = kinds[0];
  const redraw = () => {
    const series = new Map();
    for (const s of speeds.filter((one) => one.kind === kind)) {
      const name = `${s.kv}, ${s.device}`;
      series.set(name, [...(series.get(name) ?? []), { x: s.context, y: s.tokens_per_s, se: s.sd }]);
    }
    const sets = [...series].map(([label, data], i) => ({ label, data: data.sort((a, b) => a.x - b.x), showLine: true, borderColor: colors[i % colors.length], backgroundColor: colors[i % colors.length] }));
    repeat(section, [...new Set(speeds.filter((one) => one.kind === kind).map((one) => one.row))]);
    draw(section, sets, scale("tokens in the cache"), scale("tokens a second"), (point, set) => `${set.label}: ${shown(point.y)} tokens/s at ${point.x}`);
  };
  choice(section, "Test", kinds.map((name) => [name, name]), (value) => { kind = value; redraw(); });
  whenShown(redraw);
}

// ---- heat maps: every array of two axes that a run has ----

function drawHeat() {
  const section = document.getElementById("heat");
  const maps = rows.flatMap((row, i) => ["/memory", "/layers"].flatMap((group) => Object.entries(row.tree[group]?.data ?? {})
    .filter(([, array]) => Object.keys(array.dims ?? {}).length === 2)
    .map(([name, array]) => ({ id: `${i}${group}/${name}`, title: `${row.label} (${row.file}): ${array.long_name}, ${array.units}`, row, array }))));
  if (maps.length === 0) return void (section.hidden = true);
  const show = (map) => {
    const [[down, n], [across, m]] = Object.entries(map.array.dims);
    const names = down === "memory_class" ? text(map.row.memory_classes).split(" ") : [...Array(n).keys()];
    const most = Math.max(...map.array.values.filter(Number.isFinite), 0);
    const line = (i) => element("tr", {}, element("td", {}, `${names[i]}`), ...[...Array(m).keys()].map((k) => {
      const value = map.array.values[i * m + k];
      const share = most > 0 && value > 0 ? value / most : 0;
      return element("td", { style: `background: hsl(205 75% ${95 - 50 * share}%)`, title: `${down} ${names[i]}, ${across} ${k}: ${value}` }, shown(value));
    }));
    const head = element("tr", {}, element("th", { scope: "col" }, `${down} \\ ${across}`), ...[...Array(m).keys()].map((k) => element("th", { scope: "col" }, `${k}`)));
    section.querySelector(".scroll").replaceChildren(element("table", { class: "heat" }, element("caption", { class: "text" }, map.title), element("thead", {}, head), element("tbody", {}, ...[...Array(n).keys()].map(line))));
  };
  choice(section, "Of", maps.map((map) => [map.id, map.title]), (value) => show(maps.find((map) => map.id === value)));
  show(maps[0]);
}

// ---- roofline ----

const kernels = rows.flatMap((row) => column(row.tree, "/kernels", "name").map((name, i) => {
  const of = (key) => column(row.tree, "/kernels", key)[i];
  return { file: row.file, kv: row.label, device: row.config_device, phase: of("phase"), name, calls: of("calls"), ns_sum: of("ns_sum"), bytes: of("bytes"), flops: of("flops"), gbps: of("gbps"), gflops: of("gflops"), peak_share: of("peak_share"), row };
}));
function drawRoofline() {
  const section = document.getElementById("roofline");
  const files = [...new Set(kernels.filter((k) => k.flops > 0 && k.bytes > 0).map((k) => k.file))];
  if (files.length === 0) return void (section.hidden = true);
  let file = files[0];
  const redraw = () => {
    const list = kernels.filter((k) => k.file === file && k.flops > 0 && k.bytes > 0);
    const { device_fma_gflops: top, device_read_gbps: slope } = list[0].row;
    const xs = list.map((k) => k.flops / k.bytes), low = Math.min(...xs) / 2, high = Math.max(...xs, (2 * top) / slope) * 2;
    const roof = [low, top / slope, high].map((x) => ({ x, y: Math.min(top, slope * x) }));
    const sets = list.map((k, i) => ({ label: `${k.phase} ${k.name}`, data: [{ x: k.flops / k.bytes, y: k.gflops }], borderColor: colors[i % colors.length], backgroundColor: colors[i % colors.length], pointRadius: 5 }));
    sets.push({ label: "roof", data: roof, showLine: true, pointRadius: 0, borderColor: style("--text"), hideLegend: true });
    repeat(section, [list[0].row]);
    draw(section, sets, scale("operations a byte", "logarithmic"), scale("GFLOP/s", "logarithmic"), (point, set) => `${set.label}: ${shown(point.y)} GFLOP/s`);
  };
  choice(section, "Run", files.map((name) => [name, name]), (value) => { file = value; redraw(); });
  whenShown(redraw);
}

// ---- all ----

document.getElementById("about").append(`${rows.length} runs. Made by `, element("code", {}, page.command), ". Every number is from the run files; nothing is loaded from a network.");
drawQuality();
drawSpeed();
drawHeat();
drawRoofline();
table("runs", [["file", "run file"], ["config_command", "command"], ["label", "kv"], ["config_device", "device"], ["config_model", "model"], ["config_n_ctx", "context"], ["config_protocol", "protocol"],
  ["memory_bytes_per_token", "bytes/token"], ["memory_resident_bytes", "resident bytes"], ["quality_n_chunks", "chunks"], ["quality_ppl", "perplexity"], ["quality_ppl_se_chunk", "se (chunks)"],
  ["quality_kld_mean", "KLD"], ["quality_kld_se_chunk", "se (chunks)"], ["quality_same_top1", "same top 1"], ["status", "status"]], rows);
table("speeds", [["kv", "kv"], ["device", "device"], ["test", "test"], ["context", "context"], ["tokens_per_s", "tokens/s"], ["sd", "sd"], ["repetitions", "repetitions"], ["file", "run file"]], speeds);
table("kernels", [["name", "kernel"], ["phase", "phase"], ["calls", "calls"], ["ns_sum", "ns"], ["bytes", "bytes"], ["flops", "operations"], ["gbps", "GB/s"], ["gflops", "GFLOP/s"], ["peak_share", "share of peak"], ["kv", "kv"], ["file", "run file"]], kernels);
document.querySelector("#provenance div").append(...rows.map((row) => element("details", {},
  element("summary", {}, `${row.file}: ${row.label}`), element("p", {}, element("code", {}, row.command_line)),
  element("dl", {}, ...Object.entries(row).filter(([, value]) => typeof value !== "object").flatMap(([key, value]) => [element("dt", {}, key), element("dd", {}, text(value))])))));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((redraw) => redraw()));
addEventListener("beforeprint", () => { document.querySelectorAll("details").forEach((node) => { node.open = true; }); document.querySelectorAll("canvas").forEach((canvas) => Chart.getChart(canvas)?.resize()); });
