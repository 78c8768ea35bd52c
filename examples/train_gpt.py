"""Trains a byte-level GPT on the source text of the Python standard library.

    python examples/train_gpt.py --accelerator cpu --devices 2                  two processes, a few minutes
    python examples/train_gpt.py --size 1b --precision bf16-mixed --devices 4   four GPUs

The model and the data know nothing of the strategy; the few lines below that name one serve comparisons. Each run
leaves metrics.csv (the loss of every step) and run.json (how it was run, how fast it was) in --out, with --report also
loss.png and what PlanReport writes of the plan; benchmarks/compare_runs.py sets such folders side by side.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy, Strategy

import lightning_zero  # registers the strategies' names
from gpt.data import StdlibBytes
from gpt.model import SHAPES, Block, LitGPT
from gpt.picture import draw_losses


class Stopwatch(Callback):
    """Wall time of each optimizer step as the user sees it, without validation, and the peak of GPU memory."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.peak_gib: float | None = None
        self.began = time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.mark = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step > len(self.seconds):
            now = time.perf_counter()
            self.seconds.append(now - self.mark)
            self.mark = now

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.mark = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.wall = time.perf_counter() - self.began
        if trainer.strategy.root_device.type == "cuda":
            self.peak_gib = torch.cuda.max_memory_allocated() / 2**30

    @property
    def median_step(self) -> float:
        return statistics.median(self.seconds[len(self.seconds) // 2 :])


class Sample(Callback):
    """Continues a prompt when training ends: on every rank, since gathering weights is collective; rank 0 prints."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed = length, seed

    def on_train_end(self, trainer: L.Trainer, module: LitGPT) -> None:
        module.eval()
        with trainer.precision_plugin.forward_context():
            text = module.model.generate(b"def ", self.length, temperature=0.7, seed=self.seed)
        module.train()
        if trainer.is_global_zero:
            print(f"\n----- sample -----\n{text.decode(errors='replace')}\n------------------")


class ClipSharded(Callback):
    """FSDPStrategy refuses `gradient_clip_val`: only the wrapper can compute the norm over all shards."""

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: object) -> None:
        trainer.strategy.model.clip_grad_norm_(1.0)


def build_strategy(name: str, reduce_dtype: str | None) -> str | Strategy:
    if name == "fsdp":
        return FSDPStrategy(auto_wrap_policy={Block})
    if name.startswith("zero3") and reduce_dtype is not None:
        return lightning_zero.ZeroStrategy(compile=name == "zero3_compile", reduce_dtype=reduce_dtype)
    return name


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--strategy", default="zero3_compile", choices=["zero3_compile", "zero3", "ddp", "fsdp"])
    add("--compile", action="store_true", help="torch.compile the model itself (ddp only)")
    add("--size", default="tiny", choices=list(SHAPES))
    add("--devices", default="auto", type=lambda text: text if text == "auto" else int(text))
    add("--nodes", default=1, type=int)
    add("--accelerator", default="auto")
    add("--precision", default="32-true")
    add("--reduce-dtype", choices=["bf16", "16", "32"], help="of gradients on the wire (zero3 strategies only)")
    add("--steps", default=200, type=int, help="optimizer steps")
    add("--batch-size", default=8, type=int, help="windows per process and micro-batch")
    add("--block-size", default=256, type=int, help="bytes per window")
    add("--accumulate", default=1, type=int, help="micro-batches per step; train_loss is the last one's")
    add("--lr", default=2e-3, type=float)
    add("--warmup", default=20, type=int, help="steps")
    add("--val-every", default=50, type=int, help="steps; 0 never validates")
    add("--log-every", default=1, type=int, help="steps between rows of metrics.csv")
    add("--local-loss", action="store_true", help="log rank 0's train loss, not the mean: no collective per step")
    add("--cpu-init", action="store_true", help="build the model at once: same start under every strategy")
    add("--seed", default=0, type=int)
    add("--out", default="runs/gpt", type=Path)
    add("--no-sample", action="store_true")
    add("--checkpoint", action="store_true", help="save every --val-every steps under --out")
    add("--report", action="store_true", help="the plan, and a picture of the losses, in --out; needs matplotlib")
    args = parser.parse_args(arguments)
    if args.compile and args.strategy != "ddp":
        parser.error("--compile is for --strategy ddp; zero3_compile compiles by itself.")
    if args.report and not args.strategy.startswith("zero3"):
        parser.error("--report is for --strategy zero3_compile and zero3: others have no plan.")
    return args


def main(arguments: Sequence[str] | None = None) -> L.Trainer:
    args = parse_arguments(arguments)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    L.seed_everything(args.seed)
    # Lightning's own mixed precision refuses to clip gradients beside a fused optimizer.
    fused = not (args.strategy == "ddp" and args.precision.endswith("mixed"))
    module = LitGPT(
        args.size,
        args.lr,
        args.warmup,
        args.steps,
        fused=fused,
        compile_model=args.compile,
        mean_train_loss=not args.local_loss,
    )
    if args.cpu_init:
        module.configure_model()
    data = StdlibBytes(args.block_size, args.batch_size, args.steps * args.accumulate, args.seed)
    watch = Stopwatch()
    callbacks: list[Callback] = [watch]
    if args.strategy == "fsdp":
        # No sample: outside the wrapped forward FSDP leaves the embedding sharded.
        callbacks.append(ClipSharded())
    elif not args.no_sample:
        callbacks.append(Sample(min(args.block_size, 256), args.seed))
    if args.checkpoint:
        every = args.val_every or args.steps
        callbacks.append(ModelCheckpoint(args.out / "checkpoints", every_n_train_steps=every, save_top_k=-1))
    if args.report:
        callbacks.append(lightning_zero.PlanReport(args.out / "plan"))
    trainer = L.Trainer(
        strategy=build_strategy(args.strategy, args.reduce_dtype),
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.nodes,
        precision=args.precision,
        max_steps=args.steps,
        max_epochs=-1,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=None if args.strategy == "fsdp" else 1.0,
        val_check_interval=args.val_every * args.accumulate or None,
        limit_val_batches=1.0 if args.val_every else 0,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=CSVLogger(args.out, name="", version=""),
        log_every_n_steps=args.log_every,
        default_root_dir=args.out,
        enable_checkpointing=args.checkpoint,
        callbacks=callbacks,
    )
    trainer.fit(module, datamodule=data)
    if trainer.is_global_zero:
        report(args, trainer, watch)
        if args.report:
            draw_losses(args.out / "metrics.csv", args.out / "loss.png")
            print(f"picture of the losses: {args.out / 'loss.png'}; report: {args.out / 'plan' / 'report.html'}")
    return trainer


def report(args: argparse.Namespace, trainer: L.Trainer, watch: Stopwatch) -> None:
    losses = {name: float(value) for name, value in trainer.callback_metrics.items()}
    cuda = trainer.strategy.root_device.type == "cuda"
    record = {
        "command": shlex.join(["python", "examples/train_gpt.py", *sys.argv[1:]]),
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "lightning": L.__version__},
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores",
        "processes": trainer.world_size,
        "final": losses,
        "median_step_s": watch.median_step,
        "first_step_s": watch.seconds[0],
        "peak_gib": watch.peak_gib,
        "wall_s": watch.wall,
    }
    (args.out / "run.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"final losses: {', '.join(f'{name} {value:.4f}' for name, value in losses.items())}")
    print(f"seconds per step (median of the last half): {watch.median_step:.4f}; first step {watch.seconds[0]:.1f} s")
    if watch.peak_gib is not None:
        print(f"peak memory on rank 0: {watch.peak_gib:.2f} GiB")
    print(f"wall time {watch.wall:.0f} s; written to {args.out}")


if __name__ == "__main__":
    main()
