#!/bin/sh
# GPU memory for real: registered, copied within a process, staged between two processes over
# TCP, every byte compared.  Under four minutes.
#
#   tests/gpu/run.sh          on a machine with an NVIDIA GPU; exit status 77 where there is none
#   tests/gpu/run.sh --fake   the same on GPUs that are not there (native/tests/fake_cuda.c)
set -eu
cd "$(dirname "$0")/../.."

if [ "${1:-}" = --fake ]; then
    mkdir -p build/gpu
    "${CC:-cc}" -shared -fPIC -O1 -pthread -o build/gpu/libcuda.so.1 native/tests/fake_cuda.c
    EFA_KV_CUDA_LIBRARY=$PWD/build/gpu/libcuda.so.1
    export EFA_KV_CUDA_LIBRARY
fi
if [ ! -x .venv/bin/python ]; then
    make setup
fi
PYTHONPATH=tests/support exec .venv/bin/python tests/gpu/check.py
