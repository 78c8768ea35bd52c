"""Time of one optimizer step with Muon for matrices and AdamW for the rest; prints one JSON line per way.

    torchrun --nproc-per-node 1 examples/benchmarks/muon_step.py --size 1b --ways captured,eager,torch,dion

All ways clip to norm 1.0 and step the same parameters, with gradients that are always there: hidden matrices with Muon,
embeddings, head and vectors with AdamW. `captured` and `eager` are lightning_zero with `cuda_graph_step` on and off;
`torch` is `torch.optim.Muon` and `torch.optim.AdamW(fused=True)`, with one rank; `dion` is the Muon of the package
`dion`, if it is installed, and the same AdamW. `products` is the time of the Newton-Schulz products alone, in batches
of one shape: a lower bound without a kernel for symmetric products.
"""

import argparse
import json
import os
import statistics
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compare.fast_init import quick_draws
from compare.timing import outer_deciles
from lightning_zero.cli.models import SIZES, Decoder
from lightning_zero.config import EngineConfig, Tuning
from lightning_zero.engine import Engine
from lightning_zero.optim.newton_schulz import newton_schulz

MAX_NORM = 1.0
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
Step = Callable[[], None]


def split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the hidden matrices, and all other parameters."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    chosen = set(map(id, matrices))
    return matrices, [p for p in model.parameters() if id(p) not in chosen]


def ours(size: str, capture: bool, bucket_mb: float) -> Step:
    device = torch.device("cuda", torch.cuda.current_device())
    tuning = Tuning(cuda_graph_step=capture, matrix_bucket_mb=bucket_mb)
    engine = Engine(device, EngineConfig(tuning=tuning, compute_dtype=torch.bfloat16))
    with quick_draws():
        model = Decoder(*SIZES[size])
    matrices, others = split(model)
    engine.shard(model)
    optimizers = [torch.optim.Muon(matrices, lr=1e-5), torch.optim.AdamW(others, lr=1e-5, fused=True)]
    engine.optimizers.arrange(optimizers)
    engine.sharder.memory.allocate_gradients()
    engine.sharder.memory.allocate_compute_shards(torch.bfloat16)
    for param in model.parameters():
        param.grad = engine.sharder.find(param).gradient.normal_().view(param.shape)

    def step() -> None:
        for optimizer in optimizers:
            with engine.optimizers.stepping(optimizer, clip=MAX_NORM):
                optimizer.step()
        engine.executor.weights.refresh_compute_shards()

    step.keep = engine, model
    return step


def plain(size: str, library: str) -> Step:
    with quick_draws():
        model = Decoder(*SIZES[size]).cuda()
    matrices, others = split(model)
    copies = [torch.empty_like(p, dtype=torch.bfloat16) for p in model.parameters()]
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    if library == "dion":
        from dion import Muon

        muon = Muon(matrices, lr=1e-5)
    else:
        muon = torch.optim.Muon(matrices, lr=1e-5)
    optimizers = [muon, torch.optim.AdamW(others, lr=1e-5, fused=True)]

    def step() -> None:
        for optimizer, params in zip(optimizers, (matrices, others), strict=True):
            nn.utils.clip_grad_norm_(params, MAX_NORM)
            optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(copies, list(model.parameters()))

    step.keep = model
    return step


def products(size: str) -> Step:
    with torch.device("meta"):
        matrices, _ = split(Decoder(*SIZES[size]))
    shapes = Counter(tuple(p.shape) for p in matrices)
    batches = [torch.randn(min(n, 16), *shape, device="cuda", dtype=torch.bfloat16) for shape, n in shapes.items()]
    repeats = [-(-n // 16) for n in shapes.values()]

    def step() -> None:
        for batch, times in zip(batches, repeats, strict=True):
            for _ in range(times):
                newton_schulz(batch, COEFFICIENTS, 5, 1e-7)

    return step


def print_kernels(step: Step, steps: int = 3) -> None:
    """Print the milliseconds per step of the kernels that take most of them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=lambda entry: -entry.self_device_time_total)
    for entry in found[:16]:
        print(f"    {entry.self_device_time_total / steps / 1e3:8.3f} ms {entry.count / steps:6.0f}  {entry.key[:90]}")


WAYS: dict[str, Callable[[argparse.Namespace], Step]] = {
    "captured": lambda arguments: ours(arguments.size, True, arguments.bucket_mb),
    "eager": lambda arguments: ours(arguments.size, False, arguments.bucket_mb),
    "torch": lambda arguments: plain(arguments.size, "torch"),
    "dion": lambda arguments: plain(arguments.size, "dion"),
    "products": lambda arguments: products(arguments.size),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1b", choices=list(SIZES))
    parser.add_argument("--ways", default="captured,eager,torch,dion,products")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=6)
    parser.add_argument("--bucket-mb", type=float, default=256.0, help="matrix_bucket_mb of ours")
    parser.add_argument("--kernels", action="store_true", help="also print the time of each kernel")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    for way in arguments.ways.split(","):
        try:
            step = WAYS[way](arguments)
        except ImportError as error:
            print(json.dumps({"way": way, "error": str(error)}), flush=True)
            continue
        times: list[float] = []
        torch.cuda.reset_peak_memory_stats()
        for number in range(arguments.warm + arguments.steps):
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            torch.cuda.synchronize()
            if number >= arguments.warm:
                times.append(begin.elapsed_time(end))
        result = {
            "way": way,
            "size": arguments.size,
            "ranks": dist.get_world_size(),
            "ms": round(statistics.median(times), 3),
            "ms_10_90": outer_deciles(times, 3),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "torch": torch.__version__,
        }
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
        if arguments.kernels:
            print_kernels(step)
        del step
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
