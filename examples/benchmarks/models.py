"""Time, memory and start of training models that others wrote, through the Lightning Trainer, for one strategy; prints
one JSON line.

    torchrun --nproc-per-node 2 examples/benchmarks/models.py llama --strategy zero3_compile

With torchrun all processes make their models at the same time, and what `start_s` counts from `fit` on is not another
process's Python.

`fsdp2` is Lightning's ModelParallelStrategy with `fully_shard` and `torch.compile` on each block; `fsdp2_graph` is the
same with forward and backward in one CUDA graph, captured after three steps, as torchtitan does it; `ddp` compiles the
whole model, or with `--compile-blocks` each block. All train from float32 master weights in bfloat16, with fused AdamW
and norm clipping at 1.0; gradients are averaged in bfloat16. Weights are drawn by `quick_draws`: what torch draws on
one core takes as long as a start. `lora_8b` has a frozen base in bfloat16, which `--option 'frozen_dtype="nf4"'`
quantizes under our strategies, and `--quantizer bitsandbytes` under others.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.data import DataLoader, Dataset

from architectures import ARCHITECTURES, WARMED_UP, Architecture, Sizes
from compare import idle_gaps
from compare.baselines import clip_by_hand, zero_strategy
from compare.fast_init import quick_draws
from compare.step_graph import StepGraph
from compare.timing import Clock, Start, exit_without_cleanup, outer_deciles

PROFILED = 6  # steps


class Module(L.LightningModule):
    def __init__(self, architecture: Architecture, sizes: Sizes) -> None:
        super().__init__()
        self.architecture = architecture
        with quick_draws():
            made = architecture.make(sizes)
        modules = {"net": made} if isinstance(made, nn.Module) else made
        for name, module in modules.items():
            setattr(self, name, module)
            if ARGS.no_dropout:
                remove_dropout(module)
        self.sharded = False

    def configure_model(self) -> None:
        if self.sharded:
            return
        self.sharded = True
        if ARGS.strategy == "ddp":
            for part in self.blocks() if ARGS.compile_blocks else self.children():
                compile_calls(part)
        if ARGS.strategy.startswith("fsdp2"):
            self.shard_by_blocks()

    def blocks(self) -> list[nn.Module]:
        return [module for module in self.modules() if type(module).__name__ in self.architecture.blocks]

    def shard_by_blocks(self) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mixed = torch.bfloat16 if ARGS.precision == "bf16-mixed" else None
        policy = MixedPrecisionPolicy(param_dtype=mixed, reduce_dtype=mixed)
        for part in list(self.modules()):
            for name, param in list(part.named_parameters(recurse=False)):
                if param.dim() == 0:  # fully_shard takes none
                    setattr(part, name, nn.Parameter(param.detach()[None]))
        mesh, reshard = self.device_mesh["data_parallel"], not ARGS.no_reshard
        for block in self.blocks():
            compile_calls(block)
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        for part in self.children():
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)

    def training_step(self, batch: dict[str, Any], index: int) -> Tensor:
        return self.architecture.loss(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.1, fused=torch.cuda.is_available())


class PeerModule(Module):
    """Clip gradients for other strategies. `Module` has no such hook, like most users' modules."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, *_: Any, **__: Any) -> None:
        if ARGS.strategy != "ddp":
            self.clip_gradients(optimizer, gradient_clip_val, "norm")
        else:
            clip_by_hand(self, gradient_clip_val)


class GraphModule(PeerModule):
    """Replay forward and backward as one CUDA graph."""

    def __init__(self, architecture: Architecture, sizes: Sizes) -> None:
        super().__init__(architecture, sizes)
        self.automatic_optimization = False
        self.graph: StepGraph | None = None

    def training_step(self, batch: dict[str, Any], index: int) -> Tensor:
        if self.graph is None:
            self.graph = StepGraph(lambda batch: self.architecture.loss(self, batch))
        loss = self.graph(batch)
        optimizer = self.optimizers()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss


def module_for(strategy: str) -> type[Module]:
    if strategy.startswith("zero3"):
        return Module
    return GraphModule if strategy == "fsdp2_graph" else PeerModule


def compile_calls(module: nn.Module) -> None:
    """Compile a module, also of one of torch's own classes, whose outermost frames Dynamo leaves out."""
    if not type(module).__module__.startswith("torch.nn"):
        module.compile(backend=ARGS.backend)
        return

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, *args, **kwargs)

    module.forward = MethodType(torch.compile(forward, backend=ARGS.backend), module)


def remove_dropout(module: nn.Module) -> None:
    """Set all dropout to zero, that of `nn.Dropout` and that of transformers' attention."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and ("drop" in name or (isinstance(part, nn.Dropout) and name == "p")):
                setattr(part, name, 0.0)
        if isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0


class Data(Dataset):
    """Whole batches."""

    def __init__(self, architecture: Architecture, sizes: Sizes) -> None:
        self.architecture, self.sizes = architecture, sizes

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.architecture.inputs(self.sizes, torch.Generator().manual_seed(index), index)


class Record(L.Callback):
    """Keep the loss of each step, on the device, and at the end what was compiled and replayed."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.result: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: object) -> None:
        self.losses.append(outputs["loss"].detach().clone())

    def on_train_end(self, trainer: L.Trainer, *_: object) -> None:
        counters = torch._dynamo.utils.counters
        breaks = {reason.split("\n")[0]: count for reason, count in counters["graph_break"].items()}
        self.result = {"graphs": counters["stats"]["unique_graphs"], "graph_breaks": breaks}
        engine = getattr(trainer.strategy, "_engine", None)
        if engine is not None:
            self.result["not_replayed"] = engine.cuda_graphs.disabled_reason()


class DeviceTurn(L.Callback):
    """Wait after warm-up for a line of the input, so that other processes may compile while no steps are timed."""

    def __init__(self, warm: int) -> None:
        self.warm = warm

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == self.warm:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            print(WARMED_UP, flush=True)
            sys.stdin.readline()


def keep_masks_as_compiled() -> None:
    """transformers asks the device in each step whether sequences are packed, and where a stream is captured it makes a
    whole mask instead, so blocks would be compiled once more amid the capture, which fails."""
    from transformers import masking_utils
    from transformers.utils import import_utils

    import_utils.is_cuda_stream_capturing = lambda: False
    masking_utils.find_packed_sequence_indices = lambda position_ids: None


def strategy_of(name: str) -> Any:
    if name.startswith("fsdp2"):
        return ModelParallelStrategy(data_parallel_size=ARGS.devices, tensor_parallel_size=1)
    if name == "ddp":
        return DDPStrategy(ddp_comm_hook=bf16_compress_hook if ARGS.precision == "bf16-mixed" else None)
    emulated = [] if torch.cuda.is_available() else ["tuning.emulate_cuda_graph_model=true"]
    return zero_strategy(name, emulated + ARGS.option, ARGS.backend)


def profiler(trainer: L.Trainer) -> Any:
    """Prints where the device stands idle in the steps after the last one that is timed."""

    def show(profile: Any) -> None:
        if trainer.global_rank == 0:
            with tempfile.TemporaryDirectory() as directory:
                trace = Path(directory, "trace.json")
                profile.export_chrome_trace(str(trace))
                lines = idle_gaps.describe(trace)
            print("\n".join([f"{ARGS.model}:", *lines, *slowest_kernels(profile)]), flush=True)

    schedule = torch.profiler.schedule(wait=ARGS.steps + 1, warmup=3, active=PROFILED, repeat=1)
    return torch.profiler.profile(schedule=schedule, on_trace_ready=show)


def slowest_kernels(profile: Any, count: int = 16) -> list[str]:
    """Return lines with the milliseconds in a step, the calls in a step and the name of each kernel."""
    on_device = [row for row in profile.key_averages() if row.device_type is not torch.autograd.DeviceType.CPU]
    on_device.sort(key=lambda row: -row.self_device_time_total)
    return [
        f"{row.self_device_time_total / 1e3 / PROFILED:8.2f} ms {row.count / PROFILED:6.0f} {row.key[:110]}"
        for row in on_device[:count]
    ]


def chosen_sizes(architecture: Architecture) -> Sizes:
    """Return the sizes of a model with what the command line changes."""
    sizes = architecture.tiny if ARGS.tiny else architecture.sizes
    lengths = tuple(int(length) for length in ARGS.lengths.split(",")) if ARGS.lengths else ()
    given = {"layers": ARGS.layers, "batch": ARGS.batch, "length": ARGS.length, "lengths": lengths}
    changed = {name: value for name, value in given.items() if value}
    if ARGS.length and not lengths:
        changed["lengths"] = ()
    return replace(sizes, **changed, experts=ARGS.experts or "", quantizer=ARGS.quantizer, cache=ARGS.cache)


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("lightning_zero").setLevel(logging.INFO)  # where the seconds of the start went
    L.seed_everything(0, verbose=False)
    architecture = ARCHITECTURES[ARGS.model]
    sizes = chosen_sizes(architecture)
    # torchrun gives each process one thread, by which making GPT-2 XL's weights takes as long as the start.
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // ARGS.devices, 1))
    start, clock, record = Start(), Clock(ARGS.warm), Record()
    turns = [DeviceTurn(ARGS.warm)] if ARGS.turns else []
    module = module_for(ARGS.strategy)(architecture, sizes)
    trainer = L.Trainer(
        strategy=strategy_of(ARGS.strategy),
        devices=ARGS.devices,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        precision="32-true" if ARGS.strategy.startswith("fsdp2") else ARGS.precision,
        max_steps=ARGS.steps + (PROFILED + 6 if ARGS.profile else 0),
        gradient_clip_val=None if ARGS.strategy == "fsdp2_graph" else 1.0,
        callbacks=[clock, start, record, *turns],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )
    if ARGS.strategy == "fsdp2_graph":
        keep_masks_as_compiled()
    if ARGS.profile:
        clock.profiler = profiler(trainer)
        clock.profiler.start()
    start.begin = time.perf_counter()
    trainer.fit(module, DataLoader(Data(architecture, sizes), batch_size=None, num_workers=0 if ARGS.tiny else 4))
    steady, leads = (values[: ARGS.steps - ARGS.warm - 1] for values in (clock.milliseconds(), clock.leads()))
    result = {
        "model": ARGS.model,
        "strategy": ARGS.strategy + "_no_reshard" * ARGS.no_reshard,
        "options": ARGS.option
        + [ARGS.quantizer] * bool(ARGS.quantizer)
        + ["compile_blocks"] * ARGS.compile_blocks
        + [f"precision={ARGS.precision}"] * (ARGS.precision != "bf16-mixed"),
        "ms": round(statistics.median(steady), 2),
        "ms_10_90": outer_deciles(steady, 2),
        "host_ahead_ms": round(statistics.median(leads), 2) if leads else None,
        "start_s": round(start.seconds, 1),
        "peak_gib": clock.peak,
        "first_step_peak_gib": clock.first_peak,
        "reserved_gib": clock.reserved,
        "device_gib": clock.device,
        "gib_by_role": start.roles,
        "last_loss": round(float(clock.loss), 4),
        "parameters": sum(param.numel() for param in module.parameters()),
        "torch": torch.__version__,
    }
    result |= start.counters | record.result
    if ARGS.losses:
        result["losses"] = [round(float(loss), 6) for loss in record.losses]
    if trainer.global_rank == 0:
        print(json.dumps(result), flush=True)
    exit_without_cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=ARCHITECTURES)
    parser.add_argument("--strategy", default="zero3_compile")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="sizes for the CPU, which show what is compiled")
    parser.add_argument("--backend", default="inductor", help="of torch.compile; aot_eager is quick")
    parser.add_argument("--compile-blocks", action="store_true", help="DDP: compile each block, not the model")
    parser.add_argument("--no-dropout", action="store_true", help="so that strategies have the same losses")
    parser.add_argument("--losses", action="store_true", help="print the loss of each step, too")
    parser.add_argument("--turns", action="store_true", help="wait for a line of the input before steps are timed")
    parser.add_argument("--cache", action="store_true", help="keys and values are kept, transformers' default")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--experts", help="of mixtures: eager, batched_mm or grouped_mm")
    parser.add_argument("--quantizer", default="", choices=["bitsandbytes"], help="of frozen weights, for a peer")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--lengths", help="tokens of batches, in turn, with commas")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm", type=int, default=15)
    parser.add_argument(
        "--profile", action="store_true", help="say where the device stands idle, and name the slowest kernels"
    )
    parser.add_argument("--no-reshard", action="store_true", help="FSDP2: keep weights gathered after forward")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of ZeroStrategy, or tuning.NAME=VALUE"
    )
    ARGS = parser.parse_args()
    main()
