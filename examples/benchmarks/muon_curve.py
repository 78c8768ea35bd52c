"""Loss curves of Muon with AdamW: ours (zero3_compile) and torch's own; writes a CSV file, and a PNG with matplotlib.

    python examples/benchmarks/muon_curve.py --out muon-curve
    python examples/benchmarks/muon_curve.py --size tiny --steps 20 --batch 2 --length 64 --strategy zero3

Both train one decoder on one device from the same weights, with the same batches and learning rates, in bfloat16 mixed
precision. The text is the source of Python's standard library, as bytes. Hidden matrices are stepped by
`torch.optim.Muon`, and all other parameters by fused AdamW. `torch` is a plain loop with `torch.compile`. Each way runs
in a process of its own. `seconds` is the time of all steps after the first tenth.
"""

import argparse
import csv
import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero.cli.models import Decoder

sys.path.append(str(Path(__file__).resolve().parents[1]))
from gpt.data import ByteWindows, read_stdlib

# Width, layers, heads and hidden width. "150m" has 148 million parameters, 49 million of them in embedding and head.
SIZES = {"tiny": (64, 2, 2, 176), "150m": (768, 14, 12, 2048)}
MUON_LR, ADAMW_LR, WARM_SHARE, LAST_FACTOR = 0.02, 3e-4, 0.05, 0.1
SMOOTH = 50  # steps of a mean
Losses = list[Tensor]


def make_model(size: str, seed: int) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(*SIZES[size])


def make_loader(arguments: argparse.Namespace) -> DataLoader:
    text, _ = read_stdlib()
    count = arguments.steps * arguments.batch
    starts = np.random.default_rng(arguments.seed).integers(0, len(text) - arguments.length - 1, size=count)
    return DataLoader(
        ByteWindows(text, starts, arguments.length), arguments.batch, pin_memory=torch.cuda.is_available()
    )


def make_optimizers(model: Decoder) -> list[torch.optim.Optimizer]:
    matrices = [param for param in model.blocks.parameters() if param.ndim == 2]
    chosen = set(map(id, matrices))
    others = [param for param in model.parameters() if id(param) not in chosen]
    fused = torch.cuda.is_available()
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.1),
        torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.1, fused=fused),
    ]


def rate_factor(step: int, steps: int) -> float:
    """Rise to the full rate, then fall to a tenth of it by a cosine."""
    warm = max(1, int(WARM_SHARE * steps))
    done = max(0, step - warm) / max(1, steps - warm)
    return min((step + 1) / warm, LAST_FACTOR + (1 - LAST_FACTOR) * (1 + math.cos(math.pi * done)) / 2)


def set_rates(optimizers: list[Any], step: int, steps: int) -> None:
    factor = rate_factor(step, steps)
    for optimizer, rate in zip(optimizers, (MUON_LR, ADAMW_LR), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate * factor


class Timer:
    """Measures the steps after the first tenth."""

    def __init__(self, steps: int) -> None:
        self._first = steps // 10
        self._begin = 0.0

    def before(self, step: int) -> None:
        if step == self._first:
            self._begin = self._now()

    def seconds(self) -> float:
        return self._now() - self._begin

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


class Module(L.LightningModule):
    def __init__(self, net: Decoder, steps: int, timer: Timer) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net, self.steps, self.timer = net, steps, timer
        self.losses: Losses = []

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.timer.before(index)
        loss = self.net(*batch)
        self.manual_backward(loss)
        optimizers = self.optimizers()
        set_rates(optimizers, index, self.steps)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(loss.detach().clone())  # a replay writes the next loss into the same memory

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return make_optimizers(self.net)


def make_trainer(strategy: Any, steps: int, **options: Any) -> L.Trainer:
    """Return a Trainer of one device that makes `steps` steps and prints nothing."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(
        strategy=strategy,
        devices=1,
        max_epochs=1,
        limit_train_batches=steps,
        use_distributed_sampler=False,
        **{"precision": "bf16-mixed"} | quiet | options,
    )


def ours(arguments: argparse.Namespace) -> tuple[Losses, float]:
    timer = Timer(arguments.steps)
    module = Module(make_model(arguments.size, arguments.seed), arguments.steps, timer)
    trainer = make_trainer(arguments.strategy, arguments.steps)
    trainer.fit(module, make_loader(arguments))
    return module.losses, timer.seconds()


def torchs(arguments: argparse.Namespace) -> tuple[Losses, float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model(arguments.size, arguments.seed).to(device)
    compiled: nn.Module = torch.compile(model) if device.type == "cuda" else model
    optimizers, losses, timer = make_optimizers(model), [], Timer(arguments.steps)
    for step, (tokens, targets) in enumerate(batches(arguments, device)):
        timer.before(step)
        with torch.autocast(device.type, torch.bfloat16):
            loss = compiled(tokens, targets)
        loss.backward()
        set_rates(optimizers, step, arguments.steps)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses, timer.seconds()


def batches(arguments: argparse.Namespace, device: torch.device) -> Iterator[list[Tensor]]:
    for batch in make_loader(arguments):
        yield [part.to(device, non_blocking=True) for part in batch]


WAYS = {"ours": ours, "torch": torchs}


def run_one(arguments: argparse.Namespace) -> None:
    losses, seconds = WAYS[arguments.way](arguments)
    found = torch.stack([loss.float() for loss in losses]).tolist()
    Path(arguments.out).write_text(json.dumps({"losses": found, "seconds": round(seconds, 3)}))


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            out = str(Path(folder) / way)
            names = ("size", "steps", "batch", "length", "seed", "strategy")
            options = [f"--{name}={getattr(arguments, name)}" for name in names]
            subprocess.run([sys.executable, __file__, "--way", way, "--out", out, *options], check=True)
            found[way] = json.loads(Path(out).read_text())
    return found


def smooth(losses: list[float]) -> list[float]:
    """Return the means of up to ``SMOOTH`` losses before each step."""
    sums = np.cumsum([0.0, *losses])
    return [(sums[i + 1] - sums[max(0, i + 1 - SMOOTH)]) / min(i + 1, SMOOTH) for i in range(len(losses))]


def write_csv(losses: dict[str, list[float]], tokens: int, out: str) -> None:
    """Write a row for each step of `tokens` tokens, and a column for each way."""
    with Path(f"{out}.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "tokens", *losses])
        for step, found in enumerate(zip(*losses.values(), strict=True)):
            rows.writerow([step, (step + 1) * tokens, *(f"{loss:.5f}" for loss in found)])


def draw(means: dict[str, list[float]], title: str, axis: str, out: str) -> None:
    """Draw curves by their labels into a PNG file, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (label, curve), line in zip(means.items(), itertools.cycle(("-", "--", "-.", ":"))):
        axes.plot(curve, line, label=label, linewidth=1.4)
    axes.set(xlabel=axis, ylabel=f"training loss, mean of {SMOOTH} steps")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(f"{out}.png", dpi=110)


def write(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    tokens = arguments.batch * arguments.length
    write_csv({way: entry["losses"] for way, entry in found.items()}, tokens, arguments.out)
    means = {way: smooth(entry["losses"]) for way, entry in found.items()}
    apart = max(abs(a - b) for a, b in zip(*(curve[SMOOTH:] or curve for curve in means.values()), strict=True))
    result = {
        "size": arguments.size,
        "steps": arguments.steps,
        "tokens_per_step": tokens,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "last_loss": {way: round(curve[-1], 4) for way, curve in means.items()},
        "largest_difference": round(apart, 4),
        "seconds": {way: entry["seconds"] for way, entry in found.items()},
    }
    print(json.dumps(result), flush=True)
    names = {"ours": f"{arguments.strategy}: Muon + AdamW", "torch": "one process: torch.optim.Muon + AdamW"}
    title = f"{arguments.size} decoder, {result['device']}, torch {torch.__version__}"
    draw({names[way]: curve for way, curve in means.items()}, title, f"step of {tokens:,} tokens", arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="muon-curve", help="name of the CSV and PNG files, without suffix")
    parser.add_argument("--size", default="150m", choices=SIZES)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strategy", default="zero3_compile", help="ours; zero3 compiles nothing")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        run_one(arguments)
    else:
        write(run_all(arguments), arguments)


if __name__ == "__main__":
    main()
