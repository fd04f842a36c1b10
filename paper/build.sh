#!/usr/bin/env bash
# Builds paper/build/kvlab.pdf: numbers from the experiments' results, then LaTeX. Needs python3, latexmk, pdflatex with pgfplots (Debian: latexmk
# texlive-latex-recommended texlive-pictures; 84 MB to fetch, 291 MB on disk).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
for need in latexmk pdflatex; do
    command -v "$need" >/dev/null || { echo "build.sh: $need is missing: apt-get install latexmk texlive-latex-recommended texlive-pictures" >&2; exit 1; }
done
python3 make_numbers.py
latexmk -pdf -interaction=nonstopmode -halt-on-error -outdir=build kvlab.tex >build/latexmk.out 2>&1 || { grep -A 5 '^!' build/kvlab.log >&2 || tail -n 20 build/latexmk.out >&2; exit 1; }
if grep -E 'undefined (references|citations)|(Citation|Reference) .* undefined' build/kvlab.log >&2; then exit 1; fi
echo "paper/build/kvlab.pdf"
