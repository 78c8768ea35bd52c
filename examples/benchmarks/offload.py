"""What it costs to keep the optimizer's state, or activations, on the host; on one GPU or several of a host, prints one
JSON line per measurement.

    python examples/benchmarks/offload.py --sizes 1b,3b --accumulate 1,8
    python examples/benchmarks/offload.py --sizes 7b --ways offload     # what does not fit without
    python examples/benchmarks/offload.py --devices 2 --sizes 7b --ways device,offload,fsdp2,deepspeed
    python examples/benchmarks/offload.py --devices 2 --sizes 7b --ways offload --accumulate 8 --buffer-mb 14000
    python examples/benchmarks/offload.py --devices 2 --sizes 13b,18b --ways all,fsdp2 --accumulate 1 --steps 3 --warm 5
    python examples/benchmarks/offload.py --devices 2 --sizes 13b --ways auto --accumulate 1 --steps 5 --warm 12
    python examples/benchmarks/offload.py --ways device,activations,all_activations,budget,checkpointed \
        --accumulate 1 --batch 4 --length 4096 --limit 120              # activations of long batches

Trains a plain Llama-like decoder: float32 masters, bfloat16 compute, AdamW, clipping at 1.0, a loop in plain PyTorch,
for each way in processes of its own. `device` keeps all on the GPU; `offload` is `offload=("optimizer",)`; `all` that
and the masters, `("optimizer", "parameters")`; `auto` is `memory="auto"`, whose choice it tells; `eager` is `offload`
with `cuda_graph_step=False`; `fsdp2` is `fully_shard` with `CPUOffloadPolicy`, blocks compiled, and torch's fused AdamW
on the CPU, `fsdp2_unpinned` the same without pinned memory; `deepspeed` and `deepcompile` are DeepSpeed's ways, where
that is installed (`offload_peers.py` says how). `activations` is `offload=("activations",)`, which takes what hides
behind compute, and `all_activations` all that are large; beside them `budget` is `activation_memory_budget=0.5`, and
`checkpointed` `torch.utils.checkpoint` around each block. `step_ms` is the whole step, `optimizer_ms` the part from the
last backward's end, both medians by the device's clock. What `--buffer-mb` holds comes beside backward and leaves
beside the next forward. `peak_gib` is of the whole device, sampled, `peak_before_gib` that of the steps before those
that count, and `host_taken_gib` what all ranks have taken of the host by the end of training, page caches aside;
`activations_gib` is what leaves in a step. `duplex_gb_s` is what pinned copies of 64 MiB reach in each direction while
both go on, on all ranks at once, measured in the same process after training. `exposed_ms` is `optimizer_ms` less that
of `device`, and `over_bytes` what it is of the time that the state's bytes take at that bandwidth.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from compare.fast_init import quick_draws
from lightning_zero.cli.models import SIZES, VOCABULARY, Decoder
from lightning_zero.offload.pinned_memory import HostMemory, free_bytes
from memory_sweep import output_of
from offload_peers import DeepSpeed, FullyShard, adamw

SIZES = SIZES | {"3b": (2560, 32, 20, 6912), "13b": (5120, 40, 40, 13824), "18b": (6144, 40, 48, 16384)}
ACTIVATIONS = ("activations", "all_activations", "budget", "checkpointed")
OFFLOAD = {
    "offload": ("optimizer",),
    "all": ("optimizer", "parameters"),
    "eager": ("optimizer",),
    "activations": ("activations",),
    "all_activations": ("activations",),
}
PEERS = {"fsdp2": FullyShard, "fsdp2_unpinned": FullyShard, "deepspeed": DeepSpeed, "deepcompile": DeepSpeed}
WAYS = ("device", "offload", "all", "auto", "eager", *PEERS, *ACTIVATIONS)
GIB = 2**30
SAID = "raised: "
Forward = Callable[[Tensor], Tensor]


class Ours:
    """This package's engine."""

    def __init__(self, dimensions: tuple[int, int, int, int], way: str, buffer_mb: float) -> None:
        from lightning_zero import Engine, EngineConfig, Tuning

        self.engine = Engine(
            torch.device("cuda", torch.cuda.current_device()),
            EngineConfig(
                compute_dtype=torch.bfloat16,
                reduce_dtype="bf16",
                offload=OFFLOAD.get(way, ()),
                memory="auto" if way == "auto" else None,
                activation_memory_budget=0.5 if way == "budget" else 1.0,
                tuning=Tuning(
                    cuda_graph_step=way != "eager",
                    offload_buffer_mb=buffer_mb,
                    offload_activations_mb=float("inf") if way == "all_activations" else None,
                ),
            ),
            report=lambda line: print(line, file=sys.stderr, flush=True) if dist.get_rank() == 0 else None,
        )
        with self.engine.construction(), quick_draws():
            self.model = Decoder(*dimensions)
        if way == "checkpointed":
            for block in self.model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        self.engine.shard(self.model)
        self.optimizer = adamw(self.model)
        self.engine.optimizers.check(self.optimizer)
        self.engine.optimizers.arrange([self.optimizer])

    def backward(self, tokens: Tensor, share: float) -> None:
        with self.engine.train_step(), torch.autocast("cuda", torch.bfloat16):
            loss = self.model(tokens[:, :-1], tokens[:, 1:])
        self.engine.cycle.before_backward()
        (loss * share).backward()
        self.engine.cycle.after_backward()

    def step(self) -> None:
        with self.engine.optimizers.stepping(self.optimizer, clip=1.0):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def host_bytes(self) -> int:
        from lightning_zero.report.engine_report import memory_by_role

        roles = memory_by_role(self.engine, [self.optimizer])
        return sum(nbytes for role, nbytes in roles.items() if role.endswith("_on_host"))

    def counters(self) -> dict[str, int]:
        found = self.engine.executor.counters()
        return {name: found.get(name, 0) for name in ("offload_bytes", "replayed_graphs")}


@contextmanager
def device_peak(found: dict[str, float]) -> Iterator[None]:
    """Of the whole device, looked at a few hundred times per second."""
    over, device = threading.Event(), torch.cuda.current_device()

    def watch() -> None:
        while not over.wait(0.003):
            free, total = torch.cuda.mem_get_info(device)
            found["peak_gib"] = max(found.get("peak_gib", 0.0), round((total - free) / GIB, 2))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def duplex_bandwidth(piece: int = 64 << 20, pieces: int = 64) -> float:
    """Bytes per second in each direction, while both go on."""
    memory = HostMemory(torch.device("cuda", torch.cuda.current_device()))
    hosts = [memory.empty(8 * piece, torch.uint8).split(piece) for _ in range(2)]
    devices = [torch.empty(piece, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    seconds = []
    for _ in range(4):
        dist.barrier()
        torch.cuda.synchronize()
        begin, ends = torch.cuda.Event(enable_timing=True), []
        begin.record()
        for out, stream in enumerate(streams):
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                for number in range(pieces):
                    here, there = devices[out], hosts[out][number % 8]
                    (there if out else here).copy_(here if out else there, non_blocking=True)
                ends.append(torch.cuda.Event(enable_timing=True))
                ends[-1].record()
        torch.cuda.synchronize()
        seconds.append(max(begin.elapsed_time(end) for end in ends) / 1e3)
    return piece * pieces / statistics.median(seconds[1:])


def train(way: Any, accumulate: int, steps: int, warm: int, batch: tuple[int, int]) -> dict[str, Any]:
    tokens = [torch.randint(VOCABULARY, (batch[0], batch[1] + 1), device="cuda") for _ in range(accumulate)]
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    found: dict[str, Any] = {}
    for number in range(warm + steps):
        if number == warm:
            torch.cuda.synchronize()
        if number in (0, warm):
            found["peak_before_gib"] = found.pop("peak_gib", 0.0)
            before = way.counters()
        with device_peak(found):
            for part in tokens:
                way.backward(part, 1 / accumulate)
            between, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            between.record()
            way.step()
            end.record()
            marks.append((between, end))
    torch.cuda.synchronize()
    steady = marks[warm:]
    whole = [a[1].elapsed_time(b[1]) for a, b in zip(steady, steady[1:], strict=False)]
    part = [between.elapsed_time(end) for between, end in steady]
    found |= {"step_ms": round(statistics.median(whole), 2), "optimizer_ms": round(statistics.median(part), 2)}
    each = {name: (count - before[name]) / steps for name, count in way.counters().items()}
    if each:
        found |= {"activations_gib": round(each["offload_bytes"] / GIB, 2), "replays": each["replayed_graphs"]}
    return found


def measure(arguments: argparse.Namespace) -> None:
    """One way, in this process."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False) if arguments.devices == 1 else None
    one: dict[str, Any] = {"store": alone, "rank": 0, "world_size": 1} if alone else {}
    dist.init_process_group("cpu:gloo,cuda:nccl", **one)
    torch.manual_seed(0)
    size, name = arguments.sizes, arguments.ways
    free = free_bytes() or 0
    way: Any = PEERS.get(name, Ours)(SIZES[size], name, arguments.buffer_mb)
    # DeepSpeed's are empty but where they are used, and know what they hold then.
    elements = sum(getattr(p, "ds_numel", p.numel()) for p in way.model.parameters())
    batch = (arguments.batch, arguments.length)
    found = [
        {"accumulate": n} | train(way, n, arguments.steps, arguments.warm, batch)
        for n in map(int, arguments.accumulate.split(","))
    ]
    host, taken = way.host_bytes(), free - (free_bytes() or 0)
    plan = way.engine.memory.plan if isinstance(way, Ours) else None
    bandwidth = duplex_bandwidth()
    for one in found:
        result = {
            "size": size,
            "way": name,
            "buffer_mb": arguments.buffer_mb,
            "parameters": elements,
            "tokens": f"{one['accumulate']}x{batch[0]}x{batch[1]}",
            **one,
            "host_gib": round(host / GIB, 2),
            "host_taken_gib": round(taken / GIB, 2),
            **({"chosen": plan.as_dict()} if plan is not None else {}),
            "state_bytes": (12 if name == "all" else 8) * elements // arguments.devices,  # of a rank
            "duplex_gb_s": round(bandwidth / 1e9, 2),
            "devices": arguments.devices,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # nothing is left to do that is worth the time


def compare(lines: list[dict[str, Any]]) -> None:
    """Sets what is offloaded beside what is not."""
    plain = {(one["size"], one["accumulate"]): one for one in lines if one["way"] == "device"}
    for one in lines:
        if one["way"] not in OFFLOAD and one["way"] not in ACTIVATIONS:
            continue
        beside = plain.get((one["size"], one["accumulate"]))
        if one["way"] in ACTIVATIONS:
            print(json.dumps(against(one, beside)), flush=True)
            continue
        exposed = one["optimizer_ms"] - (beside["optimizer_ms"] if beside else 0.0)
        bytes_ms = one["state_bytes"] / one["duplex_gb_s"] / 1e6
        result = {name: one[name] for name in ("size", "way", "tokens")} | {
            "exposed_ms": round(exposed, 2),
            "bytes_ms": round(bytes_ms, 2),
            "over_bytes": round(exposed / bytes_ms, 3),
            "step_over_device": round(one["step_ms"] / beside["step_ms"], 3) if beside else None,
            "peak_less_gib": round(beside["peak_gib"] - one["peak_gib"], 2) if beside else None,
        }
        print(json.dumps(result), flush=True)


def against(one: dict[str, Any], beside: dict[str, Any] | None) -> dict[str, Any]:
    """A way to have fewer activations on the device, and none."""
    names = ("size", "way", "tokens", "step_ms", "peak_gib", "activations_gib")
    return {name: one.get(name) for name in names} | {
        "step_over_device": round(one["step_ms"] / beside["step_ms"], 3) if beside else None,
        "peak_less_gib": round(beside["peak_gib"] - one["peak_gib"], 2) if beside else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="1b", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--ways", default="device,offload,eager", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--accumulate", default="1,8", help="micro-batches in a step")
    parser.add_argument("--devices", type=int, default=1, help="of this host")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--buffer-mb", type=float, default=256.0, help="of the device, that copies pass through")
    parser.add_argument("--limit", type=float, default=400, help="seconds for each way")
    parser.add_argument("--alone", action="store_true", help="measure the one way in this process")
    arguments = parser.parse_args()
    if arguments.alone:
        try:
            measure(arguments)
        except Exception:  # or what torchrun says of its processes is all that anybody would read
            print(f"{SAID}{json.dumps(traceback.format_exc()[-1500:])}", flush=True)
            os._exit(1)
        return
    lines = []
    names = ("accumulate", "devices", "batch", "length", "steps", "warm", "buffer_mb")
    same = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in names]
    # torchrun gives each process one thread unless told: what FSDP2 steps on the CPU would take as many times as long.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)) // arguments.devices))
    python = [sys.executable]
    if arguments.devices > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.devices}"]
    for size in arguments.sizes.split(","):
        for way in arguments.ways.split(","):
            command = [*python, __file__, "--alone", f"--sizes={size}", f"--ways={way}", *same]
            out, errors, over = output_of(command, arguments.limit, subprocess.PIPE)
            found = [line for line in out.splitlines() if line.startswith('{"size"')]
            raised = [json.loads(line.removeprefix(SAID)) for line in out.splitlines() if line.startswith(SAID)]
            why = (raised or [errors.strip()[-3000:]])[0] if over else f"not over after {arguments.limit:g} s"
            print("\n".join(found) or f"{size} {way}: {why}", flush=True)
            lines += map(json.loads, found)
    compare(lines)


if __name__ == "__main__":
    main()
