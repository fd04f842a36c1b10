#!/usr/bin/env bash
# kvlab trace: the page's states are those that the caches' rules give, kept tokens those of the run file of the same run, attention sums to 1; in a
# real browser (headless Chromium, else that part is left out) it steps, switches and shows without a console message.
# Called with the program and the project's root.
set -euo pipefail
program=$1 root=$2
python3 -c 'import h5py' 2>/dev/null || { echo "skipped: no python3 with h5py"; exit 77; }
[[ $("$program" devices --json | python3 -c 'import json, sys; print(len(json.load(sys.stdin)["devices"]))') != 0 ]] || { echo "skipped: no OpenCL device"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
fail() { echo "FAILED: $*"; exit 1; }
model=$root/data/models/tiny.gguf
prompt="the cache keeps <b>the</b> cache the cache keeps the cache "
trace() { "$program" trace -m "$model" -p "$prompt" -n 20 --kv "$1" -o "$2" >out || fail "trace --kv '$1'"; }
trace "int8 sink=2 tail=4 window=16" window.html
trace "kivi(residual=32)" kivi.html
trace "int8 keep=snapkv(window=4) budget=uniform(kept=0.5)" snapkv.html
# a continuation is needed where a prompt is compressed; its run file says what was kept
"$program" generate -m "$model" -p "$prompt" -n 1 --ignore-eos --kv "int8 keep=snapkv(window=4) budget=uniform(kept=0.5)" -o snapkv.h5 &>/dev/null || fail "generate"
python3 - <<'PYTHON' || fail "what the page holds"
import json, re, h5py
def page(name):
    data = json.loads(re.search(r'id="data">(.*?)</script>', open(name).read(), re.S).group(1))
    assert len(data["steps"]) == 21 and len(data["tokens"]) == data["n_prompt"] + 20
    streams, at = data["shape"]["n_layer"] * data["shape"]["n_kv_head"], 0
    for step in data["steps"]:
        for _ in range(streams):
            levels = data["attention"][at:at + step["position"]]
            at += step["position"]
            assert abs(sum(((ord(c) - 48) / 63) ** 2 for c in levels) - 1) < 0.1
    assert at == len(data["attention"])
    return data
expand = lambda runs: "".join(c * int(n) for n, c in re.findall(r"(\d+)([a-z])", runs))
def states(data, step, stream): return [expand(side) for side in data["states"][data["steps"][step]["state"][stream]].split("|")]

for step, n in ((0, None), (7, None), (20, None)):
    data = page("window.html")
    n = data["steps"][step]["position"]
    k, v = states(data, step, 3)
    assert k == v == "ss" + "x" * (n - 18) + "c" * 12 + "t" * 4, (n, k, v)
    data = page("kivi.html")
    k, v = states(data, step, 0)
    n = len(k)
    assert k == "c" * (n // 32 * 32) + "t" * (n % 32) and v == "c" * (n - 32) + "t" * 32, (k, v)
data, file = page("snapkv.html"), h5py.File("snapkv.h5")
first, budget, kept = (file["layers"][name][:] for name in ("kept_first", "budget", "kept_position"))
heads = data["shape"]["n_kv_head"]
for layer in range(first.shape[0]):
    for head in range(heads):
        want = kept[int(first[layer, head]):][:int(budget[layer, head])].tolist()
        k, _ = states(data, 0, layer * heads + head)
        assert [i for i, c in enumerate(k) if c != "x"] == want, (layer, head)
print("states of a window, of KIVI and of SnapKV are right")
PYTHON
rc=0
"$program" trace -m "$model" -p "$(printf 'x%.0s' {1..600})" -o long.html 2>err || rc=$?
[[ $rc == 2 && ! -e long.html ]] && grep -q 512 err || fail "a long prompt: exit code $rc: $(cat err)"

# A model of latents is one, and its record as large as the cache's.
"$program" trace -m "$root/data/models/arch_deepseek2.gguf" -p "the cache" -n 2 --kv f16 -o latent.html >/dev/null || fail "trace of a model of latents"
python3 - <<'PYTHON' || fail "the shape of a model of latents"
import json, re
data = json.loads(re.search(r'id="data">(.*?)</script>', open("latent.html").read(), re.S).group(1))
shape = data["shape"]
assert (shape["n_layer"], shape["n_head"], shape["key_dim"], shape["value_dim"], shape["joint"]) == (3, 4, 48, 32, 80), shape
PYTHON

browser=$(command -v chromium || command -v chromium-browser) || { echo "no chromium: the page was not opened"; exit 0; }
python3 - <<'PYTHON'
page = open("snapkv.html").read()
probe = """<script>
const result = { tokens: document.querySelectorAll("#tokens button").length };
get("next").click(); get("next").click(); result.at = at; result.where = get("where").textContent;
result.gone = document.querySelectorAll("#tokens .gone").length;
get("cached").click(); result.computed = get("computed").textContent;
document.querySelector("#scheme input[value=MQA]").click(); result.size = document.querySelector("#sizes td").textContent;
buttons[3].focus(); result.about = get("about-token").textContent;
get("next").click(); result.later = get("about-token").textContent; get("back").click(); result.again = get("about-token").textContent;
result.own = [...document.querySelectorAll("#scheme label")].map((e) => e.textContent.trim());
document.querySelectorAll("#streams rect")[5].dispatchEvent(new Event("click")); result.layer = get("layer").value + " " + get("head").value;
document.body.append(Object.assign(document.createElement("pre"), { id: "probe", textContent: JSON.stringify(result) }));
</script></body>"""
open("probe.html", "w").write(page.replace("</body>", probe))
PYTHON
timeout 120 "$browser" --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir="$work/profile" --enable-logging=stderr \
    --host-resolver-rules="MAP * ~NOTFOUND" --virtual-time-budget=5000 --dump-dom "file://$work/probe.html" >dom.html 2>err || fail "the browser: $(tail -n 5 err)"
! grep CONSOLE err || fail "messages on the console"
python3 - <<'PYTHON' || fail "the page in the browser"
import html, json, re
dom = open("dom.html").read()
result = json.loads(html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', dom, re.S).group(1)))
data = json.loads(re.search(r'id="data">(.*?)</script>', dom, re.S).group(1))
n = data["n_prompt"] + 2
assert result["at"] == 2 and result["tokens"] == data["n_prompt"] + 20 and f"{n} tokens seen" in result["where"], result
assert result["gone"] > 0 and result["computed"] == str(n * 6) and result["size"] == str(3 * 2 * 32 * 2), result
assert result["later"].startswith("Token 3 ") and result["later"] != result["about"] == result["again"], result # attention to it has changed
assert result["own"] == ["MHA", "GQA (this model)", "MQA", "MLA"], result
assert result["about"].startswith("Token 3 ") and result["layer"] == "2 1", result
assert "<b>the" not in dom.split('id="data"')[0] and "<b>the" not in re.sub(r'<script.*?</script>', "", dom, flags=re.S), "the prompt became HTML"
print("the page steps, switches and shows")
PYTHON
python3 - "$browser" "$root/tests/e2e" <<'PYTHON' || fail "the page by keyboard"
import os, sys
sys.path.append(sys.argv[2])
from browser import Browser
page = Browser(sys.argv[1], os.path.abspath("profile2"), f"file://{os.path.abspath('snapkv.html')}")
try:
    there = page.run("""(() => { const all = [...document.querySelectorAll("button, select, input, summary, a[href]")].filter((e) => e.checkVisibility({ visibilityProperty: true }));
        return all.filter((e) => e.type !== "radio").length + 1; })()""") # a group of radio buttons is one stop
    stops = [stop for stop in page.tab_through() if stop[0] in ("SELECT", "BUTTON", "SUMMARY", "A", "INPUT")]
    assert len(stops) == there > 20, (len(stops), there)
    assert all(outline for _, _, outline in stops), [stop for stop in stops if not stop[2]]
    while page.run("document.activeElement.id") != "step": page.press("Tab")
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert page.run("at") == 2 and page.run("get('where').textContent").startswith("token 2 of"), page.run("get('where').textContent")
    assert len(page.print_pdf()) > 10000 and page.messages == [], page.messages
    print(f"{len(stops)} controls by keyboard; the arrows step")
finally:
    page.close()
PYTHON
