"""Time and memory of one training step through the Lightning Trainer, for one strategy; prints one JSON line.

    python examples/benchmarks/step_time.py --strategy zero3_compile --size 1b --batch 2 --length 2048 --devices 4

Every strategy trains the same plain Llama-like decoder on the same random tokens: float32 master weights, bfloat16
compute and gradients on the wire, fused AdamW, norm clipping at 1.0, the Trainer as users get it. `fsdp2` is
Lightning's ModelParallelStrategy with `fully_shard` and `torch.compile` on each block. Before each batch Lightning asks
the device whether a rank got a SIGTERM, and waits for the answer; under our strategies ranks ask over the CPU. `--ask-
on-cpu` lets the other strategies do so, too, to show what of a difference that is.
"""

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_zero
from lightning_zero.integrations.trainer.sigterm import ask_on_cpu

SIZES = {  # width, layers, heads, hidden
    "tiny": (128, 4, 4, 352),
    "350m": (1024, 24, 16, 2816),
    "700m": (2048, 11, 16, 5632),  # on two ranks, shards as large as those of "1b" on four
    "1b": (2048, 24, 16, 5632),
    "7b": (4096, 32, 32, 11008),
}
VOCABULARY = 32000
LONGEST = 8192


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:]).to(x.dtype) * self.weight.to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([Norm(width), Norm(width)])
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.norms[0](x)
        q, k, v = (
            project(normed).view(batch, length, self.heads, -1).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Decoder(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.angles = width // heads // 2
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = Norm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("cos", torch.empty(LONGEST, self.angles), persistent=False)
        self.register_buffer("sin", torch.empty(LONGEST, self.angles), persistent=False)
        if not self.cos.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        rates = 1e4 ** (-torch.arange(self.angles, dtype=torch.float32) / self.angles)
        table = torch.outer(torch.arange(LONGEST, dtype=torch.float32), rates)
        self.cos.copy_(table.cos())
        self.sin.copy_(table.sin())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Module(L.LightningModule):
    def __init__(self, size: str, strategy: str, reshard: bool) -> None:
        super().__init__()
        self.size, self.strategy, self.reshard = size, strategy, reshard
        self.net: Decoder | None = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        with nullcontext() if self.strategy == "ddp" else torch.device("meta"):
            self.net = Decoder(*SIZES[self.size])
        if self.strategy == "ddp":
            return
        if self.strategy != "fsdp2":
            self.net.cos, self.net.sin = (torch.empty_like(t, device="cpu") for t in (self.net.cos, self.net.sin))
            self.net.reset_parameters()
            return
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            block.compile()
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard)
        fully_shard(self.net, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.net(batch[:, :-1], batch[:, 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.1, fused=self.device.type == "cuda")


class Tokens(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(VOCABULARY, (self.length + 1,), generator=torch.Generator().manual_seed(index))


class Clock(L.Callback):
    """From the end of one optimizer step on the device to the end of the next. Nothing waits for the device here, as
    nothing does in a user's training."""

    def __init__(self, warm: int, ask: bool = False) -> None:
        self.warm, self.marks, self.loss, self.ask = warm, [], None, ask

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.ask:
            ask_on_cpu(trainer, torch.distributed.new_group(backend="gloo"))
        self.begin = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: dict, *_: object) -> None:
        if trainer.global_step == len(self.marks):
            return
        self.marks.append(self.mark())
        self.loss = outputs["loss"]
        if len(self.marks) == self.warm:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            self.steady_after = time.perf_counter() - self.begin
        if (prof := getattr(self, "profiler", None)) is not None:
            prof.step()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.peak = self.reserved = None
        if torch.cuda.is_available():
            # Memory that all ranks can read is not the allocator's, and what CUDA graphs use between kernels is free to
            # it, but to nobody else.
            peers = getattr(trainer.strategy, "peer_bytes", 0)
            self.peak = round((torch.cuda.max_memory_allocated() + of_graphs() + peers) / 2**30, 2)
            self.reserved = round((torch.cuda.max_memory_reserved() + peers) / 2**30, 2)

    @staticmethod
    def mark() -> torch.cuda.Event | float:
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self) -> list[float]:
        """Of the steps after warm-up; the first one of them, before which the device was waited for, left out."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        steady = self.marks[self.warm :]
        return [
            a.elapsed_time(b) if isinstance(a, torch.cuda.Event) else 1e3 * (b - a)
            for a, b in zip(steady, steady[1:], strict=False)
        ]


def of_graphs() -> int:
    """Bytes that belong to CUDA graphs, as far as no tensor holds them."""
    if not torch.cuda.is_available():
        return 0
    segments = (s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0))
    return sum(segment["total_size"] - segment["allocated_size"] for segment in segments)


def zero_strategy(name: str, options: list[str]) -> Any:
    """What a Trainer gets; `options` are ZeroStrategy's, as NAME=VALUE with values in JSON, or tuning.NAME=VALUE."""
    if not options:
        return name
    given = {option: json.loads(value) for option, value in (text.split("=", 1) for text in options)}
    tuning = {
        option.removeprefix("tuning."): given.pop(option) for option in list(given) if option.startswith("tuning.")
    }
    return lightning_zero.ZeroStrategy(compile=name == "zero3_compile", tuning=lightning_zero.Tuning(**tuning), **given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="zero3_compile", choices=["zero3_compile", "zero3", "fsdp2", "ddp"])
    parser.add_argument("--size", default="1b", choices=SIZES)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--no-reshard", action="store_true", help="fsdp2: keep weights gathered after forward")
    parser.add_argument("--ask-on-cpu", action="store_true", help="whether a rank got a SIGTERM")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of ZeroStrategy, or tuning.NAME=VALUE"
    )
    parser.add_argument("--trace", metavar="FILE", help="a Chrome trace of two steps on rank 0")
    arguments = parser.parse_args()
    L.seed_everything(0, verbose=False)
    fsdp2 = arguments.strategy == "fsdp2"
    if fsdp2:
        strategy = ModelParallelStrategy(data_parallel_size=arguments.devices, tensor_parallel_size=1)
    else:
        strategy = zero_strategy(arguments.strategy, arguments.option)
    clock = Clock(arguments.warm, arguments.ask_on_cpu)
    trainer = L.Trainer(
        strategy=strategy,
        devices=arguments.devices,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        precision="32-true" if fsdp2 else "bf16-mixed",
        max_steps=arguments.steps,
        accumulate_grad_batches=arguments.accumulate,
        gradient_clip_val=1.0,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if arguments.trace:
        clock.profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=arguments.steps - 5, warmup=2, active=2),
            on_trace_ready=lambda p: p.export_chrome_trace(arguments.trace) if trainer.global_rank == 0 else None,
        )
        clock.profiler.start()
    trainer.fit(
        Module(arguments.size, arguments.strategy, not arguments.no_reshard),
        DataLoader(Tokens(arguments.length), arguments.batch),
    )
    steady = clock.milliseconds()
    result = {
        "strategy": arguments.strategy + ("_no_reshard" if arguments.no_reshard else ""),
        "options": arguments.option + ["ask_on_cpu"] * arguments.ask_on_cpu,
        "size": arguments.size,
        "tokens": f"{arguments.accumulate}x{arguments.batch}x{arguments.length}",
        "devices": arguments.devices,
        "ms": round(statistics.median(steady), 2),
        "ms_10_90": [
            round(q, 2) for q in (statistics.quantiles(steady, n=10)[0], statistics.quantiles(steady, n=10)[-1])
        ],
        "peak_gib": clock.peak,
        "reserved_gib": clock.reserved,
        "steady_after_s": round(clock.steady_after, 1),
        "last_loss": round(float(clock.loss), 4),
        "torch": torch.__version__,
    }
    if trainer.global_rank == 0:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
