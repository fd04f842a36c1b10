#!/usr/bin/env bash
# Whatever a user gives by mistake ends in the right exit code and in one line on stderr that names what was wanted, found and to change;
# never in a crash, a half-written result or a lost one. Called with the program and the project's root; works on the repository's tiny model.
set -uo pipefail
kvlab=$1 root=$2
model=$root/data/models/tiny.gguf
work=$(mktemp -d)
mounted=
trap '[[ -z $mounted ]] || umount "$mounted"; rm -rf "$work"' EXIT
cd "$work" || exit 1
failures=0 checks=0

devices=$("$kvlab" devices) || exit 1
[[ $devices == "0 "* ]] || { echo "skipped: no OpenCL device"; exit 77; }

fail() {
    echo "FAILED: $*"
    failures=$((failures + 1))
}

# one_error WANTED-CODE CODE WORDS...: file `err` is one error line with all the words in it (lines that start with "run file: " are no error).
one_error() {
    local wanted=$1 code=$2 word
    shift 2
    checks=$((checks + 1))
    [[ $code == "$wanted" ]] || fail "$label: exit code $code, wanted $wanted: $(cat err)"
    [[ $(grep -vc '^run file: ' err) == 1 && $(grep -c '^kvlab: error: ..' err) == 1 ]] || fail "$label: not one line \"kvlab: error: ...\": $(cat err)"
    for word in "$@"; do grep -qF -- "$word" err || fail "$label: the message lacks \"$word\": $(cat err)"; done
}

# refused CODE "WORDS|WORDS" ARGUMENTS...
refused() {
    local code=$1 words
    IFS='|' read -ra words <<<"$2"
    shift 2
    label="kvlab $*"
    "$kvlab" "$@" >out 2>err </dev/null
    one_error "$code" $? "${words[@]}"
    [[ ! -s out ]] || fail "$label: something on stdout: $(head -c 200 out)"
}

# damaged NAME PYTHON: the model with its bytes `b` (a bytearray) changed; tensor(name) is the offset behind a tensor's name.
damaged() {
    python3 - "$model" "$1" "$2" <<'PYTHON' || fail "cannot make $1"
import sys, struct
b = bytearray(open(sys.argv[1], "rb").read())
tensor = lambda name: b.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
exec(sys.argv[3])
open(sys.argv[2], "wb").write(b)
PYTHON
}

head -c 4000 "$root/data/text/wiki.test.raw" >text
: >empty
printf 'just a few words' >short
ppl=(eval ppl -m "$model" -f text -c 64 --no-run-file)

# --- the model file ---
damaged magic.gguf 'b[:4] = b"GGML"'
damaged version.gguf 'b[4] = 77'
damaged head.gguf 'del b[1000:]'
damaged data.gguf 'del b[-5000:]'
damaged type.gguf 'at = tensor(b"blk.0.attn_q.weight"); b[at + 4 + 16:at + 8 + 16] = struct.pack("<I", 23)'
damaged shape.gguf 'at = tensor(b"blk.1.attn_k.weight"); b[at + 4 + 8:at + 4 + 16] = struct.pack("<Q", 32)'
damaged tensors.gguf 'b[8:16] = struct.pack("<Q", 1 << 60)'
damaged keys.gguf 'b[16:24] = struct.pack("<Q", (1 << 64) - 1)'
damaged string.gguf 'at = b.index(b"general.name") + 12 + 4; b[at:at + 8] = struct.pack("<Q", 1 << 63)'
damaged dims.gguf 'at = tensor(b"token_embd.weight"); b[at:at + 4] = struct.pack("<I", 4000000000)'
damaged rows.gguf 'at = tensor(b"token_embd.weight"); b[at + 4:at + 12] = struct.pack("<Q", 1 << 62)'
damaged offset.gguf 'at = tensor(b"output_norm.weight"); b[at + 4 + 8 + 4:at + 4 + 8 + 12] = struct.pack("<Q", 1 << 50)'
damaged name.gguf 'at = tensor(b"blk.2.ffn_up.weight"); b[at - 1:at] = b"T"'
damaged arch.gguf 'at = b.index(b"llama"); b[at:at + 5] = b"lxama"'
damaged layers.gguf 'at = b.index(b"llama.block_count") + 17 + 4; b[at:at + 4] = struct.pack("<I", 4000000000)'
refused 1 "magic.gguf|GGUF" eval ppl -m magic.gguf -f text
refused 1 "version.gguf|77|version" eval ppl -m version.gguf -f text
refused 1 "head.gguf" eval ppl -m head.gguf -f text
refused 1 "data.gguf|blk.2" eval ppl -m data.gguf -f text
refused 1 "type.gguf|blk.0.attn_q.weight|23" eval ppl -m type.gguf -f text
refused 1 "shape.gguf|blk.1.attn_k.weight|32|64" eval ppl -m shape.gguf -f text
for name in tensors keys string dims rows offset; do refused 1 "$name.gguf" eval ppl -m $name.gguf -f text; done
refused 1 "name.gguf|blk.2.ffn_up.weight" eval ppl -m name.gguf -f text
refused 1 "arch.gguf|lxama|llama" eval ppl -m arch.gguf -f text
refused 1 "layers.gguf|block_count" eval ppl -m layers.gguf -f text
refused 1 "empty" eval ppl -m empty -f text
refused 1 "nosuch.gguf|No such file" eval ppl -m nosuch.gguf -f text
refused 1 "$work" eval ppl -m "$work" -f text
refused 1 "magic.gguf|GGUF" generate -m magic.gguf -p a
refused 1 "magic.gguf|GGUF" tokenize -m magic.gguf -f text

# Weights that make two key channels of layer 2 NaN, for each token: the numbers are replaced, counted, warned of and stored.
damaged nan.gguf '
offset = lambda name: struct.unpack_from("<Q", b, tensor(name) + 4 + 16 + 4)[0]
data = len(b) - 96 * 160 * 4 - offset(b"blk.2.ffn_down.weight")
at = data + offset(b"blk.2.attn_k.weight") + 5 * 96 * 2
b[at:at + 2] = struct.pack("<H", 0x7e00)'
for use in "128 --kv int4 -c 64" "1024 --kv int4 --protocol compress-then-score --context 256 --score 256" "512 --kv k=think(recent=0) --protocol compress-then-score --context 128 --score 128"; do
    read -r wanted arguments <<<"$use"
    label="nan.gguf $arguments"
    checks=$((checks + 1))
    # shellcheck disable=SC2086
    "$kvlab" eval ppl -m nan.gguf -f text --chunks 1 $arguments -o nan.h5 >out 2>err || fail "$label: $(cat err)"
    grep -q "$wanted keys or values were not finite when they were encoded: the results cannot be trusted" err || fail "$label: $(cat err)"
    grep -q "nonfinite_inputs *$wanted" <("$kvlab" log show nan.h5) || fail "$label: the run file does not say so"
    rm -f nan.h5
done

# --- the text ---
refused 2 "empty" eval ppl -m "$model" -f empty -c 64
refused 2 "short|64" eval ppl -m "$model" -f short -c 64
refused 1 "nosuch.txt|No such file" eval ppl -m "$model" -f nosuch.txt
refused 1 "$work" eval ppl -m "$model" -f "$work" -c 64
refused 2 "empty" generate -m "$model" -f empty
refused 2 "empty" tokenize -m "$model" -f empty

# --- numbers and options ---
refused 2 "9000|2048|--allow-long" eval ppl -m "$model" -f "$root/data/text/wiki.test.raw" -c 9000
refused 2 "9000|2048|--allow-long" generate -m "$model" -p a -n 9000
refused 2 "--ctx|8 to|\"7\"" "${ppl[@]/64/7}"
refused 2 "--chunks|-1" "${ppl[@]}" --chunks -1
refused 2 "--ubatch|abc|integer" "${ppl[@]}" --ubatch abc
refused 2 "--protocol|p1|p9" "${ppl[@]}" --protocol p9
refused 2 "windows" "${ppl[@]}" --chunks 1000
refused 2 "windows" "${ppl[@]}" --first-chunk 1000
refused 2 "--chnks|--chunks" "${ppl[@]}" --chnks 1
refused 2 "twice" "${ppl[@]}" -c 32
refused 2 "generates" generates -m "$model" -p a
refused 2 "--model" eval ppl -f text

# --- the cache's words ---
refused 2 "int5|int4" "${ppl[@]}" --kv int5
refused 2 "group|48|32" "${ppl[@]}" --kv "int4(group=48)"
refused 2 "group|int4" "${ppl[@]}" --kv "int4(grup=8)"
refused 2 "int4|group" "${ppl[@]}" --kv "int4(group=-1)"
refused 2 "sink" "${ppl[@]}" --kv "sink=4 int8 sink=8"
refused 2 "kv" "${ppl[@]}" --kv "int4 int8"
refused 2 "window" "${ppl[@]}" --kv "window=-1"
refused 2 "tail" "${ppl[@]}" --kv "tail=x"
refused 2 "@5-9|layers 0 to 2" "${ppl[@]}" --kv "int8 @5-9 int4"
refused 2 ")" "${ppl[@]}" --kv "int4(group=8"
refused 2 "int5" eval kld -m "$model" -f text -c 64 --base int5

# --- the device ---
refused 2 "no-such-device|0 = " "${ppl[@]}" --device no-such-device
refused 2 "4711|0 = " "${ppl[@]}" --device 4711

# --- the run file ---
mkdir locked
chmod 500 locked
run=(eval ppl -m "$model" -f text -c 64)
refused 1 "text/run.h5|Not a directory" "${run[@]}" -o text/run.h5
if [[ $EUID != 0 ]]; then refused 1 "locked/run.h5|Permission" "${run[@]}" -o locked/run.h5; fi
if [[ -w /proc/self ]]; then refused 1 "/proc/run.h5" "${run[@]}" -o /proc/run.h5; fi # a folder that even root cannot write
touch done.h5
refused 1 "done.h5" "${run[@]}" -o done.h5
[[ ! -s done.h5 ]] || fail "an existing run file was overwritten"

# full LABEL COMMAND...: a run whose run file finds no room. The result is an error, the .part readable.
full() {
    label=$1
    shift
    "$@" >out 2>err
    one_error 1 $? "run.h5"
    [[ ! -e $folder/run.h5 ]] || fail "$label: a complete run file"
}
for _ in $(seq 300); do cat text; done >long
folder=limited
mkdir limited
full "file-size limit" bash -c "ulimit -f 40; exec '$kvlab' eval ppl -m '$model' -f long -c 8 --chunks 5000 --kv f16 -o limited/run.h5"
if [[ $EUID == 0 ]] && mkdir small && mount -t tmpfs -o size=64k kvlab-test small 2>/dev/null; then
    mounted=$work/small folder=small
    full "full disk" "$kvlab" eval ppl -m "$model" -f long -c 8 --chunks 5000 -o small/run.h5
else
    echo "note: no small file system can be mounted, a full disk is only tried as a file-size limit"
fi

# --- Ctrl-C: the windows done so far stay ---
label="Ctrl-C"
"$kvlab" eval ppl -m "$model" -f long -c 64 -o stopped.h5 >out 2>err &
pid=$!
for _ in $(seq 1200); do [[ -e stopped.h5.part ]] && break; sleep 0.05; done
sleep 2.5
kill -INT $pid
wait $pid
one_error 1 $? "interrupted" "windows"
[[ -e stopped.h5.part && ! -e stopped.h5 ]] || fail "$label: no stopped.h5.part"
"$kvlab" log show stopped.h5.part | grep -q 'status *interrupted' || fail "$label: the file does not say that it was interrupted"
if python3 -c 'import h5py' 2>/dev/null; then
    python3 - "$(grep -o 'interrupted: [0-9]*' err)" <<'PYTHON' || fail "$label: content of stopped.h5.part"
import sys, h5py, math
n_done = int(sys.argv[1].split()[1])
f = h5py.File("stopped.h5.part")
committed = int(f["quality/committed"][()])
assert committed == n_done > 0, (committed, n_done)
assert [int(c) for c in f["quality/chunk"][:committed]] == list(range(committed))
assert all(0 < x < 30 for x in f["quality/nll"][:committed])
PYTHON
else
    echo "note: no python3 with h5py, content of the interrupted run file not checked"
fi
"$kvlab" log repair stopped.h5.part >out 2>err && [[ -f stopped.partial.h5 ]] || fail "$label: log repair: $(cat err)"

((failures == 0)) || exit 1
echo "bad input: $checks refusals checked"
