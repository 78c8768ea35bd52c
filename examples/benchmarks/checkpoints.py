"""Seconds, speed and memory of saving and loading checkpoints in training, ours and Lightning's, beside what the disk
itself does.

    python examples/benchmarks/checkpoints.py --home /data      # one GPU, the largest size that fits
    python examples/benchmarks/checkpoints.py --home /data --devices 2 --size 7b --minutes 15
    python examples/benchmarks/checkpoints.py --size tiny --length 64 --eager           # a dry run, on a CPU, too

Measures the disk, then runs each row in processes of its own, trains the decoder of step_time.py, saves in the middle,
and loads what was saved into a new module by `trainer.fit(ckpt_path=...)`: at once, out of the page cache, and once
more after its pages were dropped. One JSON line for whatever has been measured, at once, and a table at the end.
`sharded`, `full`: `state_dict_type`; `async`: sharded with `async_save=True`; `fsdp2`: Lightning's
ModelParallelStrategy with its own sharded checkpoint, which writes its files to the disk, too, without checksums.

`save_s` is what `trainer.save_checkpoint` takes, `there_s` until the checkpoint is there, both from the same moment.
Steps are timed on the device, for which no host waits. `stall_s` is what the steps from the save until the checkpoint
is there take beyond as many median ones after that, or before it where none come after; `wait_s`, those of the step
with the save and the next one alone, whose optimizer waits for copies. `load_s` is from before the checkpoint is opened
until all states are in place. `same`: sums of all weights and states, before and after. GiB of host (anonymous and
shared memory, without page cache) and device are what rank 0 takes beyond what it had before.
"""

import argparse
import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from compare.baselines import zero_strategy
from compare.timing import Clock
from disk import forget, speed
from lightning_zero.cli.models import SIZES, Decoder, Tokens
from lightning_zero.engine import engine_of
from step_time import Module

GIB = 2**30
SIZES |= {"3b": (2560, 32, 20, 6912)}
LARGEST_FIRST = ("7b", "3b", "1b", "700m", "350m", "tiny")
ROWS = ("sharded", "fsdp2", "async", "full")
STATE, MASTERS = 18, 12  # bytes for each parameter: on devices (and activations), and in a checkpoint
START_S = 40.0  # of a row, besides saving and loading
COLUMNS = (
    ("gib", "GiB"),
    ("step_ms", "step, ms"),
    ("save_s", "save, s"),
    ("save_gib_s", "GiB/s"),
    ("there_s", "there, s"),
    ("stall_s", "stall, s"),
    ("wait_s", "of it at once, s"),
    ("load_s", "load, s"),
    ("load_gib_s", "GiB/s"),
    ("load_cold_s", "cold, s"),
    ("load_cold_gib_s", "GiB/s"),
    ("save_host_gib", "host, saving"),
    ("load_host_gib", "host, loading"),
    ("save_device_gib", "device, saving"),
    ("same", "same"),
)


# -- one row


class Memory(threading.Thread):
    """The most that this process has of the host and of its device, beyond what it had at first."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.most = resident()
        self.over = threading.Event()
        self.allocated = 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.allocated = torch.cuda.memory_allocated()
        self.start()

    def run(self) -> None:
        while not self.over.wait(0.02):
            self.most = max(self.most, resident())

    def end(self) -> tuple[float, float]:
        self.over.set()
        self.join()
        device = torch.cuda.max_memory_allocated() - self.allocated if torch.cuda.is_available() else 0
        return round((max(self.most, resident()) - self.first) / GIB, 2), round(device / GIB, 2)


def resident() -> int:
    told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(told[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def total(trainer: L.Trainer) -> list[float]:
    """Of all weights and states of optimizers: the same in two trainings that stand at the same place."""
    values = [param.detach() for param in trainer.lightning_module.parameters()]
    for optimizer in trainer.optimizers:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            state = optimizer.state[param]
            values += [state[name] for name in sorted(state) if isinstance(state[name], Tensor)]
    return [float((v.to_local() if isinstance(v, DTensor) else v).double().sum()) for v in values]


class Saves(Clock):
    """Saves once; of all steps it is known when they end."""

    def __init__(self, path: Path, at: int, sums: bool) -> None:
        super().__init__(warm=0)
        self.path, self.at, self.sums = path, at, sums
        self.begun = self.called = self.there = 0.0
        self.aside: tuple[Any, Any] | None = None
        self.total: list[float] = []
        self.looks: list[tuple[int, float]] = []  # of Python at all objects: how many steps behind the save, seconds
        self.look_begun = 0.0
        gc.callbacks.append(self.look)
        self.host = self.device = 0.0

    def look(self, phase: str, of: dict[str, int]) -> None:
        now = time.perf_counter()
        if of["generation"] == 2 and self.begun and phase == "stop":
            self.looks.append((len(self.queued_at) - self.at, round(now - self.look_begun, 3)))
        self.look_begun = now

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.at and not self.begun:  # the last of several batches of the step
            if self.sums:
                begin = self.mark()
                self.total = total(trainer)
                torch.distributed.barrier()  # a rank that is done with that earlier would wait in its save
                self.aside = begin, self.mark()
            memory = Memory()
            self.begun = time.perf_counter()
            trainer.save_checkpoint(self.path)  # after which copies may go on beside the next step
            self.called = time.perf_counter()
            self.host, self.device = memory.end()
        if self.begun and not self.there and self.path.exists():
            self.there = time.perf_counter()
        super().on_train_batch_end(trainer, *args)

    def found(self, gib: float) -> dict[str, Any]:
        gc.callbacks.remove(self.look)
        steps = [milliseconds / 1e3 for milliseconds in self.milliseconds()]
        there = self.there or time.perf_counter()
        if self.aside is not None:
            steps[self.at - 2] -= self.between(*self.aside) / 1e3
        before, late = steps[max(0, self.at - 10) : self.at - 3], steps[self.at - 2 :]
        beside = sum(end < there for end in self.queued_at[self.at - 1 :]) + 1
        after = late[beside + 1 :]
        steady = statistics.median(after if len(after) > 5 else before)
        return {
            "gib": round(gib, 2),
            "step_ms": round(steady * 1e3, 1),
            "before_ms": round(statistics.median(before) * 1e3, 1),
            "beside_ms": round(statistics.median(late[2:beside]) * 1e3, 1) if beside > 4 else None,
            "save_s": round(self.called - self.begun, 3),
            "there_s": round(there - self.begun, 2),
            "save_gib_s": round(gib / (there - self.begun), 2),
            "stall_s": round(sum(late[:beside]) - steady * beside, 3),
            "wait_s": round(sum(late[:2]) - steady * 2, 3),
            "first_ms": [round(step * 1e3) for step in late[:6]],
            "looks": self.looks,
            "save_host_gib": self.host,
            "save_device_gib": self.device,
        }


def timed_restore(trainer: L.Trainer, found: dict[str, Any]) -> None:
    """Seconds from before the checkpoint is opened until all states are in place, on this rank."""
    connector = trainer._checkpoint_connector
    start, end = connector.resume_start, connector.resume_end
    memory: list[Memory] = []

    def resume_start(*args: Any, **kwargs: Any) -> None:
        synchronise()
        memory.append(Memory())
        found["begin"] = time.perf_counter()
        start(*args, **kwargs)

    def resume_end(*args: Any, **kwargs: Any) -> None:
        synchronise()
        found["seconds"] = time.perf_counter() - found["begin"]
        found["host"], _ = memory[0].end()
        found["total"] = total(trainer)
        end(*args, **kwargs)

    connector.resume_start, connector.resume_end = resume_start, resume_end


def make_trainer(arguments: argparse.Namespace, steps: int, callbacks: list[L.Callback]) -> L.Trainer:
    kind, fsdp2 = arguments.run, arguments.run == "fsdp2"
    if fsdp2:
        strategy: Any = ModelParallelStrategy(data_parallel_size=arguments.devices, tensor_parallel_size=1)
    else:
        options = ['state_dict_type="full"' if kind == "full" else 'state_dict_type="sharded"']
        options += ["async_save=true"] * (kind == "async")
        strategy = zero_strategy("zero3" if arguments.eager else "zero3_compile", options)
    return L.Trainer(
        strategy=strategy,
        devices=arguments.devices,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        precision="32-true" if fsdp2 else "bf16-mixed",
        max_steps=steps,
        accumulate_grad_batches=arguments.accumulate,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(arguments: argparse.Namespace, trainer: L.Trainer, source: Path | None = None) -> None:
    """With a new module, which goes with what it has on the device."""
    L.seed_everything(0, verbose=False)
    module = Module(arguments.size, arguments.run, True)
    if arguments.eager:
        torch.compiler.set_stance("force_eager")
    trainer.fit(module, DataLoader(Tokens(arguments.length), arguments.batch), ckpt_path=source)
    engine = engine_of(module)
    if engine is not None:
        engine.close()


def run(arguments: argparse.Namespace) -> None:
    path = arguments.home / f"{arguments.run}.ckpt"
    saves = Saves(path, arguments.at, arguments.run != "async")
    after = arguments.after if arguments.run == "async" else 3
    trainer = make_trainer(arguments, arguments.at + after, [saves])
    fit(arguments, trainer)
    files = [file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    gib = sum(file.stat().st_size for file in files) / GIB
    tell(arguments, saves.found(gib))
    before = saves.total
    del saves  # Lightning gives callbacks the module's `log`, and with it all that the module has on the device
    loads = ("load",) if arguments.warm else ("load", "load_cold")
    for name in () if arguments.run == "async" else loads:
        del trainer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if name == "load_cold":
            forget(path)
        trainer, found = make_trainer(arguments, arguments.at + 1, []), {}
        timed_restore(trainer, found)
        fit(arguments, trainer, path)
        told = {f"{name}_s": round(found["seconds"], 2), f"{name}_gib_s": round(gib / found["seconds"], 2)}
        told |= {"load_host_gib": found["host"]} if name == "load" else {}
        tell(arguments, told | {"same": found["total"] == before})


def tell(arguments: argparse.Namespace, told: dict[str, Any]) -> None:
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"row": arguments.run} | told), flush=True)


# -- all rows


def choose_size(arguments: argparse.Namespace, disk: tuple[float, float]) -> str:
    """The largest that fits on the devices, the host and the disk, and can be saved and loaded in time."""
    devices = arguments.devices
    host = int(next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line).split()[1])
    limit = Path("/sys/fs/cgroup/memory.max")
    host <<= 10
    if limit.exists() and limit.read_text().strip().isdigit():
        host = min(host, int(limit.read_text()))
    device = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else host // 4
    for size in LARGEST_FIRST:
        with torch.device("meta"):
            count = sum(param.numel() for param in Decoder(*SIZES[size]).parameters())
        saved = MASTERS * count
        seconds = len(ROWS) * START_S + saved / GIB * (4 / disk[0] + 3 / disk[1])
        fits = STATE * count / devices * 1.2 + 6 * GIB < device and 2 * saved < host
        if fits and saved * 1.2 < shutil.disk_usage(arguments.home).free and seconds < arguments.minutes * 60:
            return size
    return LARGEST_FIRST[-1]


def run_row(kind: str, size: str, arguments: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """What the row's processes have told; they end by the deadline."""
    command = [sys.executable, __file__, "--run", kind, "--size", size, "--home", str(arguments.home)]
    for name in ("batch", "length", "devices", "at", "after", "accumulate"):
        command += [f"--{name}", str(getattr(arguments, name))]
    command += ["--eager"] * arguments.eager + ["--warm"] * arguments.warm
    begin, told = time.monotonic(), {}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    late = threading.Timer(max(1.0, deadline - begin), lambda: os.killpg(process.pid, signal.SIGKILL))
    late.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith('{"row"'):
                told |= json.loads(line)
        status = process.wait()
        if status:
            print(json.dumps({"failed": kind, "status": status}), flush=True)
    finally:
        late.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(arguments.home / f"{kind}.ckpt", ignore_errors=True)
        (arguments.home / f"{kind}.ckpt").unlink(missing_ok=True) if kind == "full" else None
    print(json.dumps({"took": kind, "seconds": round(time.monotonic() - begin, 1)}), flush=True)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS), help="in this order, as long as there is time")
    parser.add_argument("--size", default="auto", choices=["auto", *SIZES])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--at", type=int, default=20, help="save after this step")
    parser.add_argument("--after", type=int, default=100, help="steps after a save beside training")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--home", type=Path, default=Path("checkpoints"), help="an empty folder, removed at the end")
    parser.add_argument("--minutes", type=float, default=5.0, help="for everything; then it ends")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--warm", action="store_true", help="load out of the page cache only, which saves time")
    parser.add_argument("--run", choices=ROWS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments)
        return
    deadline = time.monotonic() + arguments.minutes * 60 - 5
    made = not arguments.home.exists()
    arguments.home.mkdir(parents=True, exist_ok=True)
    disk = speed(arguments.home, gib=2.0)
    told = {"disk": "direct, 4 streams", "write_gib_s": round(disk[0], 2), "read_gib_s": round(disk[1], 2)}
    print(json.dumps(told), flush=True)
    size = choose_size(arguments, disk) if arguments.size == "auto" else arguments.size
    print(json.dumps({"size": size, "devices": arguments.devices, "torch": torch.__version__}), flush=True)
    rows = []
    for kind in arguments.rows.split(","):
        if deadline - time.monotonic() < 15:
            print(json.dumps({"not run": kind, "why": "the time is over"}), flush=True)
            continue
        rows.append({"row": kind} | run_row(kind, size, arguments, deadline))
    print(f"\ndisk: {disk[0]:.2f} GiB/s written, {disk[1]:.2f} read; {size}, {arguments.devices} ranks\n")
    print(f"| | {' | '.join(title for _, title in COLUMNS)} |\n|---|{'---:|' * len(COLUMNS)}")
    for row in rows:
        print(f"| {row['row']} | {' | '.join(str(row.get(name, '')) for name, _ in COLUMNS)} |")
    if made:
        shutil.rmtree(arguments.home)


if __name__ == "__main__":
    main()
