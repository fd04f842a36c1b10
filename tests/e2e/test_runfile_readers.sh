#!/usr/bin/env bash
# A run file must be readable by tools that know nothing of kvlab: xarray (both engines), ncdump, h5dump; and by `kvlab log show`.
# usage: test_runfile_readers.sh PROGRAM ROOT
set -eu
program=$1
root=$2
writer=$(dirname "$program")/tests/unit_runfile
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
run=$folder/run.h5

[ -x "$writer" ] || { echo "skipped: $writer is not built"; exit 77; }
python=
for candidate in python3 /usr/bin/python3; do
    if "$candidate" -c 'import xarray, h5netcdf, netCDF4' 2>/dev/null; then python=$candidate; fi
done
missing=
[ -n "$python" ] || missing="$missing python3 with xarray, h5netcdf and netCDF4;"
command -v ncdump >/dev/null || missing="$missing ncdump;"
command -v h5dump >/dev/null || missing="$missing h5dump;"
[ -z "$missing" ] || { echo "skipped: missing$missing"; exit 77; }

"$writer" --write "$run"
for engine in h5netcdf netcdf4; do
    "$python" "$root/tests/e2e/read_with_xarray.py" "$run" "$engine"
    echo "xarray, $engine: ok"
done

# expect FILE TEXT...: every text is in the file
expect() {
    local file=$1 text
    shift
    for text in "$@"; do
        grep -qF -- "$text" "$file" || { echo "\"$text\" is not in the output of $file"; exit 1; }
    done
}
ncdump "$run" >"$folder/ncdump"
expect "$folder/ncdump" 'steps_row = UNLIMITED ; // (1000 currently)' 'uint64 t_ns(steps_row) ;' 't_ns:units = "ns" ;' \
    'uint64 bytes(class, layer) ;' ':command_line = "kvlab eval ppl -m \"m.gguf\"" ;' 'double error(layer) ;'
echo "ncdump: ok"
h5dump "$run" >"$folder/h5dump"
expect "$folder/h5dump" 'DATASET "t_ns"' 'DATASPACE  SIMPLE { ( 1000 ) / ( H5S_UNLIMITED ) }' 'ATTRIBUTE "long_name"'
if grep -q 'H5T_COMPOUND' <(h5dump -H "$run" | grep -A3 'DATASET "[^"]*" {'); then
    echo "a dataset has a compound type"
    exit 1
fi
echo "h5dump: ok"

"$program" log show "$run" >"$folder/show"
expect "$folder/show" '1000 rows' 'kivi(bits=2)' 'exploratory'
"$program" log show --json "$run" >"$folder/json"
"$python" -c 'import json, sys; run = json.load(open(sys.argv[1])); assert run["/quality"]["ppl"] == 12.25 and run["status"] == "complete"' "$folder/json"
mv "$run" "$run.part"
[ "$("$program" log repair "$run.part")" = "$run" ]
[ -f "$run" ]
if "$program" log repair "$run" 2>"$folder/error"; then
    echo "repair of a finished file must fail"
    exit 1
fi
expect "$folder/error" 'nothing to repair'
echo "kvlab log: ok"
