#!/usr/bin/env bash
# The paper builds with its one command, from the results in experiments/, without an undefined macro or reference. Called with the program and the project's root.
set -euo pipefail
root=$2
for need in latexmk pdflatex kpsewhich; do command -v $need >/dev/null || { echo "skipped: no $need (Debian: latexmk texlive-latex-recommended texlive-pictures)"; exit 77; }; done
for style in pgfplots booktabs longtable hyperref; do kpsewhich $style.sty >/dev/null || { echo "skipped: LaTeX has no $style (Debian: texlive-latex-recommended texlive-pictures)"; exit 77; }; done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$root/experiments" "$root/paper" "$work"
cd "$work"
rm -rf paper/build
fail() { echo "FAILED: $*"; exit 1; }

timeout 300 paper/build.sh || fail "the paper"
[[ $(head -c 5 paper/build/kvlab.pdf) == %PDF- ]] || fail "no PDF"
! grep -E '^(LaTeX|Package .*) Warning: .*(multiply|undefined)' paper/build/kvlab.log || fail "warnings"
if command -v pdftotext >/dev/null; then
    pdftotext paper/build/kvlab.pdf text
    slope=$(sed -n 's/^\\newcommand{\\streamSlope}{\([^ ]*\) .*/\1/p' paper/build/numbers.tex)
    grep -qF -- "${slope#+}" text || fail "the slope $slope is not in the text"
    ! grep -qF '??' text || fail "a reference without an aim"
fi

echo '\nonesuchNumber' >>experiments/e20_streaming/paper.tex
if timeout 300 paper/build.sh >out 2>&1; then fail "a macro that is not there was built"; fi
grep -q 'nonesuchNumber' out || fail "the message does not name the macro: $(cat out)"
