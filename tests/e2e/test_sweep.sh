#!/usr/bin/env bash
# sweep end to end: schema errors, cells and planned bytes, run files by hash, nothing done twice, failing cells, devices, two sweeps at
# once. Called with the program and the project's root. The cells of most checks are a script that copies a run file: what is tested is
# the engine; the last part runs the tiny model.
set -euo pipefail
program=$1 root=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

fail() { echo "FAILED: $*"; exit 1; }
get() { python3 -c 'import json, sys; r = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"; }
refused() { # WORDS: of the message about grid.yaml, which must be a usage error that runs nothing
    local rc=0
    "$program" sweep grid.yaml >out 2>err || rc=$?
    [[ $rc == 2 ]] || fail "$(cat grid.yaml): exit code $rc, wanted 2: $(cat err)"
    grep -qF -- "$1" err || fail "the message lacks \"$1\": $(cat err)"
    [[ ! -e runs ]] || fail "a refused grid left something"
}

# --- errors name file, line and key ---
head='name: t
command: eval ppl
models: [m.gguf]
texts: [text]'
cp "$root/data/models/tiny.gguf" m.gguf
head -c 3000 "$root/LICENSE" >text
printf '%s\nkvs: [f16]\n' "$head" >grid.yaml && refused 'grid.yaml: line 5: Unexpected key: kvs; did you mean kv' && grep -q 'legal are name command' err || fail "line: $(cat err)"
printf '# model: the tiny one\nmodel: [m.gguf]\n%s\n' "$head" >grid.yaml && refused 'grid.yaml: line 2: Unexpected key: model; did you mean models'
printf '%s\noptions: [--output=x.h5]\n' "$head" >grid.yaml && refused "are the sweep's"
printf '%s\ncells: [{options: [--no-run-file]}]\n' "$head" >grid.yaml && refused "are the sweep's"
printf '%s\nkv: {a: b}\n' "$head" >grid.yaml && refused "'kv' (line: 5"
printf '%s\nkv: [f16\n' "$head" >grid.yaml && refused "'kv' (line: 5"
printf '%s\ncells:\n  - {kv: f16}\n  - {kvv: f16}\n' "$head" >grid.yaml && refused 'grid.yaml: line 7: Unexpected key: kvv' && grep -q 'legal are model text kv ctx seed device options' err || fail "line: $(cat err)"
printf 'command: eval ppl\n' >grid.yaml && refused 'grid.yaml: Missing required mapping field: name'
: >grid.yaml && refused 'the file holds nothing'
printf '# only this\n---\n' >grid.yaml && refused 'grid.yaml: '
printf 'name: ../t\ncommand: eval ppl\n' >grid.yaml && refused 'names a folder'
printf '%s\nctx: [64, abc]\n' "$head" >grid.yaml && refused 'ctx=abc: option --ctx: wanted an integer'
printf '%s\nkv: [int88]\n' "$head" >grid.yaml && refused 'kv=int88: --kv: unknown codec'
printf '%s\nseeds: [1]\n' "$head" >grid.yaml && refused 'unknown option --seed'
printf 'name: t\ncommand: tokenize\n' >grid.yaml && refused 'wanted a command that leaves a run file'
printf 'name: t\ncommand: evla ppl\n' >grid.yaml && refused 'wanted a command that leaves a run file'
printf 'name: t\ncommand: eval ppl\nmodels: [none.gguf]\ntexts: [text]\n' >grid.yaml
if "$program" sweep grid.yaml >out 2>err; then fail "a model that is not there"; fi
grep -q 'none.gguf: cannot open' err || fail "a model that is not there: $(cat err)"

# --- cells: product, listed, twins; bytes as plan says ---
cat >grid.yaml <<'YAML'
name: t
command: eval ppl
models: [m.gguf]
texts: [text]
kv: [f16, int4]
ctx: [64, 128]
options: [--chunks=2]
cells:
  - {}
  - {kv: int8 tail=16, options: [--ubatch=32]}
  - {kv: k=f16 v=f16, ctx: 64}     # resolves to a cell of the product
  - {kv: int4(group=24), ctx: 64}  # 24 does not divide the head
YAML
"$program" sweep grid.yaml --dry-run --json >dry.json 2>err || fail "dry run: $(cat err)"
[[ $(get dry.json '(r["n_cells"], r["waiting"], len({c["id"] for c in r["cells"]}))') == "(7, 7, 7)" ]] || fail "cells: $(cat dry.json)"
[[ $(get dry.json '[c["cell"].split("kv=")[1] for c in r["cells"]]') == \
    "['f16, ctx=64', 'f16, ctx=128', 'int4, ctx=64', 'int4, ctx=128', 'int8 tail=16, ctx=64, --ubatch=32', 'int8 tail=16, ctx=128, --ubatch=32', 'int4(group=24), ctx=64']" ]] ||
    fail "order: $(get dry.json '[c["cell"] for c in r["cells"]]')"
[[ ! -e runs ]] || fail "a dry run left something"
"$program" plan -m m.gguf -c 128 --kv "int8 tail=16" --ubatch 32 --protocol p1 --json >plan.json
[[ $(get plan.json '(r["bytes_per_token"], r["resident_bytes"])') == "$(get dry.json '(r["cells"][5]["bytes_per_token"], r["cells"][5]["resident_bytes"])')" ]] ||
    fail "planned bytes: $(cat plan.json) $(get dry.json 'r["cells"][5]')"
[[ $(get dry.json '"group" in r["cells"][6]["error"] and r["cells"][6]["resident_bytes"]') == None ]] || fail "a cell that can't be planned"
"$program" sweep grid.yaml --dry-run >table && grep -q 't: 7 cells, 7 waiting' table || fail "the table: $(cat table)"

# --- the engine, with a program that copies a run file ---
cat >fake <<'SH'
#!/usr/bin/env bash
for word; do out=$word; done # the last one
for word; do case $word in fail) echo "kvlab: error: as asked" >&2; exit 1 ;; skip) echo "kvlab: skipped: not here" >&2; exit 77 ;; quiet) exit 0 ;; esac; done
echo "start $*" >>log
echo run >"$out.part"
sleep "${FAKE_SECONDS:-0}"
mv "$out.part" "$out"
echo "end $*" >>log
SH
chmod +x fake
printf 'name: f\ncommand: any words\nprogram: ./fake\nkv: [a, b, fail, skip, quiet]\nseeds: [1, 2]\ntexts: [text]\n' >fake.yaml
sweep() { # EXIT-CODE DONE-BEFORE DONE FAILED SKIPPED ARGUMENT...
    local rc=0 counts
    local wanted=$1 state="($2, $3, $4, $5)"
    shift 5
    "$program" sweep "$@" --json >sweep.json 2>err || rc=$?
    [[ $rc == "$wanted" ]] || fail "sweep $*: exit code $rc, wanted $wanted: $(cat err)"
    counts=$(get sweep.json '(r["done_before"], r["done"], r["failed"], r["skipped"])')
    [[ $counts == "$state" ]] || fail "sweep $*: $counts, wanted $state: $(cat err)"
}
sweep 3 0 4 4 2 fake.yaml
[[ $(grep -c start log) == 4 ]] || fail "4 cells run: $(cat log)"
grep -q '^start any words --file text --kv a --seed 1 --output runs/f/[0-9a-f]*.h5$' log || fail "the words of a cell: $(cat log)"
[[ $(get sweep.json 'sorted({c["error"] for c in r["cells"] if "error" in c})') == "['as asked', 'ended well and left no run file', 'not here']" ]] ||
    fail "errors: $(cat sweep.json)"
[[ $(find runs/f -name '*.h5' | wc -l) == 4 && $(find runs/f -name '*.log' | wc -l) == 6 ]] || fail "files: $(ls runs/f)"
sed -i 's/, fail, skip, quiet//' fake.yaml
stat -c '%n %Y %i' runs/f/*.h5 >before
sweep 0 4 0 0 0 fake.yaml # nothing to do: no process starts, no file changes
[[ $(grep -c start log) == 4 ]] && stat -c '%n %Y %i' runs/f/*.h5 | cmp -s before || fail "a second call did work"
sweep 0 4 0 0 0 fake.yaml --resume
rc=0
"$program" sweep fake.yaml -o never --resume 2>err || rc=$?
[[ $rc == 2 && ! -e never ]] && grep -q -- "--resume: never has none of this grid's 4 cells" err || fail "--resume of nothing: exit code $rc: $(cat err)"
sed -i 's/kv: \[a, b\]/kv: [a, c]/' fake.yaml
sweep 0 2 2 0 0 fake.yaml # one value changed
echo more >>text
sweep 0 0 4 0 0 fake.yaml # the content of the text changed
sweep 0 0 4 0 0 fake.yaml -o elsewhere
id=$(get sweep.json 'r["cells"][0]["id"]')
sweep 0 1 0 0 0 fake.yaml -o elsewhere --only "${id:0:8}"
sweep 0 2 0 0 0 fake.yaml -o elsewhere --only "$id,$(get sweep.json 'r["cells"][0]["id"]'),$(cd elsewhere && ls | tail -n 1 | cut -d. -f1)"
"$program" sweep fake.yaml --only 0000000000000000 2>err && fail "--only of nothing"
grep -q 'no cell' err || fail "--only: $(cat err)"

# --- a dead cell's leftovers; a running cell is left alone and waited for; never two at once on one device ---
rm -f elsewhere/"$id".h5 log
echo half >elsewhere/"$id".h5.part
sweep 0 3 1 0 0 fake.yaml -o elsewhere
[[ $(cat elsewhere/"$id".h5) == run && ! -e elsewhere/$id.h5.part ]] || fail "leftovers: $(ls elsewhere)"
rm -rf elsewhere log
FAKE_SECONDS=0.3 "$program" sweep fake.yaml -o elsewhere --json >first.json 2>/dev/null &
sleep 0.15
FAKE_SECONDS=0.3 "$program" sweep fake.yaml -o elsewhere --json >second.json 2>/dev/null
wait $!
[[ $(grep -c start log) == 4 ]] || fail "two sweeps ran $(grep -c start log) cells of 4"
[[ $(get first.json 'r["done"]') -gt 0 && $(get second.json 'r["done"]') -gt 0 ]] || fail "two sweeps did not share the work"
printf 'devices: [x, y]\n' >>fake.yaml
rm -f log
FAKE_SECONDS=0.1 "$program" sweep fake.yaml -o devices --jobs 8 2>/dev/null >out
python3 - <<'PYTHON' || fail "devices: $(cat log)"
running, most = [], 0
for line in open("log"):
    device = line.split("--device ")[1].split()[0]
    if line.startswith("start"):
        assert device not in running, line
        running.append(device)
    else:
        running.remove(device)
    most = max(most, len(running))
assert most == 2, most
PYTHON

# --- the ETA knows that cells are not equal: 6 fast ones and a slow one have ended, 5 slow ones are left ---
cat >uneven <<'SH'
#!/usr/bin/env bash
for word; do out=$word; done
[[ $* == *"--kv slow"* ]] && sleep 1
echo run >"$out"
SH
chmod +x uneven
printf 'name: u\ncommand: x\nprogram: ./uneven\nkv: [fast, slow]\nseeds: [1, 2, 3, 4, 5, 6]\n' >uneven.yaml
"$program" sweep uneven.yaml >/dev/null 2>err || fail "uneven cells: $(cat err)"
[[ $(sed -n 's/^\[7\/12\].*ETA \([0-9]*\) s$/\1/p' err) -ge 5 && $(tail -n 1 err) == *"ETA 0 s" ]] || fail "the ETA: $(cat err)"

# --- Ctrl-C: running cells end, the same command goes on ---
rm -rf devices log
FAKE_SECONDS=0.3 "$program" sweep fake.yaml -o devices >out 2>err &
pid=$!
until compgen -G 'devices/*.h5' >/dev/null; do sleep 0.05; done
kill -INT $pid
rc=0
wait $pid || rc=$?
[[ $rc == 1 ]] && grep -q 'interrupted: [1-7] of 8 cells' err || fail "Ctrl-C: exit code $rc: $(cat err)"
"$program" sweep fake.yaml -o devices >out 2>/dev/null
[[ $(find devices -name '*.h5' | wc -l) == 8 && $(find devices -name '*.log' | wc -l) == 0 ]] || fail "after Ctrl-C: $(ls devices)"

# --- a full disk stops the sweep before its cells compute for nothing ---
mkdir small
if mount -t tmpfs -o size=8m none small 2>/dev/null; then
    rc=0
    "$program" sweep fake.yaml -o small/runs >out 2>err || rc=$?
    ran=$(find small -name '*.h5' | wc -l) # before the file system goes
    umount small
    [[ $rc == 1 && $ran == 0 ]] && grep -q 'small/runs: [0-9]* MiB are free there, a run file may take 16' err || fail "a full disk: exit code $rc, $ran runs: $(cat err)"
else
    echo "no small file system can be mounted here: a full disk is not tried"
fi

# --- contexts reach the tasks that call them so ---
printf 'name: r\ncommand: eval recall\nmodels: [m.gguf]\ntexts: [text]\nctx: [128, 256]\nseeds: [1, 2]\n' >recall.yaml
sweep 0 0 0 0 0 recall.yaml --dry-run
[[ $(get sweep.json 'len({c["id"] for c in r["cells"]})') == 4 ]] || fail "contexts of a task: $(cat sweep.json)"

# --- the tiny model ---
if [[ $("$program" devices --json | python3 -c 'import json, sys; print(len(json.load(sys.stdin)["devices"]))') == 0 ]]; then
    echo "note: no OpenCL device, no real cell run"
    exit 0
fi
sed -i 's/^ctx:.*/ctx: [64]/' grid.yaml
sweep 3 0 3 1 0 grid.yaml
for file in runs/t/*.h5; do "$program" log show --json "$file" >show.json && [[ $(get show.json 'r["status"]') == complete ]] || fail "$file"; done
[[ $(get show.json '"--output runs/t/" in r["command_line"]') == True ]] || fail "the run file does not say its command"
sweep 3 3 0 1 0 grid.yaml
! grep -q 'is of revision' err || fail "the same program: $(cat err)"
if python3 -c 'import h5py' 2>/dev/null; then # cells of another program are done, and named
    for file in runs/t/*.h5; do python3 -c 'import h5py, numpy, sys; h5py.File(sys.argv[1], "r+").attrs["git"] = numpy.bytes_("0123456789ab")' "$file"; done
    sweep 3 3 0 1 0 grid.yaml
    [[ $(grep -c 'is of revision 0123456789ab, this program is' err) == 1 ]] || fail "another program: $(cat err)"
fi
[[ $(get sweep.json '[c["error"] for c in r["cells"] if c["status"] == "failed"]') == *"group"* ]] || fail "the failing cell: $(cat sweep.json)"
