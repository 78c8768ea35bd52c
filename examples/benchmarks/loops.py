"""Milliseconds of a training step under the Trainer, or of the same step in a loop under Fabric; prints a JSON line.

    torchrun --nproc-per-node 2 examples/benchmarks/loops.py fabric --devices 2 --size 1b --batch 2 --length 2048

Both train the decoder of step_time.py on the same tokens, with fused AdamW, bfloat16 compute and norms clipped at 1.0.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from compare.fast_init import quick_draws
from compare.timing import Clock, exit_without_cleanup, outer_deciles
from lightning_zero import FabricZeroStrategy
from lightning_zero.cli.models import SIZES, Decoder, Tokens
from step_time import Module, make_trainer


def under_trainer(arguments: argparse.Namespace) -> tuple[list[float], float, int]:
    clock = Clock(arguments.warm)
    trainer = make_trainer(
        "zero3_compile",
        [clock],
        devices=arguments.devices,
        accelerator=arguments.accelerator,
        max_steps=arguments.steps,
    )
    with quick_draws():
        trainer.fit(
            Module(arguments.size, "zero3_compile", True), DataLoader(Tokens(arguments.length), arguments.batch)
        )
    return clock.milliseconds(), float(clock.loss), trainer.global_rank


def batches(loader: Any) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def under_fabric(arguments: argparse.Namespace) -> tuple[list[float], float, int]:
    fabric = Fabric(
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        precision="bf16-mixed",
        strategy=FabricZeroStrategy(),
    )
    fabric.launch()
    with quick_draws(), fabric.init_module():
        model = Decoder(*SIZES[arguments.size])
    model = fabric.setup_module(model)
    fused = fabric.device.type == "cuda"
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=fused))
    loader = fabric.setup_dataloaders(DataLoader(Tokens(arguments.length), arguments.batch))
    clock = Clock(arguments.warm)
    for _, batch in zip(range(arguments.steps), batches(loader), strict=False):
        loss = model(batch[:, :-1], batch[:, 1:])
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.marks.append(clock.mark())
    return clock.milliseconds(), float(loss.detach()), fabric.global_rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("loop", choices=["trainer", "fabric"])
    parser.add_argument("--size", default="1b", choices=SIZES)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="gpu")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm", type=int, default=15)
    arguments = parser.parse_args()
    L.seed_everything(0, verbose=False)
    steady, loss, rank = (under_trainer if arguments.loop == "trainer" else under_fabric)(arguments)
    told = {
        "loop": arguments.loop,
        "size": arguments.size,
        "tokens": f"{arguments.batch}x{arguments.length}",
        "devices": arguments.devices,
        "ms": round(statistics.median(steady), 2),
        "ms_10_90": outer_deciles(steady, 2),
        "last_loss": round(loss, 4),
        "torch": torch.__version__,
    }
    if rank == 0:
        print(json.dumps(told), flush=True)
    exit_without_cleanup()


if __name__ == "__main__":
    main()
