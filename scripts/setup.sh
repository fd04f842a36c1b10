#!/usr/bin/env bash
# Installs the Debian packages that kvlab needs and that are missing: `run` for building and running, `test` for the tests as well.
# Does nothing, quickly, when nothing is missing. Other systems: install the same libraries by their own means.
set -euo pipefail

run_packages=(
    cmake gcc libc6-dev make pkg-config                                # build
    ca-certificates python3 python3-pip unzip                          # fetching the model
    ocl-icd-libopencl1 ocl-icd-opencl-dev opencl-headers               # OpenCL loader and headers
    pocl-opencl-icd                                                    # an OpenCL device that is always there: the CPU
    libclblast-dev libhdf5-dev libpcre2-dev libcyaml-dev libyaml-dev libcjson-dev libssl-dev
)
test_packages=(
    libcmocka-dev
    mesa-opencl-icd oclgrind                                           # two more OpenCL implementations
    clang-15 libclc-15 rocm-device-libs intel-opencl-icd               # compilers for GPUs that are not here: kvlab xcheck
    hdf5-tools netcdf-bin                                              # other readers of the run files
    python3-h5netcdf python3-h5py python3-netcdf4 python3-xarray
    python3-matplotlib                                                 # figures from run files
    latexmk texlive-latex-recommended texlive-pictures                 # the paper: 84 MB, 291 MB on disk
    munge slurm-wlm                                                    # a Slurm of one node that a test starts and stops: 3.5 MB
    python3-venv                                                       # for the Intel OpenCL runtime, see icd.sh
)

case "${1:-}" in
run) packages=("${run_packages[@]}") ;;
test) packages=("${run_packages[@]}" "${test_packages[@]}") ;;
*)
    echo "usage: scripts/setup.sh run|test" >&2
    exit 2
    ;;
esac

if ! command -v apt-get >/dev/null; then
    echo "setup: no apt-get here; these Debian packages, or what your system calls them, must be installed: ${packages[*]}"
    exit 0
fi

# A list of the installed packages once: one dpkg-query call for each would take seconds.
installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' | sed -n 's/^installed //p')
missing=()
for package in "${packages[@]}"; do
    grep -qx -- "$package" <<<"$installed" || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
    exit 0
fi

as_root=()
if [[ $(id -u) -ne 0 ]]; then
    command -v sudo >/dev/null || {
        echo "setup: neither root nor sudo; have these installed: apt-get install ${missing[*]}" >&2
        exit 1
    }
    as_root=(sudo)
fi
echo "setup: installing ${missing[*]}"
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -q
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
