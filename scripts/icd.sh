# shellcheck shell=bash
# Source it: makes every OpenCL implementation of this machine visible, in an ICD folder of our own.
#   build/icd: what the system registers (without Clover, Mesa's retired implementation: it has no devices here and only gets in the way)
#   + the Intel CPU runtime if scripts/test.sh has put it into .venv-intel + Mesa's llvmpipe through rusticl, which hides unless asked for.
# Exports OCL_ICD_VENDORS and RUSTICL_ENABLE. KVLAB_ICD_DIR: another folder than build/icd.

kvl_icd_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OCL_ICD_VENDORS=${KVLAB_ICD_DIR:-$kvl_icd_root/build/icd}
mkdir -p "$OCL_ICD_VENDORS"
rm -f "$OCL_ICD_VENDORS"/*.icd
for kvl_icd_file in /etc/OpenCL/vendors/*.icd; do
    if [[ -f $kvl_icd_file && ${kvl_icd_file##*/} != mesa.icd ]]; then
        cp "$kvl_icd_file" "$OCL_ICD_VENDORS/"
    fi
done
# By its full path: its folder also holds an OpenCL loader of its own, which must not get onto LD_LIBRARY_PATH.
if [[ -f $kvl_icd_root/.venv-intel/complete ]]; then
    echo "$kvl_icd_root/.venv-intel/lib/libintelocl.so" >"$OCL_ICD_VENDORS/intel_cpu.icd"
fi
export OCL_ICD_VENDORS
export RUSTICL_ENABLE=${RUSTICL_ENABLE:-llvmpipe}
unset kvl_icd_root kvl_icd_file
