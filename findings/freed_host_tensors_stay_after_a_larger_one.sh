#!/usr/bin/env bash
# One would guess: what a full state dict takes in host memory is given back when its tensors are freed. Each of them is
# far above the 128 KiB from which glibc's malloc maps a block of its own.
# It is so only in a process that has freed no larger block before. glibc raises that limit to the size of each mapped
# block that is freed (up to 32 MiB), and takes smaller ones from its heap from then on; one small tensor that is still
# used keeps what lies below it. So resident memory after a checkpoint depends on the history of the process.
# It matters: peaks and leaks of checkpoints are measured by resident memory, and the same save shows 0 MiB or tens of
# MiB "leaked". A fixed MALLOC_MMAP_THRESHOLD_ makes the numbers those of the save; malloc_trim() before it does not, as
# the heap's free ranges are used again.
# Seen: torch 2.13.0 (CPU build), glibc 2.36: of 108 MiB freed, 0 MiB stay; after a block of 31 MiB was freed, all stay
# (54 MiB where less lies above them); 0 MiB with the variable.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$work/kept.py" <<'PY'
import platform
import sys

import torch

MIB = 1 << 20


def resident():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) >> 10


def weight(mib):
    return torch.ones(mib * MIB // 4)


if sys.argv[1] == "larger":
    weight(31)
before = resident()
still_used, state_dict = [], []
for _ in range(12):
    state_dict.append(weight(9))
    still_used.append(torch.ones(1000))
assert resident() - before > 100
del state_dict
print("torch", torch.__version__, *platform.libc_ver(), "after", sys.argv[1], f"MiB kept: {resident() - before}")
PY
run() {
  found=$("$work/venv/bin/python" "$work/kept.py" "$1" 2>"$work/log") || { tail -n 5 "$work/log"; exit 1; }
  echo "$found"
  kept=${found##*: }
}
run none && fresh=$kept
run larger && after=$kept
export MALLOC_MMAP_THRESHOLD_=1048576
run larger && fixed=$kept
[[ $fresh -le 5 && $fixed -le 5 && $after -ge 20 ]] || { echo "changed: $fresh, $after, $fixed"; exit 1; }
