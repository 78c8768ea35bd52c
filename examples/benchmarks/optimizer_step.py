"""Time of one optimizer step (norm, clipping, AdamW, downcast) on sharded parameters; prints one JSON line per way.

    torchrun --nproc-per-node 4 examples/benchmarks/optimizer_step.py --size 1b --ways captured,eager,fused,fsdp2

Every way steps the same shards (float32, gradients in float32, clipping to norm 1.0, AdamW) and leaves a bfloat16 copy
of the weights, with gradients that are always there. `captured` and `eager` are lightning_zero with
`cuda_graph_step` on and off; `fused` is `torch.optim.AdamW(fused=True)` with `clip_grad_norm_` on plain tensors of the
shards' sizes; `fsdp2` the same on the DTensors of `fully_shard`; `deepspeed` is the step of DeepSpeed ZeRO-3 (bfloat16
with float32 masters, its norm and clipping). The device sleeps for a moment before each step, so that the host is ahead
of it when
the step begins, as it is in a training whose forward and backward take longer than their launches; a way that waits for
the device within the step pays for that all the same. `--asleep 0` leaves the sleep out. The bytes a step needs:
gradients read for the norm (4), gradients read and scaled (8), weights and both moments read and written (24), the
bfloat16 copy written (2): 38 per element. `--state-dtype` is the option of our ways: `bf16` needs 30 bytes per element,
and `8bit` needs 26.06. With `--bf16-weights` our ways step bfloat16 weights by `bf16_stochastic_round`: 18 bytes per
element, or 14.06 with 8-bit state.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compare.timing import outer_deciles
from lightning_zero.cli.models import SIZES, Decoder

BYTES = {None: 38, "bf16": 30, "8bit": 22 + 4 * (1 + 4 / 256)}
BYTES_OF_BF16_WEIGHTS = {None: 18, "bf16": 18, "8bit": 10 + 4 * (1 + 4 / 256)}
MAX_NORM = 1.0
CYCLES = 1.9e9  # of a multiprocessor, per second


class Small(nn.Module):
    """Many small parameters."""

    def __init__(self, tensors: int = 2000, elements: int = 1024) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(elements) for _ in range(tensors))


def build(size: str) -> nn.Module:
    return Small() if size == "small" else Decoder(*SIZES[size])


def adamw(params: list[Tensor], **options: object) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-5, weight_decay=0.1, **options)


def ours(
    size: str, capture: bool | str, state_dtype: str | None, bf16_weights: bool = False
) -> tuple[Callable[[], None], int]:
    from lightning_zero.config import EngineConfig, Tuning
    from lightning_zero.engine import Engine

    device = torch.device("cuda", torch.cuda.current_device())
    tuning = Tuning(cuda_graph_step=capture, state_dtype=state_dtype, bf16_stochastic_round=bf16_weights)
    engine = Engine(device, EngineConfig(tuning=tuning, compute_dtype=None if bf16_weights else torch.bfloat16))
    model = build(size)
    if bf16_weights:
        model.to(torch.bfloat16)
    engine.shard(model)
    optimizer = adamw(list(model.parameters()), fused=True)
    engine.optimizers.arrange([optimizer])
    engine.sharder.memory.allocate_gradients()
    engine.sharder.memory.allocate_compute_shards(torch.bfloat16)
    for param in model.parameters():
        param.grad = engine.sharder.find(param).gradient.normal_().view(param.shape)

    def step() -> None:
        with engine.optimizers.stepping(optimizer, clip=MAX_NORM):
            optimizer.step()
        engine.executor.weights.refresh_compute_shards()

    step.engine = engine  # keeps it
    step.model = model
    return step, sum(p.data.numel() for p in model.parameters())


def fused(size: str) -> tuple[Callable[[], None], int]:
    world = dist.get_world_size()
    sizes = [-(-param.numel() // world) for param in build(size).parameters()]
    params = [nn.Parameter(torch.randn(n, device="cuda")) for n in sizes]
    copies = [torch.empty_like(p, dtype=torch.bfloat16) for p in params]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = adamw(params, fused=True)

    def step() -> None:
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(copies, params)

    return step, sum(sizes)


def fsdp2(size: str) -> tuple[Callable[[], None], int]:
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = build(size)
    for block in getattr(model, "blocks", ()):
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cuda")
    params = list(model.parameters())
    for param in params:
        nn.init.normal_(param)
        param.grad = torch.randn_like(param)
    copies = [torch.empty_like(p.to_local(), dtype=torch.bfloat16) for p in params]
    optimizer = adamw(params, fused=True)

    def step() -> None:
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(copies, [p.to_local() for p in params])

    return step, sum(p.to_local().numel() for p in params)


def deepspeed(size: str) -> tuple[Callable[[], None], int]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": MAX_NORM,
        "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
    }
    model = build(size).to("cuda")
    optimizer = adamw(list(model.parameters()), fused=True)
    engine, wrapped, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    elements = sum(group.numel() for group in wrapped.fp32_partitioned_groups_flat)

    def step() -> None:
        # What a backward leaves: averaged gradients of every sub-group, in the dtype of the model.
        for number, group in enumerate(wrapped.fp16_groups):
            wrapped.averaged_gradients[number] = [
                torch.randn(p.partition_numel(), device="cuda", dtype=torch.bfloat16) * 1e-2 for p in group
            ]
        torch.cuda.synchronize()
        step.begin()
        wrapped.step()

    step.begins_itself = True
    step.engine = engine
    return step, elements


def copy_bandwidth() -> float:
    """Bytes per second of a large copy on the device, read and written counted."""
    a = torch.randn(1 << 29, device="cuda")
    b = torch.empty_like(a)
    seconds = []
    for _ in range(12):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        b.copy_(a)
        events[1].record()
        torch.cuda.synchronize()
        seconds.append(events[0].elapsed_time(events[1]) / 1e3)
    return 2 * a.nbytes / statistics.median(seconds)


class Start:
    """Of one step: the device sleeps for so many milliseconds, then the clocks start."""

    def __init__(self, asleep: float) -> None:
        self.asleep = asleep
        self.event = torch.cuda.Event(enable_timing=True)

    def __call__(self) -> None:
        if self.asleep > 0:
            torch.cuda._sleep(int(self.asleep * 1e-3 * CYCLES))
        self.event.record()
        self.clock = time.perf_counter()


WAYS = {
    "captured": lambda size, *options: ours(size, True, *options),
    "eager": lambda size, *options: ours(size, False, *options),
    "fused": lambda size, *_: fused(size),
    "fsdp2": lambda size, *_: fsdp2(size),
    "deepspeed": lambda size, *_: deepspeed(size),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1b", choices=[*SIZES, "small"])
    parser.add_argument("--ways", default="captured,eager,fused,fsdp2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--asleep", type=float, default=2.0, help="milliseconds for which the device sleeps first")
    parser.add_argument("--state-dtype", choices=["bf16", "8bit"], help="of the ways captured and eager")
    parser.add_argument("--bf16-weights", action="store_true", help="of the ways captured and eager")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    bandwidth = copy_bandwidth()
    for way in arguments.ways.split(","):
        is_ours = way in ("captured", "eager")
        state_dtype, bf16_weights = arguments.state_dtype if is_ours else None, is_ours and arguments.bf16_weights
        torch.cuda.reset_peak_memory_stats()
        step, elements = WAYS[way](arguments.size, state_dtype, bf16_weights)
        times: list[float] = []
        host: list[float] = []
        for number in range(arguments.warm + arguments.steps):
            dist.barrier()
            torch.cuda.synchronize()
            start = Start(arguments.asleep)
            if getattr(step, "begins_itself", False):
                step.begin = start
            else:
                start()
            step()
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            host_end = time.perf_counter()
            torch.cuda.synchronize()
            if number >= arguments.warm:
                times.append(start.event.elapsed_time(end))
                host.append(1e3 * (host_end - start.clock))
        needed = BYTES_OF_BF16_WEIGHTS if bf16_weights else BYTES
        ms, floor = statistics.median(times), 1e3 * needed[state_dtype] * elements / bandwidth
        result = {
            "way": way,
            "size": arguments.size,
            "state_dtype": state_dtype,
            "weights": "bf16" if bf16_weights else "float32",
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "ranks": dist.get_world_size(),
            "elements": elements,
            "ms": round(ms, 3),
            "ms_10_90": outer_deciles(times, 3),
            "host_ms": round(statistics.median(host), 3),
            "asleep_ms": arguments.asleep,
            "bytes_ms": round(floor, 3),
            "over_bytes": round(ms / floor, 3),
            "copy_tb_s": round(bandwidth / 1e12, 3),
            "torch": torch.__version__,
        }
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
        del step
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
