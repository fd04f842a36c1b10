#!/usr/bin/env bash
# A sweep on a real Slurm of one node that this test starts and stops: an array of 44 cells, one cell killed, one task cancelled, the node
# drained and resumed, the folder merged while it runs; at the end nothing is lost and nothing ran twice. Called with the program and the
# project's root. KVLAB_SLURM_CELLS=10000 measures a large grid instead.
set -euo pipefail
program=$1 root=$2
source "$root/tests/e2e/slurm_node.sh"
missing=$(slurm_missing)
[[ -z $missing ]] || { echo "skipped: no $missing; the Debian packages slurm-wlm and munge have it"; exit 77; }
work=$(mktemp -d /tmp/kvl.XXXXXX)
trap 'slurm_stop; rm -rf "$work"' EXIT
cd "$work"
fail() { echo "FAILED: $*"; exit 1; }
get() { python3 -c 'import json, sys; r = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"; }
done_cells() { find runs -name '*.h5' | wc -l; }
until_() { # SECONDS CONDITION: a shell condition comes true
    local end=$((SECONDS + $1))
    until eval "$2"; do
        ((SECONDS < end)) || { tail -n 3 "$work"/slurm/*.log; fail "not within $1 s: $2; $(squeue) $(cat runs/s/*.out | tail -n 5)"; }
        sleep 0.1
    done
}
# Not kvlab's fault: slurmd wants /sys/fs/cgroup, which a chroot or a container may not have.
slurm_start "$work/slurm" || { echo "skipped: Slurm does not start here: $(grep -h error "$work"/slurm/*.out | head -n 3)"; exit 77; }

# A cell: a copy of a run file if there is a device to make one, as long as FAKE_SECONDS.
"$program" eval ppl -m "$root/data/models/tiny.gguf" -f "$root/LICENSE" -c 64 --chunks 2 -o template.h5 &>/dev/null || echo no >template.h5
cat >fake <<'SH'
#!/bin/sh
for word; do out=$word; done
echo "$$ $out" >>starts
[ -e "$out" ] && echo "$out" >>twice
sleep "${FAKE_SECONDS:-0}"
cp template.h5 "$out.part" && mv "$out.part" "$out"
SH
chmod +x fake
: >starts
cells=${KVLAB_SLURM_CELLS:-44}
printf 'name: s\ncommand: cell\nprogram: ./fake\nseeds: [%s]\n' "$(seq -s, 1 "$cells")" >grid.yaml

if ((cells > 1000)); then
    now() { date +%s.%N; }
    spent() { python3 -c "print('%.1f s' % ($(now) - $1))"; }
    start=$(now)
    "$program" sweep grid.yaml --slurm
    echo "$cells cells submitted in $(spent "$start")"
    slurm_wait 36000
    echo "all tasks ended after $(spent "$start"), $(done_cells) cells done"
    start=$(now)
    "$program" log merge runs/s -o all.h5
    echo "merged in $(spent "$start"), $(stat -c %s all.h5) bytes, $(du -sb runs/s | cut -f1) bytes in run files"
    start=$(now)
    "$program" sweep grid.yaml | tail -n 1
    echo "second call in $(spent "$start")"
    exit 0
fi

export FAKE_SECONDS=0.4
"$program" sweep grid.yaml --slurm >job 2>err || fail "submitting: $(cat err)"
job=$(cat job)
[[ $job =~ ^[0-9]+$ && $(wc -l <runs/s/slurm-*.cells) == 44 ]] || fail "job $job, $(ls runs/s)"
unset FAKE_SECONDS
until_ 60 '[[ $(wc -l <starts) -ge 3 ]]'

# One cell killed, the array task of another cancelled.
tail -n 1 starts >killed
kill -9 "$(cut -d" " -f1 killed)"
until_ 60 '[[ $(wc -l <starts) -ge 6 ]]'
task=$(squeue -h -r -t running -o %i | head -n 1)
scancel "$task"

# Drained: no task starts; resumed: they go on.
scontrol update nodename="$slurm_node" state=drain reason=test
until_ 30 '[[ -z $(squeue -h -t running,completing) ]]'
before=$(wc -l <starts)
sleep 1.5
[[ $(wc -l <starts) == "$before" ]] || fail "tasks start on a drained node"
((before < 44)) || echo "note: all tasks had started before the node was drained"

# What is done can be merged while the rest waits.
if [[ $(head -c 4 template.h5 | tail -c 3) == HDF ]]; then
    "$program" log merge runs/s -o some.h5 >merged || fail "merge while it runs"
    [[ $(cat merged) == "some.h5: $(done_cells) runs" ]] || fail "merged: $(cat merged) of $(done_cells)"
fi
scontrol update nodename="$slurm_node" state=resume
slurm_wait 120 || fail "the array did not end"

# The next sweep submits what is missing, and only that.
"$program" sweep grid.yaml --dry-run --json >state.json
missing=$(get state.json 'r["waiting"]')
((missing >= 1 && missing <= 4)) || fail "$missing cells are missing after a kill and a cancellation"
grep -q "$(get state.json 'r["cells"][0]["id"]')" <(ls runs/s) || fail "ids"
"$program" sweep grid.yaml --slurm --resume >job 2>err || fail "submitting again: $(cat err)"
slurm_wait 120 || fail "the second array did not end"
[[ $(done_cells) == 44 ]] || fail "$(done_cells) cells of 44; $(cat runs/s/*.out)"
[[ ! -e twice ]] || fail "cells ran that were done: $(cat twice)"
[[ $(wc -l <starts) -le $((44 + missing)) ]] || fail "$(wc -l <starts) starts for 44 cells, $missing lost"
"$program" sweep grid.yaml --slurm >job 2>err && grep -q 'nothing to submit' err && [[ ! -s job ]] || fail "a third call submits: $(cat job err)"
echo "44 cells on Slurm $(sinfo --version | cut -d" " -f2): 1 killed, 1 cancelled, node drained and resumed; $missing ran again, none lost"
