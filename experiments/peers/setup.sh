#!/usr/bin/env bash
# Builds the peers' programs into build/peers: llama.cpp as llama-cpp-python packages it (compiled here, so several minutes), and
# prints the Python that has it. Does nothing when it is already there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
package=llama-cpp-python==0.3.36
venv=$root/build/peers/llama_cpp

if [[ ! -f $venv/complete ]]; then
    for tool in cmake c++; do
        command -v $tool >/dev/null || { echo "peers/setup: $tool is missing (Debian: cmake, g++)" >&2; exit 1; }
    done
    echo "peers/setup: compiling $package into $venv" >&2
    rm -rf "$venv"
    python3 -m venv "$venv"
    # For this machine's instructions, as kvlab's kernels are; two jobs, because a job needs about 1 GB.
    CMAKE_ARGS="-DGGML_NATIVE=ON" CMAKE_BUILD_PARALLEL_LEVEL=2 "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --no-binary llama-cpp-python "$package" >&2
    touch "$venv/complete"
fi
echo "$venv/bin/python"
