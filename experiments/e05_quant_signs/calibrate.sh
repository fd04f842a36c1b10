#!/bin/sh
# Tables of kvquant.yaml: from the last 51,200 tokens of the text (windows 123 to 147 of 2048; 2.4 GB of memory); *_oracle from the first 10,240, which are scored.
# usage: experiments/e05_quant_signs/calibrate.sh [build/kvlab]
set -eu
kvlab=${1:-build/kvlab}
out=runs/e05_tables
mkdir -p $out

# table NAME SPEC FIRST_WINDOW WINDOWS; one that is there is kept
table() {
    [ -e "$out/$1.h5" ] ||
        "$kvlab" calibrate -m data/models/SmolLM2-135M-Instruct.Q4_1.gguf -f data/text/wiki.test.raw --for "$2" --first-chunk "$3" --chunks "$4" -o "$out/$1.h5"
}
for bits in 3 2; do
    table kvquant$bits "kvquant(bits=$bits) rope=pre sink=1" 123 25
    table kvquant${bits}_0 "kvquant(bits=$bits,outliers=0) rope=pre sink=1" 123 25
    table kvquant${bits}_oracle "kvquant(bits=$bits) rope=pre sink=1" 0 5
done
