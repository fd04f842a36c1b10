#!/usr/bin/env bash
# Makes data/text/kjv.txt, the King James Bible, one verse a line, out of Debian's package bible-kjv-text; what experiments/e30_family trains on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=data/text/kjv.txt
sum=b5c4940bcfeee072c0935b5200d0f9d88a00a0199cb0961d16133458fcdfae5d
if [ -f "$target" ] && echo "$sum  $target" | sha256sum --check --status; then
    exit 0
fi
command -v bible >/dev/null || { echo "fetch_kjv.sh: needs the program 'bible': apt-get install bible-kjv bible-kjv-text" >&2; exit 1; }
bible -f gen1:1-rev22:21 </dev/null 2>/dev/null | sed 's/^[^ ]* //' >"$target.part"
echo "$sum  $target.part" | sha256sum --check --status || { echo "fetch_kjv.sh: the text has another sha256 than $sum: another version of the package?" >&2; exit 1; }
mv "$target.part" "$target"
