#!/usr/bin/env bash
# The rooms' dependency rules, checked by reading the includes. Called with the program (not used) and the project's root.
#   base <- device <- cache <- model <- lab <- cmd: a file includes headers of its own room and of rooms to the left
#   CL/*.h and clblast only in host/device, hdf5 only in host/lab
#   a plug-in includes the plug-in headers (compress/kvl_plugin*.h), files of its own folder and the C library, nothing else
# Every rule is first seen to fail on a tree with one planted violation.
set -euo pipefail
root=$2
rooms=(base device cache model lab cmd)

rank() {
    local i
    for i in "${!rooms[@]}"; do [[ ${rooms[i]} == "$1" ]] && echo "$i" && return; done
    echo 99
}

# "FILE:INCLUDE" for each include directive of C files below the folders given; system headers keep their "<".
includes() {
    find "$@" -name '*.[ch]' -print0 2>/dev/null | xargs -0 -r grep -HoE '^[[:space:]]*#[[:space:]]*include[[:space:]]*["<][^">]+' |
        sed -E 's/:[[:space:]]*#[[:space:]]*include[[:space:]]*"?/:/'
}

# One line for each broken rule of the tree $1.
violations() {
    local tree=$1 file header room home
    while IFS=: read -r file header; do
        room=${file#"$tree"/host/}
        room=${room%%/*}
        case $header in
        "<CL/"* | "<clblast"*) [[ $room == device ]] || echo "$file: $header belongs to host/device" ;;
        "<hdf5"*) [[ $room == lab ]] || echo "$file: $header belongs to host/lab" ;;
        "<"*) ;;
        kvl_plugin*.h | builtin.def) [[ $(rank "$room") -ge $(rank cache) ]] || echo "$file: $header is for host/cache and the rooms above" ;;
        *)
            home=$(find "$tree/host" -name "${header##*/}" -printf '%h\n' | head -n 1)
            home=${home##*/}
            if [[ -z $home ]]; then
                echo "$file: $header is in no room"
            elif [[ $(rank "$home") -gt $(rank "$room") ]]; then
                echo "$file: $header is in host/$home, above host/$room"
            fi
            ;;
        esac
    done < <(includes "$tree/host")
    while IFS=: read -r file header; do
        case $header in
        "<assert.h" | "<float.h" | "<limits.h" | "<math.h" | "<stdbool.h" | "<stddef.h" | "<stdint.h" | "<stdio.h" | "<stdlib.h" | "<string.h") ;;
        kvl_plugin*.h) ;;
        *) [[ -f ${file%/*}/$header ]] || echo "$file: a plug-in may not include $header" ;;
        esac
    done < <(includes "$tree/compress/codec" "$tree/compress/score" "$tree/compress/budget" "$tree/compress/template")
}

plant() { # FILE LINE: a tree in which just this file breaks a rule, and must be reported
    local tree=$work/tree
    rm -rf "$tree"
    mkdir -p "$tree/host/base" "$tree/host/device" "$tree/host/cache" "$tree/host/lab" "$tree/compress/codec/x"
    echo '#include <stdint.h>' >"$tree/host/base/status.h"
    echo '#include "status.h"' >"$tree/host/device/device.h"
    [[ -z $(violations "$tree") ]] || { echo "a clean tree is reported: $(violations "$tree")"; exit 1; }
    echo "$2" >"$tree/$1"
    [[ $(violations "$tree") == *"$1"* ]] || { echo "not found: $2 in $1"; exit 1; }
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
plant host/base/a.c '#include "device.h"'
plant host/cache/a.c '#include <CL/cl.h>'
plant host/device/a.c '  # include <hdf5.h>'
plant host/device/a.c '#include "kvl_plugin.h"'
plant host/lab/a.c '#include "nowhere.h"'
plant compress/codec/x/a.c '#include "status.h"'
plant compress/codec/x/a.c '#include <unistd.h>'

found=$(violations "$root")
if [[ -n $found ]]; then
    echo "$found"
    exit 1
fi
echo "rooms: no broken rule in $(includes "$root/host" "$root/compress" | wc -l) includes"
