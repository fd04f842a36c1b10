#!/usr/bin/env bash
# eval stream end to end: rows, keys, bytes, a stream beyond the trained context, refusals. Called with the program and the project's root.
set -euo pipefail
program=$1 root=$2
model=$root/data/models/tiny.gguf
devices=$("$program" devices)
[[ $devices == "0 "* ]] || { echo "skipped: no OpenCL device"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

fail() { echo "FAILED: $*"; exit 1; }
stream() { "$program" eval stream -m "$model" -f text --exact --json --quiet "$@"; }
refused() { # WORDS-OF-THE-MESSAGE ARGUMENTS...
    local words=$1 rc=0
    shift
    stream --no-run-file "$@" >out 2>err || rc=$?
    [[ $rc == 1 || $rc == 2 ]] || fail "$*: exit code $rc, wanted a refusal: $(cat err)"
    grep -qF -- "$words" err || fail "$*: the message lacks \"$words\": $(cat err)"
}
python3 -c 'import random, sys
random.seed(1); sys.stdout.buffer.write(bytes(random.randrange(1, 128) for _ in range(3000)))' >text

refused "has 3000 tokens" -n 4000
refused "2 to 268435456" -n 1
refused "1 to 4096" --block 0
refused "trained for 2048" -n 2200 --kv f16
refused "trained for 2048" -n 2200 --kv "sink=4 window=60"
refused "trained for 2048" -n 2200 --kv "rope=pre pos=compact keep=streaming budget=uniform(tokens=2100) when=full"
refused "codec kivi" -n 100 --kv "kivi keep=h2o budget=uniform(tokens=60) when=full"
refused "unknown codec" -n 100 --kv nonsense
refused "pos=compact renumbers" -n 100 --kv "pos=compact"
refused "window= and keep=" -n 100 --kv "window=60 keep=h2o budget=uniform(tokens=60) when=full"

# One token, then blocks that end at multiples of their size.
stream -n 300 --block 100 --kv f16 -o full.h5 >full.json
stream -n 300 --block 64 --kv "sink=4 window=60 pos=compact" --no-run-file >window.json
stream -n 300 --block 64 --kv "rope=pre pos=compact keep=streaming(sink=4) budget=uniform(tokens=63) when=full" -o evicting.h5 >evicting.json
stream -n 2100 --block 300 --kv "rope=pre pos=compact keep=h2o budget=uniform(tokens=60) when=every:9" --no-run-file >long.json
"$program" eval ppl -m "$model" -f text -c 300 --chunks 1 --protocol p2 --kv f16 --exact --json --quiet --no-run-file >ppl.json
"$program" log show evicting.h5 --json >shown.json
python3 - <<'PYTHON'
import json
full, window, evicting, long, ppl, shown = (json.load(open(name + ".json")) for name in ("full", "window", "evicting", "long", "ppl", "shown"))
rows = lambda r: [(b["first"], b["n"]) for b in r["blocks"]]
assert rows(full) == [(1, 1), (2, 98), (100, 100), (200, 100)], rows(full)
assert full["n_tokens"] == 299 and full["protocol"] == "p4" and full["ubatch"] == 1
mean = sum(b["nll"] * b["n"] for b in full["blocks"]) / 299
assert abs(mean - full["nll"]) < 1e-9
# The same tokens scored by eval ppl: 151 .. 299 are the second half of its window, and 200 .. 299 lie in it.
assert abs(full["blocks"][3]["nll"] - ppl["nll"]) < 0.5 and full["nll"] > 0
# Two ways to the same cache: sinks turned behind a window, and keys kept before RoPE and turned by rank.
for a, b in zip(window["blocks"], evicting["blocks"]):
    assert abs(a["nll"] - b["nll"]) < 1e-3, (a, b)
# Memory does not grow, not even beyond the trained context.
for r in (window, evicting, long):
    assert len({b["resident_bytes"] for b in r["blocks"]}) == 1
assert long["n_tokens"] == 2099
print("source of the scores:", sorted(set(json.dumps(shown).split('"')) & {"position", "append", "used"}))
PYTHON
echo "ok"
