#!/usr/bin/env bash
# Trains a small byte-level GPT on the source of the Python standard library, on the CPU, in two processes that each hold
# half of the weights. It needs no GPU. It installs into .venv first. Arguments are passed on, for example: --steps 50.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/environment.sh

echo "1 of 3: install"
use_environment report
echo "2 of 3: build"
with_progress "Building the C++ executor (once; later runs find it in a cache)" python -m lightning_zero build
echo "3 of 3: train (Python first imports torch and Lightning, which takes some seconds)"
# One thread per core in each process would leave the processes waiting for each other.
threads=$(($(nproc) / 2))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
exec python examples/train_gpt.py --accelerator cpu --devices 2 --size tiny --report --out runs/quickstart "$@"
