#!/usr/bin/env bash
# Packs kvlab for a machine that has an OpenCL driver and nothing else: a folder, and a tar of it.
#
#   bundle.sh [FOLDER]     default build-e90/kvlab-gpu; the tar is FOLDER.tar. KVLAB and MODEL may name another program and model.
#
#   run.sh       the experiment
#   kvlab        starts lib/kvlab with lib/ in front of the library path
#   lib/         the program and every library that it needs (ldd), but
#                  - not glibc (libc, libm, the loader ...): the machine's own, at least as new as this machine's
#                  - not those in fallback/
#   fallback/    libOpenCL.so.1 (the loader, ocl-icd), libstdc++, libgcc_s: taken only if the program does not start without them, because
#                a driver may need the machine's own, newer ones
#   model.gguf   the model; its tokenizer is inside
#   LIBRARIES    what was packed: file, version of the Debian package, its package
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
kvlab=${KVLAB:-$root/build/kvlab}
model=${MODEL:-$root/data/models/SmolLM2-135M-Instruct.Q4_1.gguf}
folder=${1:-$root/build-e90/kvlab-gpu}

glibc='^(ld-linux.*|linux-vdso|lib(c|m|dl|pthread|rt|resolv|util|anl|mvec|nsl))\.so'
only_if_missing='^(libOpenCL|libstdc\+\+|libgcc_s)\.so'

for file in "$kvlab" "$model"; do
    [[ -e $file ]] || { echo "bundle: $file is missing (KVLAB and MODEL name the program and the model)" >&2; exit 2; }
done
[[ ! -e $folder ]] || { echo "bundle: $folder is there already" >&2; exit 2; }
mkdir -p "$folder/lib" "$folder/fallback"

package_of() { # FILE: "package version", if Debian knows it
    command -v dpkg-query >/dev/null || return 0
    local name # a file may be known under /usr or without it
    name=$(dpkg-query -S "$1" 2>/dev/null || dpkg-query -S "${1#/usr}" 2>/dev/null || dpkg-query -S "/usr$1" 2>/dev/null) || return 0
    dpkg-query -W -f '${Package} ${Version}' "${name%%: *}"
}

ldd "$kvlab" | awk '/not found/ { print "bundle: not found: " $1 > "/dev/stderr"; exit 1 } $2 == "=>" { print $1, $3 }' | sort |
    while read -r name path; do
        [[ ! $name =~ $glibc ]] || continue
        place=lib
        [[ ! $name =~ $only_if_missing ]] || place=fallback
        cp -L "$path" "$folder/$place/$name"
        printf '%-32s %s\n' "$place/$name" "$(package_of "$(readlink -f "$path")")"
    done >"$folder/LIBRARIES"
cp -L "$kvlab" "$folder/lib/kvlab"
cp "$here/run.sh" "$folder/run.sh"
cp -L "$model" "$folder/model.gguf"

cat >"$folder/kvlab" <<'WRAPPER'
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
export LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
"$here/lib/kvlab" --version >/dev/null 2>&1 || LD_LIBRARY_PATH="$LD_LIBRARY_PATH:$here/fallback"
exec "$here/lib/kvlab" "$@"
WRAPPER
chmod +x "$folder/kvlab"

tar -C "$(dirname "$folder")" -cf "$folder.tar" "$(basename "$folder")"
echo "$folder.tar: $(stat -c %s "$folder.tar") bytes, $(wc -l <"$folder/LIBRARIES") libraries; needs glibc $(getconf GNU_LIBC_VERSION | cut -d' ' -f2) or newer"
