#!/usr/bin/env bash
# The report in a real browser (headless Chromium): no console errors, nothing from a network, numbers in the page equal those in the run
# files, charts are painted, tables sort, names in files are not run as HTML; everything is reached and worked by the keyboard, controls stand out in the
# Pareto figure, each figure has its command, print has all of it. Called with the program and the project's root.
# KVLAB_SHOTS=FOLDER keeps screenshots: light, dark, phone, print.
set -euo pipefail
program=$1 root=$2
browser=$(command -v chromium || command -v chromium-browser) || { echo "skipped: no chromium"; exit 77; }
python3 -c 'import h5py' 2>/dev/null || { echo "skipped: no python3 with h5py"; exit 77; }
[[ $("$program" devices --json | python3 -c 'import json, sys; print(len(json.load(sys.stdin)["devices"]))') != 0 ]] || { echo "skipped: no OpenCL device"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
fail() { echo "FAILED: $*"; exit 1; }
model=$root/data/models/tiny.gguf
for kv in f16 int8 int4 "sink=2 window=24"; do "$program" eval kld -m "$model" -f "$root/LICENSE" -c 64 --chunks 17 --kv "$kv" --profile -o "runs/${kv#* }.h5" &>/dev/null; done
"$program" eval kld -m "$model" -f "$root/LICENSE" --kv "f16 keep=snapkv(window=4) budget=uniform(kept=0.5)" --protocol compress-then-score --context 48 --score 16 --chunks 3 --loss --layer-errors -o runs/snapkv.h5 &>/dev/null
hostile='<img src=x onerror=console.error(1)><!--.h5'
"$program" eval ppl -m "$model" -f "$root/LICENSE" -c 64 --chunks 2 -o "runs/$hostile" &>/dev/null
"$program" bench -m "$model" -p 8,16 -n 4 -d 0,32 -r 2 -o runs/bench.h5 &>/dev/null

mkdir two
cp runs/int4.h5 two/a.h5
cp runs/int4.h5 two/b.h5
python3 -c 'import h5py, numpy; h5py.File("two/b.h5", "r+")["config"].attrs["device"] = numpy.bytes_("another")'
"$program" report two -o two.html >/dev/null || fail "report of two devices"
"$program" report runs -o page.html >out || fail "report"
[[ $(cat out) == "page.html: 7 runs" ]] || fail "$(cat out)"
! grep -oE '(src|href)="?(https?:)?//' page.html || fail "the page loads something"

browse() { # ARGUMENT...: stderr in err; fails on a console message
    timeout 120 "$browser" --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir="$work/profile" --enable-logging=stderr \
        --host-resolver-rules="MAP * ~NOTFOUND" --virtual-time-budget=5000 "$@" 2>err || fail "the browser: $(tail -n 5 err)"
    ! grep CONSOLE err || fail "messages on the console"
}

# What a person would do is done by a script at the end of a copy: sort by perplexity, up and down; count painted pixels.
python3 - <<'PYTHON'
page = open("page.html").read()
probe = """<script>
const head = [...document.querySelectorAll("#runs th")].find((th) => th.textContent === "perplexity");
const order = () => [...document.querySelectorAll("#runs td[data-key=quality_ppl]")].map((td) => td.dataset.value ?? "").join(" ");
const result = { before: order() };
head.querySelector("button").click(); result.up = order(); result.sort = head.getAttribute("aria-sort");
head.querySelector("button").click(); result.down = order();
result.painted = [...document.querySelectorAll("canvas")].map((c) => c.getContext("2d").getImageData(0, 0, c.width, c.height).data.filter((x, i) => i % 4 === 3 && x > 0).length);
result.hidden = [...document.querySelectorAll("main section")].filter((s) => s.hidden).map((s) => s.id);
document.body.append(Object.assign(document.createElement("pre"), { id: "probe", textContent: JSON.stringify(result) }));
</script></body>"""
open("probe.html", "w").write(page.replace("</body>", probe))
PYTHON
browse --dump-dom "file://$work/probe.html" >dom.html
python3 - <<'PYTHON' || fail "the page and the files differ"
import glob, html, json, math, re, h5py
dom = open("dom.html").read()
result = json.loads(html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', dom, re.S).group(1)))
assert result["hidden"] == [], result
assert len(result["painted"]) == 3 and min(result["painted"]) > 2000, result
up = [float(x) for x in result["up"].split()]
assert result["sort"] == "ascending" and len(up) == 6 and up == sorted(up) and [float(x) for x in result["down"].split()] == up[::-1], result

def table(name):
    body = re.search(rf'<section id="{name}">.*?<tbody>(.*?)</tbody>', dom, re.S).group(1)
    cell = r'<td data-key="(\w+)"(?: data-value="([^"]*)")?[^>]*>(.*?)</td>'
    return [{k: float(v) if v else html.unescape(t) for k, v, t in re.findall(cell, row, re.S)} for row in re.findall(r"<tr>(.*?)</tr>", body, re.S)]

runs = {row["name"]: row for row in table("runs")}
assert sorted(f"runs/{name}" for name in runs) == sorted(glob.glob("runs/*.h5")), list(runs) # named without the folder that all are in
checked = 0
for path, row in runs.items():
    f = h5py.File(f"runs/{path}")
    for key, value in row.items():
        group, _, name = key.partition("_")
        if isinstance(value, float):
            # cJSON writes as few digits as come back within one unit in the last place
            assert math.isclose(value, f[group].attrs[name], rel_tol=5e-16), (path, key, value, f[group].attrs[name])
            checked += 1
bench = h5py.File("runs/bench.h5")["bench"]
speeds = [r["tokens_per_s"] for r in table("speeds") if r["file"] == "bench.h5"]
same = lambda a, b: len(a) == len(b) and all(math.isclose(x, y, rel_tol=5e-16) for x, y in zip(a, b))
assert same(speeds, bench["tokens_per_s"]), speeds
kernels = [r["ns_sum"] for r in table("kernels") if r["file"] == "f16.h5"]
assert same(kernels, h5py.File("runs/f16.h5")["kernels/ns_sum"]), kernels
assert "<img" not in dom and "&lt;img src=x" in dom
print(f"{checked} numbers of {len(runs)} runs, {len(speeds)} speeds and {len(kernels)} kernel times are those of the files")
PYTHON
# Keys, controls, commands, print: a browser that is driven.
python3 - "$browser" "$root/tests/e2e" <<'PYTHON' || fail "the page by keyboard and in print"
import glob, math, os, re, shutil, subprocess, sys, h5py
sys.path.append(sys.argv[2])
from browser import Browser
page = Browser(sys.argv[1], os.path.abspath("profile2"), f"file://{os.path.abspath('page.html')}")
try:
    stops = page.tab_through()
    reached = [stop for stop in stops if stop[0] in ("SELECT", "BUTTON", "SUMMARY", "A")]
    there = page.run("[...document.querySelectorAll('select, button, summary, a[href]')].filter((e) => e.checkVisibility()).length")
    assert len(reached) == there > 20, (len(reached), there)
    assert all(outline for _, _, outline in stops), [stop for stop in stops if not stop[2]]
    def tab_to(test):
        for _ in range(200):
            page.press("Tab")
            if page.run(f"(() => {{ const e = document.activeElement; return !!({test}); }})()"): return
        raise AssertionError(f"Tab does not reach {test}")
    tab_to("e.tagName === 'SELECT' && e.closest('#quality')")
    before = page.run("document.activeElement.value")
    page.press("ArrowDown")
    assert page.run("document.activeElement.value") != before, "ArrowDown chooses nothing"
    tab_to("e.tagName === 'SUMMARY' && e.closest('#quality .repeat')")
    page.press("Enter")
    assert page.run("document.querySelector('#quality .repeat').open") is True, "Enter opens nothing"
    tab_to("e.textContent === 'perplexity'")
    page.press("Enter")
    order = lambda: page.run("[...document.querySelectorAll('#runs td[data-key=quality_ppl]')].map((e) => e.dataset.value ?? '')")
    up = [float(value) for value in order() if value]
    page.press(" ", "Space")
    down = [float(value) for value in order() if value]
    assert len(up) == 6 and up == sorted(up) and down == up[::-1], (up, down)

    page.run("document.querySelectorAll('#quality select').forEach((e) => { e.selectedIndex = 0; e.dispatchEvent(new Event('change')); })")
    assert page.run("document.getElementById('missing').textContent").startswith("Not on a logarithmic axis: f16, at 0. "), "what an axis cannot show is named"
    page.run("(() => { const e = document.querySelectorAll('#quality select')[2]; e.value = 'linear'; e.dispatchEvent(new Event('change')); })()")
    shapes = dict(page.run("Chart.getChart(document.querySelector('#quality canvas')).data.datasets.map((s) => [s.label, s.pointStyle])"))
    assert {name: shape for name, shape in shapes.items() if "control" in name} == {
        "int8 (control: uniform quantization)": "rect", "int4 (control: uniform quantization)": "rect", "sink=2 window=24 (control: recency)": "triangle",
        "control: uniform quantization": None} and shapes["f16"] == "circle", shapes
    assert page.run("document.getElementById('missing').textContent") == "Controls that these runs lack: oracle (best tokens, chosen afterwards)."
    legend = lambda: page.run("[...document.querySelectorAll('#quality .legend li')].map((e) => e.textContent)")
    assert [label.split()[0] for label in legend()] == ["1", "2", "3", "4"], legend()
    group = lambda index: page.run(f"(() => {{ const e = document.querySelector('#quality select'); e.selectedIndex = {index}; e.dispatchEvent(new Event('change')); }})()")
    group(1)
    assert len(legend()) == 1 and "snapkv(window=4)" in legend()[0] and "control" not in legend()[0], legend() # its window is an option of the score
    group(0)
    # One that looks first sees the largest group; bars are inside the axis; lines join tests of one size.
    sizes = page.run("[...document.querySelector('#quality select').options].map((o) => +o.textContent.match(/\\((\\d+)\\)$/)[1])")
    assert sizes == [5, 1], sizes
    named = page.run("[...document.querySelector('#quality select').options].map((o) => o.value)")
    assert [re.sub("text [0-9a-f]{8}", "text", name) for name in named] == ["tiny, text, context 64, p1, 31 scored", "tiny, text, context 64, p3, 16 scored"], named
    page.run("(() => { const e = document.querySelectorAll('#quality select')[1]; e.value = 'quality_ppl'; e.dispatchEvent(new Event('change')); })()")
    ends = page.run("""(() => { const c = Chart.getChart(document.querySelector('#quality canvas'));
        return [c.scales.y.min, c.scales.y.max, ...c.data.datasets.flatMap((s) => s.data.flatMap((p) => p.se > 0 ? [p.y - p.se, p.y + p.se] : []))]; })()""")
    assert len(ends) == 12 and ends[0] <= min(ends[2:]) and ends[1] >= max(ends[2:]), ends
    page.run("(() => { const e = document.querySelectorAll('#quality select')[1]; e.value = 'quality_kld_mean'; e.dispatchEvent(new Event('change')); })()")
    kinds = page.run("[...document.querySelector('#speed select').options].map((o) => o.value)")
    assert kinds == ["prefill of 8", "prefill of 16", "decode of 4"], kinds
    lines = page.run("Chart.getChart(document.querySelector('#speed canvas')).data.datasets.map((s) => s.data.map((p) => p.x))")
    assert lines == [[0, 32]], lines
    shared = page.run("document.querySelector('#runs .shared').textContent")
    assert "model tiny" in shared and "context" not in shared and not page.run("[...document.querySelectorAll('#runs th')].some((e) => e.textContent === 'model')"), shared
    for figure, n in (("quality", 4), ("roofline", 1)):
        command = page.run(f"document.querySelector('#{figure} .repeat code').textContent")
        assert command.count(" &&\n") == n and command.endswith(" report runs -o page.html") and "eval kld" in command, command

    # Heat maps of the run that evicts: what each layer and head keeps, loses and rounds; means over evictions are those of the file.
    run = page.run("[...document.querySelectorAll('#heat select')[0].options].findIndex((o) => o.textContent.includes('snapkv.h5'))")
    choose = lambda which, index: page.run(f"(() => {{ const e = document.querySelectorAll('#heat select')[{which}]; e.selectedIndex = {index}; e.dispatchEvent(new Event('change')); }})()")
    choose(0, run)
    maps = page.run("[...document.querySelectorAll('#heat select')[1].options].map((o) => o.textContent)")
    file = h5py.File("runs/snapkv.h5")
    wanted = [*(f"{file['evictions'][name].attrs['long_name'].decode()}, mean over evictions" for name in ("kept", "mass_lost", "output_error")), file["layers/key_error"].attrs["long_name"].decode()]
    assert all(title in maps for title in wanted) and sum("by position" in title for title in maps) == 1, maps
    cells = lambda: [[float(x) for x in row] for row in page.run("[...document.querySelectorAll('#heat tbody tr')].map((r) => [...r.querySelectorAll('td')].map((c) => c.title.split(': ')[1].replace(',', '')))")]
    def near(a, b): return len(a) == len(b) and all(len(x) == len(y) and all(math.isclose(p, q, rel_tol=1e-5) for p, q in zip(x, y)) for x, y in zip(a, b))
    layer, head, lost = (file["evictions"][name][:] for name in ("layer", "head", "mass_lost"))
    choose(1, maps.index(wanted[1]))
    assert near(cells(), [[lost[(layer == l) & (head == h)].mean() for l in range(3)] for h in range(2)]), cells() # heads down, layers across
    choose(1, maps.index(wanted[3]))
    assert near(cells(), file["layers/key_error"][:].T.tolist()), cells()
    choose(1, next(i for i, title in enumerate(maps) if "by position" in title))
    budget, first, position = (file["layers"][name][:].astype(int) for name in ("budget", "kept_first", "kept_position"))
    share = [[sum(position[first[l, h]:first[l, h] + budget[l, h]].tolist().count(p) for h in range(2) for p in (2 * b, 2 * b + 1)) / 4 for b in range(24)] for l in range(3)]
    assert near(cells(), share), (cells(), share)

    open("print.pdf", "wb").write(page.print_pdf())
    if shutil.which("pdftotext"):
        text = subprocess.run(["pdftotext", "-layout", "print.pdf", "-"], stdout=subprocess.PIPE, text=True, check=True).stdout
        assert all(os.path.basename(file) in re.sub(r"\s+", "", text) for file in glob.glob("runs/int*.h5")), text[:2000]
        assert text.count("config_hash") == 7, f"details are open {text.count('config_hash')} times in print"
    page.call("Page.navigate", url=f"file://{os.path.abspath('two.html')}")
    page.wait_for("Page.loadEventFired")
    assert [name.split(" (")[0].split(", ")[1] for name in legend()] == [h5py.File("two/a.h5")["config"].attrs["device"].decode().split(" (")[0], "another"], legend()
    assert page.messages == [], page.messages
    print(f"{len(reached)} controls by keyboard; {os.path.getsize('print.pdf')} bytes in print")
finally:
    page.close()
PYTHON
if [[ -n ${KVLAB_SHOTS:-} ]]; then
    mkdir -p "$KVLAB_SHOTS"
    browse --window-size=1200,3200 --screenshot="$KVLAB_SHOTS/light.png" "file://$work/page.html"
    browse --window-size=1200,3200 --blink-settings=preferredColorScheme=0 --screenshot="$KVLAB_SHOTS/dark.png" "file://$work/page.html"
    browse --window-size=500,3600 --screenshot="$KVLAB_SHOTS/phone.png" "file://$work/page.html"
    browse --print-to-pdf="$KVLAB_SHOTS/print.pdf" "file://$work/page.html"
fi

echo broken >runs/broken.h5
rc=0
"$program" report runs -o page.html >out 2>err || rc=$?
[[ $rc == 1 ]] && grep -q 'left out: runs/broken.h5' err || fail "a broken file: exit code $rc: $(cat err)"
