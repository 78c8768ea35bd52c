"""Seconds, speed and memory of saving and loading a checkpoint in training; prints one JSON line.

    python examples/benchmarks/checkpoints.py --strategy zero3_compile --kind sharded --size 7b --devices 2 --home /data

Trains the decoder of step_time.py, saves in the middle, and goes on from what was saved in a second `fit`. `--kind`:
`full` or `sharded`; `async` is `sharded` with `async_save=True`. `fsdp2` is Lightning's ModelParallelStrategy with its
own sharded checkpoint. The stall is what the batches from the save on take beyond so many median batches, until the
checkpoint is there; without `async` it is the save itself.
"""

import argparse
import json
import resource
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from step_time import Module
from torch.utils.data import DataLoader

from lightning_zero.bench.decoder import SIZES, Tokens
from lightning_zero.bench.peers import zero_strategy


class Saves(L.Callback):
    """Saves once, and notes when batches end."""

    def __init__(self, path: Path, at: int) -> None:
        self.path, self.at = path, at
        self.ends: list[float] = []
        self.seconds = self.there = 0.0
        self.peaks: dict[str, float] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.at:
            synchronise()
            before = peak(reset=True)
            begin = time.perf_counter()
            trainer.save_checkpoint(self.path)
            self.seconds = time.perf_counter() - begin
            self.peaks = {"device_gib_before": before, "device_gib_while_saving": peak()}
        if self.at and trainer.global_step >= self.at and not self.there and self.path.exists():
            self.there = time.perf_counter()
        synchronise()
        self.ends.append(time.perf_counter())


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak(reset: bool = False) -> float:
    if not torch.cuda.is_available():
        return 0.0
    found = torch.cuda.max_memory_allocated() / 2**30
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return round(found, 2)


def timed_restore(trainer: L.Trainer) -> dict[str, float]:
    """Seconds from before the checkpoint is opened until all states are in place, on this rank."""
    found: dict[str, float] = {}
    connector = trainer._checkpoint_connector
    start, end = connector.resume_start, connector.resume_end

    def resume_start(*args: Any, **kwargs: Any) -> None:
        synchronise()
        found["begin"] = time.perf_counter()
        start(*args, **kwargs)

    def resume_end(*args: Any, **kwargs: Any) -> None:
        synchronise()
        found["seconds"] = time.perf_counter() - found["begin"]
        end(*args, **kwargs)

    connector.resume_start, connector.resume_end = resume_start, resume_end
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="zero3_compile", choices=["zero3_compile", "fsdp2"])
    parser.add_argument("--kind", default="sharded", choices=["full", "sharded", "async"])
    parser.add_argument("--size", default="1b", choices=SIZES)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--at", type=int, default=12, help="save after this step")
    parser.add_argument("--home", type=Path, default=Path("checkpoints"))
    parser.add_argument("--keep", action="store_true", help="do not load, and leave the checkpoint there")
    arguments = parser.parse_args()
    path = arguments.home / "x.ckpt"
    first = fit(arguments, path, None)
    out = {"strategy": arguments.strategy, "kind": arguments.kind, "size": arguments.size, **first}
    if not arguments.keep:
        out |= fit(arguments, path, path)
    if torch.distributed.get_rank() == 0:
        out["host_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1)
        print(json.dumps(out), flush=True)
        if not arguments.keep:
            shutil.rmtree(arguments.home)


def fit(arguments: argparse.Namespace, path: Path, source: Path | None) -> dict[str, Any]:
    L.seed_everything(0, verbose=False)
    fsdp2 = arguments.strategy == "fsdp2"
    if fsdp2:
        strategy: Any = ModelParallelStrategy(data_parallel_size=arguments.devices, tensor_parallel_size=1)
    else:
        chosen = ['state_dict_type="full"' if arguments.kind == "full" else 'state_dict_type="sharded"']
        strategy = zero_strategy("zero3_compile", chosen + ["async_save=true"] * (arguments.kind == "async"))
    saves = Saves(path, 0 if source else arguments.at)
    steps = arguments.at + 3 if source else arguments.steps
    trainer = L.Trainer(
        strategy=strategy,
        devices=arguments.devices,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        precision="32-true" if fsdp2 else "bf16-mixed",
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[saves],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    restored = timed_restore(trainer)
    module = Module(arguments.size, arguments.strategy, True)
    data = DataLoader(Tokens(arguments.length), arguments.batch)
    trainer.fit(module, data, ckpt_path=source)
    if source:
        return {"load_s": round(restored["seconds"], 2)}
    if not saves.there:
        saves.there = time.perf_counter()
    batches = [after - before for before, after in zip(saves.ends, saves.ends[1:], strict=False)]
    steady = statistics.median(batches[arguments.at + (len(batches) - arguments.at) // 2 :])
    # The batch that saved ends at ends[at - 1]; the one before it is where the stall begins to count.
    after = batches[arguments.at - 2 :]
    until = [n for n, end in enumerate(saves.ends[arguments.at - 1 :]) if end >= saves.there]
    counted = after[: (until[0] if until else len(after)) + 2]
    gib = sum(file.stat().st_size for file in path.rglob("*")) / 2**30 if path.is_dir() else path.stat().st_size / 2**30
    return {
        "gib": round(gib, 2),
        "step_ms": round(steady * 1e3, 1),
        "save_call_s": round(saves.seconds, 3),
        "until_there_s": round(saves.there - saves.ends[arguments.at - 2], 2),
        "stall_s": round(sum(counted) - steady * len(counted), 3),
        "longest_batch_s": round(max(after), 3),
        **saves.peaks,
    }


if __name__ == "__main__":
    main()
