"""Time and memory of one training step through the Lightning Trainer, for one strategy; prints one JSON line.

    python examples/benchmarks/step_time.py --strategy zero3_compile --size 1b --batch 2 --length 2048 --devices 4

Every strategy trains the same plain Llama-like decoder on the same random tokens: float32 master weights, bfloat16
compute and gradients on the wire, fused AdamW, norm clipping at 1.0, the Trainer as users get it. `fsdp2` is
Lightning's ModelParallelStrategy with `fully_shard` and `torch.compile` on each block; `ddp_compile` compiles the model
and sends bfloat16 gradients; `--option stage=1` chooses a stage of ours. Before each batch Lightning asks the device
whether a rank got a SIGTERM, and waits for the answer; under our strategies ranks ask over the CPU. `--ask-on-cpu`
lets the other strategies do so, too, to show what of a difference that is.

With `--ranks-per-host 2`, neighbours count as hosts for every strategy: FSDP2 shards over those of each and replicates
over hosts, and bytes that cross are counted. `--on-cpu` makes the weights before they are sharded, the same for each
strategy, whose losses can be compared then.

`--torchao tensorwise` trains `fsdp2`, `ddp` or `ddp_compile` with torchao's float8 layers; see `torchao_peer.py`.
`--option 'linear_dtype="fp8"'` is ours. `--size 8b --layers 8` has the widths of Llama-8B and eight of its layers.
`--size llama8b` has the shape of Llama-3-8B. `--adamw8bit` is torchao's optimizer with 8-bit state, for `fsdp2`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import torchao_peer
from compare import idle_gaps
from compare.baselines import clip_by_hand, zero_strategy
from compare.fast_init import quick_draws
from compare.timing import Clock, Start, exit_without_cleanup, outer_deciles
from crossing import Crossing
from lightning_zero.cli.models import SIZES, Decoder, Tokens

STRATEGIES = ["zero3_compile", "zero3", "fsdp2", "ddp", "ddp_compile"]


@dataclass(frozen=True)
class Torchao:
    """How torchao converts the model. No recipe: it stays in 16 bits."""

    recipe: str = ""
    layers: str = "auto"
    fp8_gather: bool = False


class Module(L.LightningModule):
    def __init__(
        self,
        shape: Sequence[int],
        strategy: str,
        reshard: bool,
        on_cpu: bool = False,
        ranks_per_host: int = 0,
        torchao: Torchao = Torchao(),
        adamw8bit: bool = False,
    ) -> None:
        super().__init__()
        self.adamw8bit = adamw8bit
        self.shape, self.strategy, self.reshard = shape, strategy, reshard
        self.on_cpu, self.ranks_per_host, self.torchao = on_cpu, ranks_per_host, torchao
        self.swapped = 0
        self.net: Decoder | None = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        ddp = self.strategy in ("ddp", "ddp_compile")
        # Lightning makes what is made here on the GPU, which draws other numbers, but not under ModelParallelStrategy.
        place = torch.device("cpu") if self.on_cpu else nullcontext() if ddp else torch.device("meta")
        with place:
            self.net = Decoder(*self.shape)
        if self.torchao.recipe:
            chosen = self.torchao
            self.swapped = torchao_peer.convert(self.net, chosen.recipe, chosen.layers, chosen.fp8_gather)
        if self.strategy == "ddp_compile":
            self.net.compile()
        if ddp:
            return
        if self.strategy != "fsdp2":
            if self.net.cos.is_meta:
                self.net.cos, self.net.sin = (torch.empty_like(t, device="cpu") for t in (self.net.cos, self.net.sin))
                self.net.reset_parameters()
            return
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        mesh = self.device_mesh["data_parallel"]
        if self.ranks_per_host:
            shape = (mesh.size() // self.ranks_per_host, self.ranks_per_host)
            mesh = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("hosts", "host"))
        for block in self.net.blocks:
            block.compile()
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard)
        fully_shard(self.net, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.net(batch[:, :-1], batch[:, 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.adamw8bit:
            return torchao_peer.adamw8bit(self.parameters(), lr=1e-4, weight_decay=0.1)
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.1, fused=self.device.type == "cuda")


class PeerModule(Module):
    """Clip gradients for other strategies, and update torchao's layers. Most users' modules have no such hooks."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if self.strategy == "fsdp2":
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            clip_by_hand(self, gradient_clip_val)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.torchao.fp8_gather:
            torchao_peer.after_step(self.net)


class Losses(L.Callback):
    """Of each micro-batch of rank 0; nothing waits for them."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: object) -> None:
        self.kept.append(outputs["loss"].detach().clone())

    def read(self) -> list[float]:
        return [round(loss, 5) for loss in torch.stack(self.kept).tolist()]


def make_trainer(strategy: Any, callbacks: list[L.Callback], **options: Any) -> L.Trainer:
    """With norm clipping, and nothing else that takes time. ``options``: of the Trainer."""
    return L.Trainer(
        **{"accelerator": "gpu" if torch.cuda.is_available() else "cpu", "precision": "bf16-mixed"} | options,
        strategy=strategy,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def traced(profile: torch.profiler.profile, file: str) -> None:
    """Keeps a trace, and prints where its steps went."""
    profile.export_chrome_trace(file)
    print("\n".join(idle_gaps.describe(Path(file))), flush=True)


def torchao_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Torchao:
    if not arguments.torchao:
        return Torchao()
    if arguments.strategy not in ("fsdp2", "ddp", "ddp_compile"):
        parser.error(f"--torchao swaps modules of fsdp2, ddp and ddp_compile, not of {arguments.strategy}.")
    can_gather = arguments.torchao == "tensorwise" and arguments.strategy == "fsdp2"
    if arguments.torchao_gather == "fp8" and not can_gather:
        parser.error("--torchao-gather fp8 needs --strategy fsdp2 --torchao tensorwise.")
    by_default = "fp8" if can_gather and arguments.devices > 1 else "16"
    return Torchao(arguments.torchao, arguments.torchao_layers, (arguments.torchao_gather or by_default) == "fp8")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="zero3_compile", choices=STRATEGIES)
    parser.add_argument("--size", default="1b", choices=SIZES)
    parser.add_argument("--layers", type=int, default=0, help="instead of the size's own")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--no-reshard", action="store_true", help="fsdp2: keep weights gathered after forward")
    parser.add_argument("--on-cpu", action="store_true", help="weights are made there, and then sharded")
    parser.add_argument("--ranks-per-host", type=int, default=0, help="neighbours that count as a host")
    parser.add_argument("--ask-on-cpu", action="store_true", help="whether a rank got a SIGTERM")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of ZeroStrategy, or tuning.NAME=VALUE"
    )
    parser.add_argument("--precision", help="default bf16-mixed, and 32-true for fsdp2")
    parser.add_argument("--torchao", default="", choices=torchao_peer.RECIPES, help="float8 layers of torchao")
    parser.add_argument("--torchao-layers", default="auto", choices=torchao_peer.FILTERS, help="its filter, or all")
    parser.add_argument("--torchao-gather", choices=["16", "fp8"], help="fp8 for tensorwise on several ranks")
    parser.add_argument("--adamw8bit", action="store_true", help="torchao's, instead of torch's AdamW")
    parser.add_argument("--trace", metavar="FILE", help="a Chrome trace of some steps on rank 0")
    return parser


def main() -> None:
    parser = make_parser()
    arguments = parser.parse_args()
    torchao = torchao_options(parser, arguments)
    width, layers, *others = SIZES[arguments.size]
    shape = (width, arguments.layers or layers, *others)
    L.seed_everything(0, verbose=False)
    fsdp2, per_host = arguments.strategy == "fsdp2", arguments.ranks_per_host
    if fsdp2:
        strategy = ModelParallelStrategy(data_parallel_size=arguments.devices, tensor_parallel_size=1)
    elif arguments.strategy == "ddp_compile":
        strategy = DDPStrategy(ddp_comm_hook=bf16_compress_hook, gradient_as_bucket_view=True)
    elif arguments.strategy == "ddp":
        strategy = "ddp"
    else:
        hosts = [f"tuning.ranks_per_host={per_host}"] if per_host else []
        strategy = zero_strategy(arguments.strategy, hosts + arguments.option)
    clock, losses, start = Clock(arguments.warm, arguments.ask_on_cpu), Losses(), Start()
    crossing = Crossing(per_host, arguments.warm) if per_host else None
    callbacks: list[L.Callback] = [clock, start]
    if crossing:
        crossing.watch()
        callbacks += [losses, crossing]
    trainer = make_trainer(
        strategy,
        callbacks,
        devices=arguments.devices,
        precision=arguments.precision or ("32-true" if fsdp2 else "bf16-mixed"),
        max_steps=arguments.steps,
        accumulate_grad_batches=arguments.accumulate,
    )
    if arguments.trace:
        clock.profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=arguments.steps - 7, warmup=2, active=4),
            on_trace_ready=lambda p: traced(p, arguments.trace) if trainer.global_rank == 0 else None,
        )
        clock.profiler.start()
    module_type = Module if arguments.strategy in ("zero3", "zero3_compile") else PeerModule
    module = module_type(
        shape, arguments.strategy, not arguments.no_reshard, arguments.on_cpu, per_host, torchao, arguments.adamw8bit
    )
    start.begin = time.perf_counter()
    with quick_draws():
        trainer.fit(module, DataLoader(Tokens(arguments.length), arguments.batch))
    steady = clock.milliseconds()
    result = {
        "strategy": arguments.strategy + ("_no_reshard" if arguments.no_reshard else ""),
        "precision": trainer.precision,
        "options": arguments.option + ["ask_on_cpu"] * arguments.ask_on_cpu + ["adamw8bit"] * arguments.adamw8bit,
        "size": arguments.size + f"/{arguments.layers} layers" * bool(arguments.layers),
        "tokens": f"{arguments.accumulate}x{arguments.batch}x{arguments.length}",
        "devices": arguments.devices,
        "ms": round(statistics.median(steady), 2),
        "ms_10_90": outer_deciles(steady, 2),
        "first_step_peak_gib": clock.first_peak,
        "peak_gib": clock.peak,
        "reserved_gib": clock.reserved,
        "device_gib": clock.device,
        "gib_by_role": start.roles,
        "parameters": sum(param.numel() for param in module.parameters()),
        "start_s": round(start.seconds, 1),
        "steady_after_s": round(clock.steady_after, 1),
        "last_loss": round(float(clock.loss), 4),
        "torch": torch.__version__,
    }
    if torchao.recipe:
        result |= {"torchao": asdict(torchao) | {"swapped": module.swapped}}
    if crossing:  # DDP calls its collectives from C++, where none is seen
        across = None if arguments.strategy.startswith("ddp") else crossing.gb
        result |= {"ranks_per_host": per_host, "gb_across": across, "losses": losses.read()}
    if trainer.global_rank == 0:
        print(json.dumps(result), flush=True)
    exit_without_cleanup()


if __name__ == "__main__":
    main()
