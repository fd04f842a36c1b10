#!/usr/bin/env bash
# experiments/e90_gpu/run.sh and its bundle, with small sizes and a tiny model on the default device: its outputs are there and can be read.
# Called with the program and the project's root.
set -euo pipefail
program=$(readlink -f "$1") root=$2
model=$root/data/models/tiny.gguf
[[ -f $model ]] || { echo "skipped: no $model (scripts/make_tiny_model.py makes it)"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() { echo "FAILED: $*"; exit 1; }
with_modules() { # MODULES...: a Python that has them
    local python
    for python in python3 /usr/bin/python3; do
        "$python" -c "import $(IFS=,; echo "$*")" 2>/dev/null && { echo "$python"; return; }
    done
    return 1
}

# --- the bundle is all that the script needs ---
KVLAB=$program MODEL=$model "$root/experiments/e90_gpu/bundle.sh" "$work/kvlab-gpu" >"$work/said" || fail "bundle.sh: $(cat "$work/said")"
[[ -f $work/kvlab-gpu.tar ]] || fail "no tar"
while read -r file _; do
    [[ -f $work/kvlab-gpu/$file ]] || fail "LIBRARIES names $file, which is not there"
done <"$work/kvlab-gpu/LIBRARIES"
grep -q '^lib/libhdf5' "$work/kvlab-gpu/LIBRARIES" && grep -q '^fallback/libOpenCL' "$work/kvlab-gpu/LIBRARIES" || fail "LIBRARIES: $(cat "$work/kvlab-gpu/LIBRARIES")"
! grep -Eq '/lib(c|m)\.so' "$work/kvlab-gpu/LIBRARIES" || fail "glibc was packed"
[[ $(LD_LIBRARY_PATH=$work/kvlab-gpu/lib ldd "$work/kvlab-gpu/lib/kvlab") == *"$work/kvlab-gpu/lib/libhdf5"* ]] || fail "the packed libraries are not the ones taken"

# --- a run ---
env -u KVLAB -u MODEL OUT="$work/out" E90_QUICK=1 E90_SECONDS=1200 "$work/kvlab-gpu/run.sh" >"$work/stdout" 2>"$work/stderr" ||
    fail "run.sh: exit code $?: $(tail -n 30 "$work/stderr")"
cmp -s "$work/stdout" "$work/out/summary.md" || fail "what is printed is not summary.md"
for step in devices peaks check {speed,kernels}-{f16,int8,int4}-d{256,1024} speed-{f16,int8,int4}-d0 sequences-{f16,int8,int4}-d256; do
    grep -q "^| $step | ok | [0-9]* |$" "$work/out/summary.md" || fail "no step $step that is ok: $(cat "$work/out/summary.md")"
done
grep -q '^Self-check: all [0-9]* checks passed$' "$work/out/summary.md" || fail "the self-check's verdict"
grep -Eq '^Measured: read [0-9]+ GB/s, copy [0-9]+ GB/s, multiply-add [0-9]+ GFLOP/s, launch [0-9.]+ us\.$' "$work/out/summary.md" || fail "the peaks"
for cache in f16 int8 int4; do
    for test in pp64 tg4 {pp64,tg4}@d{256,1024} tg2x32@d256; do
        [[ $(grep -Ec "^\| $cache \| $test +\| +[0-9.]+ \| +- \|" "$work/out/summary.md") == 1 ]] || fail "no speed of $cache $test"
    done
    for test in {pp64,tg2}@d{256,1024}; do
        [[ $(grep -c "^| $cache | $test | kvl_attend " "$work/out/summary.md") == 1 ]] || fail "no attention kernel of $cache $test"
    done
done
[[ $(find "$work/out" -name '*.h5' | wc -l) == 18 ]] || fail "18 run files wanted: $(ls "$work/out")"
for file in "$work"/out/*.h5; do
    [[ $("$program" log show "$file") == *complete* ]] || fail "$file is not a complete run file"
done
! OUT="$work/out" KVLAB=$program MODEL=$model "$root/experiments/e90_gpu/run.sh" 2>"$work/stderr" || fail "results were written over"
grep -q "not empty" "$work/stderr" || fail "the message about a folder in use: $(cat "$work/stderr")"

# --- no time, no device: skipped, and said so ---
OUT="$work/hasty" E90_QUICK=1 E90_SECONDS=5 "$work/kvlab-gpu/run.sh" >"$work/stdout" 2>/dev/null || fail "run.sh without time: exit code $?"
grep -q '| speed-int4-d1024 | skipped: ' "$work/stdout" || fail "not skipped: $(cat "$work/stdout")"
if [[ ! -e /usr/local/nvidia && ! -e /opt/rocm ]]; then # else the script would find that driver
    rc=0
    OCL_ICD_VENDORS=$work/none OUT="$work/nothing" "$work/kvlab-gpu/run.sh" >"$work/stdout" 2>&1 || rc=$?
    [[ $rc == 77 ]] && grep -q "no OpenCL device" "$work/stdout" || fail "without a device: exit code $rc, $(cat "$work/stdout")"
fi

# --- a roofline from one of the run files ---
if python=$(with_modules h5py matplotlib); then
    "$python" "$root/experiments/figures/roofline.py" "$work/out/kernels-int4-d256.h5" -o "$work/roofline.svg" || fail "roofline.py"
    "$python" - "$work/roofline.svg" <<'PYTHON' || fail "the roofline is not what it should be"
import sys, xml.etree.ElementTree as tree
comments = [e.text for e in tree.parse(sys.argv[1], tree.XMLParser(target=tree.TreeBuilder(insert_comments=True))).iter() if e.tag is tree.Comment]
for words in ("attend", "gemm", "gemv", "pp64@d256", "tg2@d256", "GB/s", "GFLOP/s"):
    assert any(words in comment for comment in comments), words
PYTHON
    ! "$python" "$root/experiments/figures/roofline.py" "$work/out/speed-f16-d0.h5" -o "$work/none.svg" 2>"$work/stderr" || fail "a figure without kernel times"
    grep -q "kvlab bench --kernels" "$work/stderr" || fail "the message about a file without kernel times"
else
    echo "note: no Python with h5py and matplotlib, no roofline drawn"
fi
