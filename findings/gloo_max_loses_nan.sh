#!/usr/bin/env bash
# One would guess: all_reduce(MAX) of floats gives NaN on every rank if any rank has a NaN, as torch.maximum does.
# It is so: over gloo the NaN survives or is lost depending on the rank that has it, and on its place in the tensor.
# It matters: an infinity norm, an overflow check or a logged maximum that is reduced by MAX hides a diverged training.
# Seen: torch 2.13.0 (CPU build, gloo), 2 ranks.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$work/reduce.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank(number: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    lost = []
    for size in (1, 4, 33):
        for holder in (0, 1):
            for place in {0, size - 1}:
                values = torch.full((size,), 1.0 + number)
                if number == holder:
                    values[place] = float("nan")
                dist.all_reduce(values, op=dist.ReduceOp.MAX)
                if not values[place].isnan():
                    lost.append((size, holder, place))
    if number == 0:
        print("torch", torch.__version__, "maximum of 1 and NaN:", torch.maximum(torch.ones(1), torch.tensor([float("nan")])).item())
        print("lost (size, rank with the NaN, place):", sorted(lost))
        sys.stdout.flush()
        assert lost, "gloo keeps every NaN now"
        assert len(lost) < 10, "gloo loses every NaN now"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[1],), nprocs=2)
PY
"$work/venv/bin/python" "$work/reduce.py" "$work/store"
