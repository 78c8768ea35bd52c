"""Loss curves of AdamW under several options of the strategy; writes a CSV file, and a PNG with matplotlib.

    python examples/benchmarks/loss_curves.py --ways bf16,fp8,8bit --steps 2000 --out curves
    python examples/benchmarks/loss_curves.py --ways bf16,fp8 --size tiny --steps 20 --batch 2 --length 64

All ways train one decoder on one device from the same weights, with the same batches and learning rates. The text is
the source of Python's standard library, as bytes. Two ways show how much losses differ by chance: `other batches` is
`bf16` with another order of the text, and `perturbed` begins with weights that are larger by one part in a million.
Each way runs in a process of its own, at the same time as the others, so seconds are not reported.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from compare.baselines import zero_strategy
from lightning_zero.cli.models import Decoder
from muon_curve import SIZES as SMALL
from muon_curve import draw, make_loader, make_trainer, rate_factor, smooth, write_csv

# Width, layers, heads and hidden width. "1b" has 1.36 billion parameters.
SIZES = SMALL | {"1b": (2048, 24, 16, 5632)}
RATE = 3e-4
PRECISION = {"bf16 weights": "bf16-true", "bf16 weights, to the nearest": "bf16-true"}  # others are bf16-mixed
# In fp8 although the layers of these sizes are faster in bfloat16.
FP8 = ['linear_dtype="fp8"', "tuning.fp8_min_gain=0.0"]
OPTIONS = {
    "bf16": [],
    "other batches": [],
    "perturbed": [],
    "fp8": FP8,
    "fp8 e4m3": [*FP8, 'tuning.fp8_gradient_format="e4m3"'],
    "fp8 shards": [*FP8, "tuning.fp8_shards=true"],
    "8bit": ['tuning.state_dtype="8bit"'],
    "bf16 weights": ["tuning.bf16_stochastic_round=true"],
    "bf16 weights, to the nearest": [],
}


class Module(L.LightningModule):
    def __init__(self, net: Decoder, steps: int) -> None:
        super().__init__()
        self.net, self.steps = net, steps
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.net(*batch)
        self.losses.append(loss.detach().clone())  # a replay writes the next loss into the same memory
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": LambdaLR(optimizer, lambda step: rate_factor(step, self.steps)),
                "interval": "step",
            },
        }


def train(arguments: argparse.Namespace) -> list[float]:
    """Return the loss of each step of one way."""
    torch.manual_seed(arguments.seed)
    module = Module(Decoder(*SIZES[arguments.size]), arguments.steps)
    if arguments.way == "perturbed":
        with torch.no_grad():
            for param in module.parameters():
                param.mul_(1 + 1e-6)
    arguments.seed += arguments.way == "other batches"
    trainer = make_trainer(
        zero_strategy(arguments.strategy, OPTIONS[arguments.way]),
        arguments.steps,
        precision=PRECISION.get(arguments.way, "bf16-mixed"),
        gradient_clip_val=1.0,
    )
    trainer.fit(module, make_loader(arguments))
    return torch.stack([loss.float() for loss in module.losses]).tolist()


def train_all(arguments: argparse.Namespace, ways: list[str]) -> dict[str, list[float]]:
    """Return the losses of each way, which train at the same time."""
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}  # each finds its own
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for way in ways:
            names = ("size", "steps", "batch", "length", "seed", "strategy")
            options = [f"--{name}={getattr(arguments, name)}" for name in names]
            command = [sys.executable, __file__, "--way", way, "--out", str(Path(folder, way)), *options]
            running[way] = subprocess.Popen(command, env=environment)
        failed = [way for way, process in running.items() if process.wait()]
        if failed:
            print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return {way: json.loads(Path(folder, way).read_text()) for way in ways if way not in failed}


def report(losses: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    tokens = arguments.batch * arguments.length
    means = {way: smooth(found) for way, found in losses.items()}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    first = next(iter(means.values()))
    result = {
        "size": arguments.size,
        "steps": arguments.steps,
        "tokens_per_step": tokens,
        "device": device,
        "torch": torch.__version__,
        "last_loss": {way: round(curve[-1], 4) for way, curve in means.items()},
        "above_first_percent": {way: round(100 * (curve[-1] / first[-1] - 1), 3) for way, curve in means.items()},
    }
    print(json.dumps(result), flush=True)
    write_csv(losses, tokens, arguments.out)
    title = f"{arguments.size} decoder, {device}, torch {torch.__version__}"
    draw(means, title, f"step of {tokens:,} tokens", arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="curves", help="name of the CSV and PNG files, without suffix")
    parser.add_argument("--ways", default="bf16,other batches,fp8,8bit", help=f"some of {', '.join(OPTIONS)}")
    parser.add_argument("--size", default="150m", choices=SIZES)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strategy", default="zero3_compile", help="zero3 compiles nothing, and has no fp8")
    parser.add_argument("--way", choices=OPTIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        Path(arguments.out).write_text(json.dumps(train(arguments)))
        return
    ways = arguments.ways.split(",")
    if unknown := [way for way in ways if way not in OPTIONS]:
        parser.error(f"argument --ways: no {', '.join(unknown)}; there are {', '.join(OPTIONS)}")
    report(train_all(arguments, ways), arguments)


if __name__ == "__main__":
    main()
