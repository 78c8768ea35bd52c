#!/usr/bin/env bash
# Trains a small byte-level GPT on the Python standard library, on the CPU, with two processes that each hold half of
# the weights. Arguments are passed on, for example: --steps 50. How long it takes, and what it shows, is in the README.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source .ci/environment.sh

use_environment report
# Two processes that each start a thread per core would spend their time waiting for one another.
threads=$(($(nproc) / 2))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
exec python examples/train_gpt.py --accelerator cpu --devices 2 --size tiny --report --out runs/quickstart "$@"
