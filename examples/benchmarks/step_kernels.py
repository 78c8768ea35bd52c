"""Kernels of one captured optimizer step: time of each, and registers and spills of Inductor's; prints JSON lines.

torchrun --nproc-per-node 1 examples/benchmarks/step_kernels.py --size 1b --state-dtype 8bit
"""

import argparse
import gc
import json
import os

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from lightning_zero.cli.models import SIZES
from optimizer_step import ours

STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1b", choices=SIZES)
    parser.add_argument("--state-dtype", choices=["bf16", "8bit"])
    parser.add_argument("--bf16-weights", action="store_true", help="rounded stochastically")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    step, elements = ours(arguments.size, True, arguments.state_dtype, arguments.bf16_weights)
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    for event in sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)[:8]:
        ms = event.self_device_time_total / STEPS / 1e3
        print(json.dumps({"kernel": event.key[:90], "ms": round(ms, 3), "launches": event.count / STEPS}), flush=True)
    for tuner in [found for found in gc.get_objects() if type(found).__name__ == "CachingAutotuner"]:
        for launcher in tuner.launchers:
            found = {"registers": launcher.n_regs, "spills": launcher.n_spills, "config": str(launcher.config)}
            print(json.dumps({"kernel": tuner.fn.__name__} | found), flush=True)
    print(json.dumps({"elements": elements, **vars(arguments)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
