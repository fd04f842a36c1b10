#!/usr/bin/env bash
# All tests on all OpenCL implementations that can be had here. Installs what the tests need, builds, runs ctest.
# The last line is "N passed, M failed[, K skipped]"; the exit status is 0 if nothing failed.
#   CI=true            warnings are errors
#   KVLAB_DEVICE=gpu   the device of tests that do not choose one themselves (default: PoCL)
#   KVLAB_NO_INTEL=1   without the Intel CPU runtime (a download of about 250 MB, 830 MB on disk, in .venv-intel)
#   arguments          go to ctest, e.g. -R cli
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

summary="0 passed, 1 failed" # unless ctest gets to say something better
trap 'echo "$summary"' EXIT

intel_runtime() {
    local venv=$root/.venv-intel
    [[ -f $venv/complete ]] && return 0
    echo "test: fetching the Intel CPU runtime into .venv-intel"
    rm -rf "$venv"
    python3 -m venv "$venv" &&
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check intel-opencl-rt==2026.2.0 intel-cmplr-lib-rt==2026.2.0 &&
        [[ -f $venv/lib/libintelocl.so ]] && touch "$venv/complete"
}

echo "== packages"
scripts/setup.sh test || echo "test: going on with the packages that are here"
if [[ ${KVLAB_NO_INTEL:-} == 1 || $(uname -m) != x86_64 ]]; then
    echo "test: without the Intel CPU runtime"
else
    intel_runtime || echo "test: the Intel CPU runtime can't be had; going on without it"
fi

echo "== model"
scripts/fetch_model.sh || echo "test: no model; tests that need it are skipped"

echo "== build"
cmake -B build -DKVLAB_TESTS=ON -DKVLAB_WERROR="$([[ ${CI:-} == true ]] && echo ON || echo OFF)"
cmake --build build --parallel "$(nproc)"

echo "== tests"
source scripts/icd.sh
# Tests that do not choose a device get the same one everywhere; the order of the platforms is not fixed.
if [[ -f $OCL_ICD_VENDORS/pocl.icd ]]; then export KVLAB_DEVICE=${KVLAB_DEVICE:-Portable}; fi
devices=$(build/kvlab devices 2>&1) || true
junit=$root/build/junit.xml
rm -f "$junit"
ctest --test-dir build --parallel "$(nproc)" --output-on-failure --no-tests=error --timeout 3600 --output-junit "$junit" "$@" || true

count() { # an attribute of the result's <testsuite>
    sed -n "/<testsuite/,/>/s/.*\b$1=\"\([0-9]*\)\".*/\1/p" "$junit" | head -n 1
}
[[ -f $junit && $(count tests) -gt 0 ]] || exit 1
failed=$(count failures) skipped=$(($(count skipped) + $(count disabled)))
summary="$(($(count tests) - failed - skipped)) passed, $failed failed"
((skipped == 0)) || summary+=", $skipped skipped"
printf '== devices that the tests could use\n%s\n' "$devices"
((failed == 0))
