#!/usr/bin/env bash
# kvlab xcheck. Called with the program and the project's root. First with a stand-in for Intel's compiler, whose answers are chosen here;
# then with the compilers of this machine on two programs. KVLAB_SLOW=1: on all of them, against the committed table (an hour).
set -euo pipefail
program=$1 root=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export TMPDIR=$work/tmp
mkdir tmp bin none
cc=$(command -v cc) || { echo "skipped: no cc, which prepares the texts"; exit 77; }
for folder in bin none; do ln -s "$cc" $folder/cc; done

fail() { echo "FAILED: $*"; exit 1; }
# EXIT-CODE ARGUMENTS...: runs xcheck on the one-kernel program norm.cl with the stand-in only.
stand_in() {
    local wanted=$1 rc=0
    shift
    PATH=$work/bin "$program" xcheck --only intel --match norm.cl --table t.csv "$@" >out 2>err || rc=$?
    [[ $rc == "$wanted" ]] || fail "$* (stand-in: ${SAYS:-}${SPILLS:-}): exit code $rc, wanted $wanted: $(cat out err)"
    [[ -z $(ls -A tmp) ]] || fail "$*: left in the temporary folder: $(ls tmp)"
}

cat >bin/ocloc <<'SH'
#!/bin/sh
if [ "$1" = query ]; then
    printf "${VERSION:-1.2}" >OCL_DRIVER_VERSION
    exit 0
fi
echo run >>"$COUNT"
if [ "$SAYS" = error ]; then
    printf '\np.cl:3:1: error: no such word\nmore\n'
    exit 1
fi
if [ "$SAYS" = nothing ]; then
    printf 'ELF' >k.bin
    exit 0
fi
printf "ELF\nversion: '1.19'\nkernels:\n  - name:            kvl_rms_norm\n    execution_env:\n      grf_count:       128\n" >k.bin
printf '      required_work_group_size: [ 32, 1, 1 ]\n      simd_size:       16\n      slm_size:        %d\n' "${LOCAL:-4096}" >>k.bin
printf '    payload_arguments:\n      - arg_type: x\n        size:            8\n' >>k.bin
printf '    per_thread_memory_buffers:\n      - type:            scratch\n        size:            1024\n' >>k.bin
printf 'kernels_misc_info:\n  - name:            kvl_rms_norm\n' >>k.bin
[ -z "$SPILLS" ] || echo "warning: kernel kvl_rms_norm  compiled SIMD16 allocated 128 regs and spilled around $SPILLS"
exit 0
SH
chmod +x bin/ocloc
export COUNT=$work/count
runs() { wc -l <"$COUNT"; }

# --- what is read, and what is written ---
stand_in 0 --update
grep -q '^norm.cl .*,gen9,kvl_rms_norm,ok,32,16,128,0,64,4096,57$' t.csv || fail "row of gen9: $(cat t.csv)"
grep -q '^# intel: ocloc 1.2$' t.csv || fail "the compiler's version"
[[ $(grep -c ^norm.cl t.csv) == 3 && $(runs) == 3 ]] || fail "three targets wanted"

# --- unchanged text and compiler: not compiled again ---
stand_in 0
[[ $(runs) == 3 ]] || fail "compiled again"
stand_in 0 --fresh
[[ $(runs) == 6 ]] || fail "--fresh must compile again"

# --- worse than the table ---
SPILLS=5 stand_in 3 --fresh
grep -q '^worse: norm.cl .*gen9: kvl_rms_norm spills 5, in the table 0$' out || fail "spill not named: $(cat out)"
SAYS=error stand_in 3 --fresh
grep -q '^worse: .*p.cl:3:1: error: no such word$' out || fail "error not named: $(cat out)"
SAYS=nothing stand_in 3 --fresh
LOCAL=70000 stand_in 3 --fresh
grep -q 'needs 70000 bytes of local memory, a group has 65536' out || fail "too much local memory: $(cat out)"
SPILLS=5 stand_in 3 --fresh --json
python3 - out <<'PYTHON' ||
import json, sys
r = json.load(open(sys.argv[1]))
assert r["worse"] == 3 and r["rows"][0]["spills"] == 5 and r["rows"][0]["verdict"] == "worse" and r["targets"][0]["target"] == "gen9"
PYTHON
    fail "JSON"

# --- accepted with --update ---
SPILLS=5 stand_in 0 --fresh --update
SPILLS=5 stand_in 0 --fresh
SPILLS=6 stand_in 3 --fresh
SAYS=error stand_in 0 --fresh --update
SAYS=error stand_in 0 --fresh
SPILLS=5 stand_in 0 --fresh # it builds again: better than the table, whatever it spills
stand_in 0 --fresh --update

# --- another compiler: everything is compiled, spills are not compared, a part of the table can't be replaced ---
before=$(runs)
VERSION=2.0 SPILLS=7 stand_in 0
[[ $(runs) == $((before + 3)) ]] || fail "another compiler must compile"
grep -q 'another compiler' out || fail "another compiler not named"
VERSION=2.0 SAYS=error stand_in 3
VERSION=2.0 stand_in 2 --update
grep -q '^# intel: ocloc 1.2$' t.csv || fail "a refused update changed the table"

# --- refusals ---
stand_in 2 --only
stand_in 2 --match "no such program"
rc=0
PATH=$work/none "$program" xcheck --table t.csv >out 2>err || rc=$?
[[ $rc == 77 ]] && grep -q 'no compiler is here' err || fail "without compilers: exit code $rc: $(cat err)"
echo 'norm.cl,x' >>t.csv
stand_in 1
grep -q 'line 6' err || fail "a damaged table must be named by line: $(cat err)"
rm t.csv

# --- every kernel is in the committed table ---
table=$root/data/xcheck.csv
[[ -f $table ]] || fail "no $table"
mapfile -t sources < <(ls "$root"/cl/*.cl | grep -vE '/(gemm|gemv)\.cl$') # these two are for devices that have vectors in a work-item, which no GPU here has
for kernel in $(grep -hoE '\b_*kernel\b[^;{]*' "${sources[@]}" | grep -oE '\b(kvl|logprob)_[a-z0-9_]+ *\(' | tr -d ' ('); do
    grep -q ",$kernel," "$table" || fail "kernel $kernel is not in data/xcheck.csv; kvlab xcheck --update"
done

# --- the real compilers ---
rc=0
"$program" xcheck --match norm.cl --table real.csv --update >out 2>err || rc=$?
if [[ $rc == 77 ]]; then
    echo "note: no compiler for GPUs here, checked with the stand-in only"
    exit 0
fi
[[ $rc == 0 ]] || fail "norm.cl: exit code $rc: $(cat out err)"
for target in sm_75 sm_80 sm_90 gfx906 gfx90a gfx1030 gen9 dg2 pvc; do
    grep -q "^$target .*skipped" out || grep -q ",$target,kvl_rms_norm,ok," real.csv || fail "$target: neither skipped nor compiled: $(cat out)"
done
if [[ ${KVLAB_SLOW:-0} == 1 ]]; then
    "$program" xcheck --table "$table" >out 2>err || fail "worse than the committed table: $(grep ^worse out) $(cat err)"
else
    "$program" xcheck --match "attend.cl int4 d64 x1" --table "$table" >out 2>err || fail "worse than the committed table: $(grep ^worse out) $(cat err)"
fi
grep skipped out || true
echo "xcheck: $(grep -c kernels out) targets compiled"
