#!/usr/bin/env bash
# From a fresh clone to a first result: packages, model, build, main job. Every step is skipped when it is already done.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

echo "== packages"
scripts/setup.sh run

echo "== model"
scripts/fetch_model.sh

echo "== build (a minute or two the first time; messages in build/quickstart.log)"
mkdir -p build
build() { cmake -B build -DKVLAB_TESTS=OFF && cmake --build build --parallel "$(nproc)"; }
build >build/quickstart.log 2>&1 || { cat build/quickstart.log >&2; exit 1; }
build/kvlab --version

echo "== main job"
scripts/main_job.sh
