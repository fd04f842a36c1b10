"use strict";
// Draws the page from the run files' trees in #data: {command, runs: [tree]}; a tree is what `kvlab log show --json` prints, less /steps.
const page = JSON.parse(document.getElementById("data").textContent);
// Strategies that need no method: {name, what, pattern of the resolved spec, shape of the point}.
const controls = JSON.parse(document.getElementById("controls").textContent).map((control) => ({ ...control, pattern: new RegExp(control.pattern) }));
const colors = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bb7744", "#888888"]; // Paul Tol's bright
const text = (value) => (value === undefined || value === null ? "" : String(value));
const shown = (value) => (typeof value !== "number" ? text(value) : Number.isInteger(value) ? value.toLocaleString("en") : String(+value.toPrecision(6)));
const brief = (value) => (typeof value !== "number" || Number.isInteger(value) && Math.abs(value) < 1e5 ? text(value) : value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5) ? value.toExponential(1) : String(+value.toPrecision(3)));
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

// Files are named by what tells them apart: without the folders that all have in front.
const folders = rows.map((row) => row.file.split("/").slice(0, -1));
const common = folders[0].filter((name, i) => folders.every((path) => path.slice(0, i + 1).join("/") === folders[0].slice(0, i + 1).join("/"))).join("/");
for (const row of rows) row.name = common ? row.file.slice(common.length + 1) : row.file;

// A run as it is called beside others: its strategy, and what tells it from those of the same strategy.
const telling = ["config_model", "config_device", "config_text_sha256", "config_base", "config_exact"];
const setting = (row, key) => ({ config_text_sha256: `text ${text(row[key]).slice(0, 8)}`, config_base: `base ${text(row[key])}`, config_exact: row[key] ? "exact" : "not exact" })[key] ?? text(row[key]);
function calledAmong(list, row) {
  const same = list.filter((one) => one.label === row.label);
  return [row.label, ...telling.filter((key) => same.some((one) => one[key] !== row[key])).map((key) => setting(row, key))].join(", ");
}

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

// columns: [key, title, whether it is a setting: one that all rows share is said once, above the table].
function table(place, columns, data) {
  const section = document.getElementById(place);
  if (data.length === 0) return void (section.hidden = true);
  const filled = columns.filter(([key]) => data.some((row) => row[key] !== undefined));
  const shared = filled.filter(([key, , isSetting]) => isSetting && data.length > 1 && data.every((row) => row[key] === data[0][key]));
  const used = filled.filter((one) => !shared.includes(one));
  if (shared.length) section.querySelector(".scroll").before(element("p", { class: "shared" }, `All have ${shared.map(([key, name]) => `${name} ${shown(data[0][key])}`).join(", ")}.`));
  const body = element("tbody");
  const fill = (list) => body.replaceChildren(...list.map((row) => element("tr", {}, ...used.map(([key]) => {
    const value = row[key];
    const cell = element("td", { "data-key": key }, shown(value));
    if (typeof value === "number") cell.dataset.value = value;
    else cell.className = text(value).length > 40 ? "text long" : "text";
    return cell;
  }))));
  const heads = used.map(([key, name]) => {
    const button = element("button", { type: "button" }, name);
    const head = element("th", { scope: "col", ...(data.some((row) => typeof row[key] === "number") ? {} : { class: "text" }) }, button);
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

// A dataset's number beside its point, as the legend under the figure has it.
const marks = {
  id: "marks",
  afterDatasetsDraw(chart) {
    const { ctx } = chart;
    ctx.save();
    ctx.font = "11px system-ui, sans-serif";
    ctx.fillStyle = style("--text");
    ctx.textBaseline = "middle";
    chart.data.datasets.forEach((set, i) => {
      const point = chart.getDatasetMeta(i).data.at(-1), left = set.mark % 2 === 0; // many have the same bytes
      if (!set.mark || !point || !(point.x <= chart.chartArea.right && point.y >= chart.chartArea.top)) return;
      ctx.textAlign = left ? "right" : "left";
      ctx.fillText(set.mark, point.x + (left ? -8 : 8), point.y);
    });
    ctx.restore();
  },
};

function scale(title, type) {
  const decades = { callback: (value) => (Number.isInteger(+Math.log10(value).toFixed(9)) ? shown(value) : ""), maxRotation: 0, autoSkip: false };
  return { type: type ?? "linear", title: { display: true, text: title, color: style("--text") }, ticks: { color: style("--soft"), ...(type === "logarithmic" ? decades : {}) }, grid: { color: style("--line") } };
}

const fromZero = (scale) => ({ ...scale, min: 0, ticks: { ...scale.ticks, precision: 0 } });

// Under a figure: number, shape and name of each dataset. A list wraps, prints and can be copied, on any width.
function legend(section, datasets) {
  const symbol = (set) => {
    const box = document.createElementNS("http://www.w3.org/2000/svg", "svg"), shape = { triangle: "M8 2 14 14H2Z", rect: "M3 3H13V13H3Z", rectRot: "M8 1 15 8 8 15 1 8Z" }[set.pointStyle] ?? "M2 8A6 6 0 1 1 14 8 6 6 0 1 1 2 8Z";
    const path = document.createElementNS(box.namespaceURI, "path");
    for (const [key, value] of Object.entries({ d: shape, fill: set.backgroundColor, stroke: set.borderColor, "stroke-width": 2 })) path.setAttribute(key, value);
    for (const [key, value] of Object.entries({ viewBox: "0 0 16 16", width: 14, height: 14, "aria-hidden": "true" })) box.setAttribute(key, value);
    box.append(path);
    return box;
  };
  const named = datasets.filter((set) => !set.hideLegend), list = element("ol", {}, ...named.map((set) => element("li", {}, `${set.mark} `, symbol(set), ` ${set.label}`)));
  const box = section.querySelector(".legend") ?? section.querySelector(".chart").insertAdjacentElement("afterend", element("details", { class: "legend" }, element("summary")));
  box.open = named.length <= 20;
  box.replaceChildren(element("summary", {}, named.length === 1 ? "What the number in the figure is" : `What the ${named.length} numbers in the figure are`), list);
}

// The axis reaches to the ends of all error bars that it can show.
function withBars(scale, datasets) {
  const ends = datasets.flatMap((set) => set.data.flatMap(({ y, se }) => [y - (se > 0 ? se : 0), y + (se > 0 ? se : 0)])).filter((end) => scale.type === "linear" || end > 0);
  return { ...scale, suggestedMin: Math.min(...ends), suggestedMax: Math.max(...ends) };
}

function draw(section, datasets, x, y, tip) {
  const canvas = section.querySelector("canvas");
  Chart.getChart(canvas)?.destroy();
  datasets.filter((set) => !set.hideLegend).forEach((set, i) => { set.mark = i + 1; });
  legend(section, datasets);
  new Chart(canvas, {
    type: "scatter", data: { datasets }, plugins: [bars, marks],
    options: {
      animation: false, maintainAspectRatio: false, scales: { x, y: withBars(y, datasets) },
      plugins: {
        legend: { display: false },
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
  const key = (row) => `${row.config_model}, ${setting(row, "config_text_sha256")}, context ${row.config_n_ctx}, ${row.config_protocol}, ${Math.round(row.quality_n_tokens / row.quality_n_chunks)} scored`;
  const size = (name) => scored.filter((row) => key(row) === name).length;
  const groups = [...new Set(scored.map(key))].sort((a, b) => size(b) - size(a)); // who looks first sees the most
  if (groups.length === 0) return void (section.hidden = true);
  let axis = "as it fits", group = groups[0], measure = measures.find(([name]) => scored.some((row) => row[name] !== undefined));
  const redraw = () => {
    const all = scored.filter((row) => key(row) === group && row[measure[0]] !== undefined);
    const above = all.map((row) => row[measure[0]]).filter((value) => value > 0), wide = Math.max(...above) > 30 * Math.min(...above);
    const type = axis === "as it fits" ? (wide ? "logarithmic" : "linear") : axis;
    const points = type === "linear" ? all : all.filter((row) => row[measure[0]] > 0);
    const at = (row) => ({ x: row.per_token, y: row[measure[0]] });
    const sets = points.map((row, i) => {
      const color = colors[i % colors.length], few = row.quality_n_chunks < 16, control = controls.find(({ pattern }) => pattern.test(text(row.config_kv)));
      const label = calledAmong(points, row);
      return { label: control ? `${label} (control: ${control.what})` : label, data: [{ ...at(row), se: row[measure[2]], row }], borderColor: color,
        backgroundColor: few ? "transparent" : color, pointRadius: control ? 8 : 5, pointStyle: control?.shape ?? "circle", borderWidth: control ? 2 : 1 };
    });
    const missing = controls.filter(({ pattern, what }) => {
      const line = points.filter((row) => pattern.test(text(row.config_kv))).map(at).sort((a, b) => a.x - b.x);
      if (line.length > 1) sets.push({ label: `control: ${what}`, data: line, showLine: true, pointRadius: 0, borderColor: style("--text"), borderWidth: 1, borderDash: [1, 3], hideLegend: true });
      return line.length === 0;
    });
    const zero = all.length - points.length;
    document.getElementById("missing").textContent = (zero ? `Not on a logarithmic axis: ${all.filter((row) => !(row[measure[0]] > 0)).map((row) => calledAmong(all, row)).join(", ")}, at 0. ` : "") + (missing.length ? `Controls that these runs lack: ${missing.map(({ what, name }) => `${what} (${name})`).join(", ")}.` : "");
    const front = points.filter((a) => !points.some((b) => b !== a && b.per_token <= a.per_token && b[measure[0]] <= a[measure[0]] && (b.per_token < a.per_token || b[measure[0]] < a[measure[0]])));
    const line = front.map(at).sort((a, b) => a.x - b.x);
    sets.push({ label: "not beaten", data: line, showLine: true, pointRadius: 0, borderColor: style("--soft"), borderDash: [4, 4], hideLegend: true });
    repeat(section, points);
    draw(section, sets, scale("resident bytes a token"), scale(measure[1], type),
      (point, set) => `${set.label}: ${shown(point.x)} bytes, ${shown(point.y)}${point.se ? ` +/- ${shown(point.se)}` : ""}`);
  };
  choice(section, "Runs of", groups.map((name) => [name, `${name} (${size(name)})`]), (value) => { group = value; redraw(); });
  choice(section, "Quality", measures.filter(([name]) => scored.some((row) => row[name] !== undefined)).map(([name, title]) => [name, title]),
    (value) => { measure = measures.find(([name]) => name === value); redraw(); });
  choice(section, "Axis", ["as it fits", "linear", "logarithmic"].map((name) => [name, name]), (value) => { axis = value; redraw(); });
  whenShown(redraw);
}

// ---- speed ----

const phases = { pp: "prefill of", tg: "decode of" };
const speeds = rows.flatMap((row) => {
  const tests = column(row.tree, "/bench", "test").map((test, i) => ({
    row, file: row.name, kv: row.label, model: row.config_model, device: row.config_device, test, kind: test.replace(/@.*/, "").replace(/^(pp|tg)(\d+)/, (_, phase, n) => `${phases[phase]} ${n}`),
    context: column(row.tree, "/bench", "depth")[i], tokens_per_s: column(row.tree, "/bench", "tokens_per_s")[i],
    sd: column(row.tree, "/bench", "sd")[i], repetitions: column(row.tree, "/bench", "repetitions")[i],
  }));
  const own = row.quality_prefill_tokens_per_s;
  if (own !== undefined) tests.push({ row, file: row.name, kv: row.label, model: row.config_model, device: row.config_device, test: row.config_command, kind: row.config_command, context: row.config_n_ctx, tokens_per_s: own });
  return tests;
});
// The lines of a kind of test, [name, speeds]: of what was run at more than one context.
function linesOf(kind) {
  const of = speeds.filter((one) => one.kind === kind), runs = of.map((one) => one.row), lines = new Map();
  for (const one of of) {
    const name = calledAmong(runs, one.row);
    lines.set(name, [...(lines.get(name) ?? []), one]);
  }
  return [...lines].filter(([, line]) => new Set(line.map((one) => one.context)).size > 1);
}
function drawSpeed() {
  const section = document.getElementById("speed");
  const kinds = [...new Set(speeds.map((s) => s.kind))].filter((kind) => linesOf(kind).length);
  if (kinds.length === 0) return void (section.hidden = true);
  let kind = kinds[0];
  const redraw = () => {
    const lines = linesOf(kind), runs = lines.flatMap(([, line]) => line.map((one) => one.row)), devices = new Set(runs.map((row) => row.config_device));
    const sets = lines.map(([label, line], i) => ({ label, data: line.map((one) => ({ x: one.context, y: one.tokens_per_s, se: one.sd })).sort((a, b) => a.x - b.x), showLine: true,
      borderColor: colors[i % colors.length], backgroundColor: colors[i % colors.length] }));
    document.getElementById("device").textContent = devices.size === 1 ? `Device: ${[...devices][0]}.` : "";
    repeat(section, [...new Set(runs)]);
    draw(section, sets, fromZero(scale("tokens in the cache")), fromZero(scale("tokens a second")), (point, set) => `${set.label}: ${shown(point.y)} tokens/s at ${point.x}`);
  };
  choice(section, "Test", kinds.map((name) => [name, name]), (value) => { kind = value; redraw(); });
  whenShown(redraw);
}

// ---- heat maps ----

const numbers = (n) => [...Array(n).keys()];

// What a run's arrays of two axes say of layers: {title, down, across: [axis, labels], values [down][across]}.
function arrayMaps(row) {
  return ["/memory", "/layers"].flatMap((group) => Object.entries(row.tree[group]?.data ?? {})
    .filter(([name, array]) => Object.keys(array.dims ?? {}).length === 2 && name !== "kept_first") // where a head's positions begin: no quantity
    .map(([, array]) => {
      const [[down, n], [across, m]] = Object.entries(array.dims), names = down === "memory_class" ? text(row.memory_classes).split(" ") : numbers(n);
      // The model's own bytes say nothing of the cache, and would be all that has a colour.
      const lines = numbers(n).filter((i) => names[i] !== "weights" && (down !== "memory_class" || array.values.slice(i * m, i * m + m).some((value) => value > 0)));
      return { title: `${array.long_name}${array.units === "1" ? "" : `, ${array.units}`}`, values: lines.flatMap((i) => array.values.slice(i * m, i * m + m)), across: [across, numbers(m)],
        down: [down, lines.map((i) => names[i])] };
    }).filter((map) => map.values.length));
}

// Which tokens the last eviction left: of each layer the share of the kv heads' tokens that stayed, by position.
function keptMap(row) {
  const of = (name) => row.tree["/layers"]?.data?.[name];
  const budget = of("budget"), first = of("kept_first")?.values, position = of("kept_position")?.values;
  if (!position || position.length < budget.values.reduce((sum, n) => sum + n, 0)) return []; // too many for the page
  const [layers, heads] = Object.values(budget.dims), seen = column(row.tree, "/evictions", "position").at(-1) ?? Math.max(...position) + 1;
  const bin = Math.max(1, Math.ceil(seen / 32)), bins = Math.ceil(seen / bin), values = Array(layers * bins).fill(0);
  for (let stream = 0; stream < layers * heads; stream++)
    for (let i = 0; i < budget.values[stream]; i++) values[Math.floor(stream / heads) * bins + Math.floor(position[first[stream] + i] / bin)] += 1;
  return [{ title: `share of the tokens kept at the last eviction, by position (${bin} a cell), over kv heads`, down: ["layer", numbers(layers)], across: ["position", numbers(bins).map((i) => i * bin)],
    values: values.map((n, i) => n / (heads * Math.min(bin, seen - (i % bins) * bin))) }];
}

// Means over the run's evictions of what each left and lost.
function evictionMaps(row) {
  const layer = column(row.tree, "/evictions", "layer"), head = column(row.tree, "/evictions", "head");
  if (layer.length === 0) return [];
  const layers = Math.max(...layer) + 1, heads = Math.max(...head) + 1;
  return ["kept", "mass_lost", "output_error"].flatMap((name) => {
    const found = column(row.tree, "/evictions", name), sums = Array(layers * heads).fill(0), n = Array(layers * heads).fill(0);
    found.forEach((value, i) => { if (Number.isFinite(value)) { sums[layer[i] * heads + head[i]] += value; n[layer[i] * heads + head[i]] += 1; } });
    const long = row.tree["/evictions"].data[name]?.long_name;
    return n.some(Boolean) ? [{ title: `${long}, mean over evictions`, down: ["layer", numbers(layers)], across: ["head", numbers(heads)], values: sums.map((sum, i) => sum / n[i]) }] : [];
  });
}

function drawHeat() {
  const section = document.getElementById("heat");
  const maps = rows.flatMap((row) => [...evictionMaps(row), ...keptMap(row), ...arrayMaps(row)].map((map) => ({ ...map, row })));
  if (maps.length === 0) return void (section.hidden = true);
  let run = maps[0].row, title = maps[0].title;
  const own = () => maps.filter((map) => map.row === run);
  const show = () => {
    const map = own().find((one) => one.title === title) ?? own()[0];
    const flip = map.down[0] === "layer" && map.across[0] !== "position", given = map.across[1].length; // few heads and many layers: a head a line
    const [[down, labels], [across, columns]] = flip ? [map.across, map.down] : [map.down, map.across];
    const most = Math.max(...map.values.filter(Number.isFinite), 0);
    const line = (label, i) => element("tr", {}, element("th", { scope: "row" }, `${label}`), ...columns.map((at, k) => {
      const value = map.values[flip ? k * given + i : i * given + k], share = most > 0 && value > 0 ? value / most : 0;
      return element("td", { style: `--share: ${(100 * share).toFixed(0)}%`, title: `${down} ${label}, ${across} ${at}: ${shown(value)}` }, brief(value));
    }));
    const head = element("tr", {}, element("th", { scope: "col" }, `${down} \\ ${across}`), ...columns.map((at) => element("th", { scope: "col" }, `${at}`)));
    section.querySelector(".scroll").replaceChildren(element("table", { class: "heat" }, element("caption", { class: "text" }, `${run.label} (${run.name}): ${map.title}`), element("thead", {}, head), element("tbody", {}, ...labels.map(line))));
  };
  const runs = [...new Set(maps.map((map) => map.row))];
  let what;
  const offer = () => { // the maps of the chosen run; the same kind stays chosen
    what?.parentNode.remove();
    what = choice(section, "Map", own().map((map) => [map.title, map.title]), (value) => { title = value; show(); });
    if (own().some((map) => map.title === title)) what.value = title;
  };
  choice(section, "Run", runs.map((row, i) => [i, `${row.label} (${row.name})`]), (value) => { run = runs[value]; offer(); show(); });
  offer();
  show();
}

// ---- roofline ----

const kernels = rows.flatMap((row) => column(row.tree, "/kernels", "name").map((name, i) => {
  const of = (key) => column(row.tree, "/kernels", key)[i];
  return { file: row.name, kv: row.label, device: row.config_device, phase: of("phase"), name, calls: of("calls"), ns_sum: of("ns_sum"), bytes: of("bytes"), flops: of("flops"), gbps: of("gbps"), gflops: of("gflops"), peak_share: of("peak_share"), row };
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
  const run = (name) => rows.find((row) => row.name === name);
  choice(section, "Run", files.map((name) => [name, `${calledAmong(files.map(run), run(name))} (${name})`]), (value) => { file = value; redraw(); });
  whenShown(redraw);
}

// ---- all ----

document.getElementById("about").append(`${rows.length} ${rows.length === 1 ? "run" : "runs"}${common ? ` of ${common}` : ""}. Made by `, element("code", {}, page.command), ". Every number is from the run files; nothing is loaded from a network.");
drawQuality();
drawSpeed();
drawHeat();
drawRoofline();
const onlyNll = rows.some((row) => row.quality_nll !== undefined && row.quality_ppl === undefined);
table("runs", [["name", "run file"], ["config_command", "command", true], ["label", "kv"], ["config_device", "device", true], ["config_model", "model", true], ["config_n_ctx", "context", true], ["config_protocol", "protocol", true],
  ["memory_bytes_per_token", "bytes/token"], ["memory_resident_bytes", "resident bytes"], ["quality_n_chunks", "chunks"], ["quality_ppl", "perplexity"], ["quality_ppl_se_chunk", "se (chunks)"],
  ["quality_kld_mean", "KLD"], ["quality_kld_se_chunk", "se (chunks)"], ["quality_same_top1", "same top 1"], ...(onlyNll ? [["quality_nll", "nll"]] : []), ["quality_recall_kept", "recall kept"], ["quality_recall_kept_se", "se (sequences)"],
  ["quality_needle_exact", "needles found"], ["quality_needle_exact_se", "se (sequences)"], ["quality_first_median", "tokens in common"], ["quality_tokens_per_s", "tokens/s"], ["git", "revision", true], ["status", "status", true]], rows);
table("speeds", [["kv", "kv"], ["model", "model", true], ["device", "device", true], ["test", "test", true], ["context", "context", true], ["tokens_per_s", "tokens/s"], ["sd", "sd"], ["repetitions", "repetitions", true], ["file", "run file"]], speeds);
table("kernels", [["name", "kernel"], ["phase", "phase", true], ["calls", "calls"], ["ns_sum", "ns"], ["bytes", "bytes"], ["flops", "operations"], ["gbps", "GB/s"], ["gflops", "GFLOP/s"], ["peak_share", "share of peak"], ["kv", "kv", true], ["device", "device", true], ["file", "run file", true]], kernels);
document.querySelector("#provenance div").append(...rows.map((row) => element("details", {},
  element("summary", {}, `${row.name}: ${row.label}`), element("p", {}, element("code", {}, row.command_line)),
  element("dl", {}, ...Object.entries(row).filter(([, value]) => typeof value !== "object").flatMap(([key, value]) => [element("dt", {}, key), element("dd", {}, text(value))])))));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((redraw) => redraw()));
addEventListener("beforeprint", () => { document.querySelectorAll("details").forEach((node) => { node.open = true; }); document.querySelectorAll("canvas").forEach((canvas) => Chart.getChart(canvas)?.resize(680, 340)); }); // a page of A4 less its margins
addEventListener("afterprint", () => document.querySelectorAll("canvas").forEach((canvas) => Chart.getChart(canvas)?.resize()));
