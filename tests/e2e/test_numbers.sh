#!/usr/bin/env bash
# Results of experiments as they are kept in git: each claim of a paper names runs that are there, numbers of the paper
# come from runs; wrong rows, runs and columns are refused; collect.py keeps what run files say. Called with the program and the project's root.
set -euo pipefail
root=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$root/experiments" "$root/paper" "$work"
cd "$work"
rm -rf paper/build
fail() { echo "FAILED: $*"; exit 1; }
refused() { # WORDS COMMAND...
    local words=$1
    shift
    if "$@" >out 2>&1; then fail "$*: not refused"; fi
    grep -qF -- "$words" out || fail "$*: the message lacks \"$words\": $(cat out)"
}

table=experiments/reproduction/table.py
"$table" >claims || fail "the table of claims"
grep -q '^| StreamingLLM.*| \*\*reproduced\*\* | e20: sinks_4 recomputed |$' claims || fail "the table: $(cat claims)"
claim() { # COLUMN VALUE: a claim like the first one of stream.csv, with another value in a column
    python3 - "$@" <<'PYTHON'
import csv, sys
row = next(csv.DictReader(open("experiments/reproduction/stream.csv")))
row[sys.argv[1]] = sys.argv[2]
out = csv.DictWriter(open("experiments/reproduction/planted.csv", "w"), row)
out.writeheader()
out.writerow(row)
PYTHON
}
claim verdict maybe && refused "planted.csv:2: verdict 'maybe'" "$table"
claim interval "" && refused "interval is empty" "$table"
claim run "sinks_4 sinks_5" && refused "run sinks_5 is in no *.csv of experiments/e20_streaming" "$table"
claim experiment e99_none && refused "no folder experiments/e99_none" "$table"
echo "paper,claim" >experiments/reproduction/planted.csv && "$table" >/dev/null || fail "a file without rows"
rm experiments/reproduction/planted.csv

numbers=(python3 paper/make_numbers.py)
"${numbers[@]}" || fail "the paper's numbers"
planted() { # a line of numbers.txt is refused with WORDS
    cp "$root/experiments/e20_streaming/numbers.txt" experiments/e20_streaming/numbers.txt
    echo "$2" >>experiments/e20_streaming/numbers.txt
    refused "$1" "${numbers[@]}"
}
planted "no column nonesuch" 'x = summary.csv [cache=sinks 4; measure=nll] : <nonesuch>'
planted "2 rows fit, wanted one" 'x = summary.csv [cache=sinks 4; against=recomputed] : <mean:.1f>'
planted "0 rows fit, wanted some" 'rows x = summary.csv [cache=sinks 99] : <mean:.1f>'
planted "could not convert" 'x = summary.csv [cache=sinks 4; measure=nll] : <cache:.1f>'
planted "nonesuch.csv" 'x = nonesuch.csv : <mean:.1f>'
planted "\\streamSlope is there already" 'streamSlope = summary.csv [cache=sinks 4; measure=nll] : <mean:.1f>'
cp "$root/experiments/e20_streaming/numbers.txt" experiments/e20_streaming/numbers.txt
sed -i 's/^sinks_4,/sinks_9,/' experiments/e20_streaming/summary.csv && refused "of run sinks_9, which runs.csv does not have" "${numbers[@]}"
# Results stand in the text as macros: no number with a decimal point is typed.
! grep -nE '[0-9]\.[0-9]' "$root"/experiments/*/paper.tex | grep -vE 'arXiv:|addplot|begin\{' || fail "a number that no run has made"

python3 -c 'import h5py' 2>/dev/null || { echo "note: no python3 with h5py, collect.py was not run"; exit 0; }
mkdir experiments/e98_made
cat >made.py <<'PYTHON'
import sys
sys.path.append("experiments/peers")
from runfile import RunFile
for run, x in (("a", 0.1), ("b", 1 / 3)):
    with RunFile(f"runs/e98_made/{run}.h5", "made", {"command": "made", "kv": "int4"}) as file:
        file.table("fits", [("name", "1", "a text"), ("x", "1", "a number"), ("n", "1", "a whole number")], [(run, x, 7), ("none", float("nan"), 8)])
PYTHON
python3 "$PWD/made.py" --file /elsewhere/of/this/data/text.raw
experiments/collect.py e98_made --tables fits >/dev/null
rm runs/e98_made/a.h5
experiments/collect.py e98_made --tables fits >/dev/null # a's rows stay
python3 - <<'PYTHON' || fail "collect.py: $(cat experiments/e98_made/*.csv)"
import csv
fits = list(csv.DictReader(open("experiments/e98_made/fits.csv")))
assert [tuple(row.values()) for row in fits] == [("a", "a", "0.1", "7"), ("a", "none", "", "8"), ("b", "b", repr(1 / 3), "7"), ("b", "none", "", "8")], fits
runs = list(csv.DictReader(open("experiments/e98_made/runs.csv")))
assert [row["run"] for row in runs] == ["a", "b"] and len(runs[0]["config_hash"]) == 64 and runs[0]["status"] == "complete", runs
assert runs[0]["command_line"] == "made.py --file data/text.raw", runs[0]["command_line"]
PYTHON
refused "no run files in runs/e99_none" bash -c 'mkdir experiments/e99_none && experiments/collect.py e99_none'
