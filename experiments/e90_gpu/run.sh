#!/usr/bin/env bash
# What kvlab does on a GPU, in under 8 minutes: abilities, peaks, self-check, prefill, decode and attention behind 4k to 128k tokens, decode of 32
# sequences in step.
# Sizes that the device's memory or the time do not allow are skipped, and the summary says so.
# Needs bash, awk, sed, coreutils and an OpenCL driver; kvlab and its libraries come along (bundle.sh). See why.md.
#
#   OUT            folder of the results, empty or not there yet (default runs/e90_gpu-<time>)
#   KVLAB, MODEL   program and model (default: those beside this script, else build/kvlab and the model in data/models)
#   KVLAB_DEVICE   device, as for --device (default: the first GPU, else the first CPU)
#   E90_SECONDS    time for everything (default 450)
#   E90_QUICK=1    small sizes, to try the script itself: under 90 seconds on two CPU cores
#
# Exit code: 0 all steps are well or skipped, 1 a step failed, 77 there is no device.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ -e $here/kvlab ]]; then
    root=$here kvlab=${KVLAB:-$here/kvlab} model=${MODEL:-$here/model.gguf}
else
    root=$(cd "$here/../.." && pwd)
    kvlab=${KVLAB:-$root/build/kvlab} model=${MODEL:-$root/data/models/SmolLM2-135M-Instruct.Q4_1.gguf}
fi
out=${OUT:-$root/runs/e90_gpu-$(date -u +%Y%m%d-%H%M%S)}

caches=(f16 int8 int4)
if [[ ${E90_QUICK:-0} == 1 ]]; then
    depths=(256 1024) prompt=64 gen=4 gen_flat=4 kernel_gen=2 repetitions=1 budget=${E90_SECONDS:-90}
else
    depths=(4096 16384 32768 65536 131072) prompt=512 gen=32 gen_flat=128 kernel_gen=8 repetitions=3 budget=${E90_SECONDS:-450}
fi
least=4 # a step is not begun with fewer seconds left
slow=10 # after a step of more seconds than that, its cache is timed once at every deeper depth

for file in "$kvlab" "$model"; do
    [[ -e $file ]] || { echo "e90_gpu: $file is missing (KVLAB and MODEL name the program and the model)" >&2; exit 2; }
done
mkdir -p "$out"
[[ -z $(ls -A "$out") ]] || { echo "e90_gpu: $out is not empty; results are never written over" >&2; exit 2; }
out=$(cd "$out" && pwd)
mkdir "$out/logs"
steps=$out/logs/steps speeds=$out/logs/speeds kernels=$out/logs/kernels # rows of the summary's tables
: >"$steps" >"$speeds" >"$kernels"
failures=0

# ---- steps ----

note() { # NAME RESULT SECONDS
    printf '| %s | %s | %s |\n' "$1" "$2" "$3" >>"$steps"
    printf '%4d s  %-24s %s\n' "$SECONDS" "$1" "$2" >&2
}

# step NAME MOST-SECONDS COMMAND...: output to logs/NAME.txt and .err, the result to the summary. False if it did not end well.
step() {
    local name=$1 limit=$2 rc=0 begun=$SECONDS left=$((budget - SECONDS)) result=ok
    shift 2
    if ((left < least)); then
        note "$name" "skipped: the $budget seconds are used up" -
        return 1
    fi
    ((limit <= left)) || limit=$left
    timeout -k 5 "$limit" "$@" >"$out/logs/$name.txt" 2>"$out/logs/$name.err" </dev/null || rc=$?
    if ((rc == 124 || rc == 137)); then
        result="stopped after $limit s"
    elif ((rc)); then
        result="FAILED, exit code $rc: $(tail -n 1 "$out/logs/$name.err" | tr '|' '/')"
        failures=$((failures + 1))
    fi
    note "$name" "$result" $((SECONDS - begun))
    ((rc == 0))
}

# field KEY JSON-FILE [NAME]: the first value of that key, behind "name": NAME if one is given (our JSON has a key a line).
field() {
    awk -v key="\"$1\":" -v name="${3:-}" -F '":[ \t]*' '
        BEGIN { here = name == "" }
        $1 ~ /"name$/ && name != "" { here = index($2, "\"" name "\"") == 1 }
        here && index($0, key) { gsub(/^"|"?,?$/, "", $2); print $2; exit }' "$2"
}

# ---- the device ----

# A container can hold a driver without the file that names it to the OpenCL loader.
find_driver() {
    local folder file
    for folder in /usr/local/nvidia/lib64 /usr/local/nvidia/lib /usr/lib/x86_64-linux-gnu /usr/lib64 /opt/rocm/lib /opt/rocm/opencl/lib; do
        for file in "$folder"/libnvidia-opencl.so.1 "$folder"/libamdocl64.so; do
            [[ -e $file ]] || continue
            mkdir -p "$out/logs/vendors"
            echo "$file" >"$out/logs/vendors/$(basename "$file" .so).icd"
        done
    done
    [[ -d $out/logs/vendors ]] || return 1
    export OCL_ICD_VENDORS=$out/logs/vendors LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64
}

# Sets device (what --device takes), device_name and list (the file with its abilities).
find_device() {
    list=$out/logs/devices.txt
    step devices 30 "$kvlab" devices --json || return 1
    if ! grep -q '"name"' "$list"; then
        find_driver || return 1
        list=$out/logs/devices-driver.txt
        step devices-driver 30 "$kvlab" devices --json && grep -q '"name"' "$list" || return 1
    fi
    device=${KVLAB_DEVICE:-}
    if [[ -z $device ]]; then # the choice that kvlab makes itself
        device=cpu
        ! grep -q '"type":[[:space:]]*"gpu"' "$list" || device=gpu
    fi
    plan f16 "${depths[0]}" || { cat "$out/logs/plan.err" >&2; return 1; }
    device_name=$(field device "$out/logs/plan.json")
}

# plan CACHE TOKENS: what they take on the device, to logs/plan.json
plan() { timeout 60 "$kvlab" plan -m "$model" --kv "$1" -c "$2" --device "$device" --json >"$out/logs/plan.json" 2>"$out/logs/plan.err"; }

# fits CACHE DEPTH: true if cache, weights and scratch take at most four fifths of the device's memory. Sets `why` if not.
fits() {
    plan "$1" $(($2 + prompt)) || { why=$(tail -n 1 "$out/logs/plan.err" | tr '|' '/'); return 1; }
    local file=$out/logs/plan.json
    local need=$(($(field resident_bytes "$file") + $(field weights "$file") + $(field scratch "$file")))
    local room=$(($(field global_bytes "$list" "$device_name") / 5 * 4))
    why="$((need >> 20)) MiB wanted, the device has $((room >> 20)) to give"
    ((need <= room))
}

# ---- benches ----

# bench KIND CACHE DEPTH OPTIONS...: a run file, and its rows of the tables.
bench() {
    local kind=$1 cache=$2 depth=$3 name=$1-$2-d$3
    shift 3
    step "$name" 60 "$kvlab" bench -m "$model" --device "$device" --kv "$cache" -d "$depth" --synthetic --allow-long "$@" -o "$out/$name.h5" || return 1
    if [[ $kind == kernels ]]; then
        awk -v cache="$cache" '/ ms a repetition: / { phase = $1; sub(":", "", phase) } /^\| kvl_/ && phase { print "| " cache " | " phase " " $0 }' "$out/logs/$name.txt" >>"$kernels"
    else
        grep "^| $cache " "$out/logs/$name.txt" >>"$speeds"
    fi
}

benches() {
    local cache depth begun
    declare -A stop times # why a cache is not timed any further; repetitions
    for cache in "${caches[@]}"; do
        times[$cache]=$repetitions
        bench speed "$cache" 0 -p "$prompt" -n "$gen_flat" -r "$repetitions" || stop[$cache]="depth 0 did not end well"
    done
    for depth in "${depths[@]}"; do
        for cache in "${caches[@]}"; do
            [[ ${stop[$cache]:-} ]] || fits "$cache" "$depth" || stop[$cache]=$why
            if [[ ${stop[$cache]:-} ]]; then
                note "speed-$cache-d$depth" "skipped: ${stop[$cache]}" -
                continue
            fi
            begun=$SECONDS
            bench speed "$cache" "$depth" -p "$prompt" -n "$gen" -r "${times[$cache]}" || stop[$cache]="depth $depth did not end well"
            ((SECONDS - begun <= slow)) || times[$cache]=1
            [[ ${stop[$cache]:-} ]] || bench kernels "$cache" "$depth" -p "$prompt" -n "$kernel_gen" -r 1 --kernels || stop[$cache]="depth $depth did not end well"
        done
    done
    for cache in "${caches[@]}"; do
        if fits "$cache" $((32 * depths[0])); then
            bench sequences "$cache" "${depths[0]}" --sequences 32 -p 0 -n "$kernel_gen" -r 1 || true
        else
            note "sequences-$cache-d${depths[0]}" "skipped: $why" -
        fi
    done
}

# ---- the summary ----

write_summary() {
    local peaks=$out/logs/peaks.txt
    echo "# kvlab on $device_name"
    echo
    echo "$("$kvlab" --version), $(field model "$out/logs/plan.json"), driver $(field driver "$list" "$device_name"), $(date -u +%Y-%m-%dT%H:%M:%SZ), $SECONDS s of $budget."
    [[ ! -s $peaks ]] || printf 'Measured: read %.0f GB/s, copy %.0f GB/s, multiply-add %.0f GFLOP/s, launch %.1f us.\n' \
        $(for key in read_gbps copy_gbps fma_gflops launch_us; do field $key "$peaks" "$device_name"; done)
    [[ ! -s $out/logs/check.txt ]] || echo "Self-check: $(tail -n 1 "$out/logs/check.txt")"
    echo
    echo "## Speed: pp prefill, tg decode, xN of N sequences in step, @d behind that many (random) tokens"
    echo
    echo "| kv | test | tokens/s | sd | bytes/token | resident MiB | read MiB |"
    echo "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    cat "$speeds"
    echo
    echo "## Kernels, with every launch timed: those of attention, and those that take a tenth of the phase or more"
    echo
    echo "| kv | test | kernel | calls | median us | sum ms | of sum | GB/s | of peak | GFLOP/s | of peak |"
    echo "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    awk -F '|' '$4 ~ /attend|merge/ || $8 + 0 >= 10' "$kernels"
    echo
    echo "## Steps"
    echo
    echo "| step | result | seconds |"
    echo "| --- | --- | ---: |"
    cat "$steps"
}

if ! find_device; then
    note device "skipped: no OpenCL device can be used" -
    exit 77
fi
step peaks 90 "$kvlab" devices --measure --json || true
step check 150 "$kvlab" check --device "$device" || true
benches
write_summary >"$out/summary.md"
cat "$out/summary.md"
echo "results: $out" >&2
((failures == 0))
