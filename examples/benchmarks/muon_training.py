"""Time of training steps with Muon and AdamW, and with AdamW alone; prints one JSON line per way, and their ratio.

    python examples/benchmarks/muon_training.py --size 1b --batch 4 --length 2048 --accumulate 8
    python examples/benchmarks/muon_training.py --size tiny --batch 2 --length 64 --accumulate 2 --strategy zero3

Both train one decoder on one device in bfloat16 mixed precision, through the Trainer with manual optimization and norm
clipping. `muon` steps hidden matrices by `torch.optim.Muon`, and embedding, head and vectors by fused AdamW. `adamw`
steps all parameters by fused AdamW. A step has batch x length x accumulate tokens. Each way runs in its own process.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from compare.baselines import zero_strategy
from compare.fast_init import quick_draws
from compare.timing import Clock, exit_without_cleanup, outer_deciles
from lightning_zero.cli.models import SIZES, Decoder, Tokens

WAYS = ("muon", "adamw")
BEGIN = time.perf_counter()
WATCHED = 4  # steps whose micro-batches are reported: of these, the first ones compile and capture


class Module(L.LightningModule):
    def __init__(self, size: str, way: str, accumulate: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.size, self.way, self.accumulate = size, way, accumulate
        self.marks: list[Any] = []
        self.loss: Tensor | None = None
        self.net: Decoder | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Decoder(*SIZES[self.size])

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        assert self.net is not None
        fused = self.device.type == "cuda"
        matrices = [p for p in self.net.blocks.parameters() if p.ndim == 2] if self.way == "muon" else []
        chosen = set(map(id, matrices))
        others = [param for param in self.net.parameters() if id(param) not in chosen]
        adamw = torch.optim.AdamW(others, lr=1e-4, weight_decay=0.1, fused=fused)
        return [torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.1), adamw] if matrices else [adamw]

    def on_train_start(self) -> None:
        self.progress("the strategy is set up")

    def progress(self, event: str) -> None:
        """Print the seconds since the start of the program, on its standard error."""
        print(f"{self.way}: {event} ({time.perf_counter() - BEGIN:.1f} s)", file=sys.stderr, flush=True)

    def training_step(self, batch: Tensor, index: int) -> None:
        assert self.net is not None
        if (index + 1) % self.accumulate:
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(self.net(batch[:, :-1], batch[:, 1:]) / self.accumulate)
            if index < WATCHED * self.accumulate:
                self.progress(f"micro-batch {index}")
            return
        loss = self.net(batch[:, :-1], batch[:, 1:])
        self.manual_backward(loss / self.accumulate)
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            if index < WATCHED * self.accumulate:
                self.progress(f"micro-batch {index}, step of {type(optimizer.optimizer).__name__}")
        self.loss = loss.detach()
        self.marks.append(Clock.mark())
        self.progress(f"step {len(self.marks)} is queued")


def train(arguments: argparse.Namespace) -> None:
    L.seed_everything(0, verbose=False)
    module = Module(arguments.size, arguments.way, arguments.accumulate)
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        precision="bf16-mixed",
        strategy=zero_strategy(arguments.strategy, arguments.option),
        max_epochs=1,
        limit_train_batches=arguments.steps * arguments.accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module.progress("fit begins")
    with quick_draws():
        trainer.fit(module, DataLoader(Tokens(arguments.length), arguments.batch))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    module.progress("the device has ended the last step")
    marks = module.marks[arguments.warm - 1 :]
    times = [Clock.between(a, b) for a, b in zip(marks, marks[1:], strict=False)]
    tokens = arguments.batch * arguments.length * arguments.accumulate
    result = {
        "way": arguments.way,
        "size": arguments.size,
        "options": arguments.option,
        "tokens": f"{arguments.accumulate}x{arguments.batch}x{arguments.length}",
        "tokens_per_step": tokens,
        "ms": round(statistics.median(times), 2),
        "ms_10_90": outer_deciles(times, 2),
        "tokens_per_s": round(tokens / statistics.median(times) * 1e3),
        "last_loss": round(float(module.loss), 4),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
    }
    print(json.dumps(result), flush=True)
    exit_without_cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1b", choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warm", type=int, default=6)
    parser.add_argument("--strategy", default="zero3_compile", help="zero3 compiles nothing")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of ZeroStrategy, or tuning.NAME=VALUE"
    )
    parser.add_argument("--way", choices=WAYS, help="this way alone")
    arguments = parser.parse_args()
    if arguments.way:
        train(arguments)
        return
    found = {}
    for way in WAYS:
        command = [sys.executable, *sys.argv, "--way", way]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
        print(line, flush=True)
        found[way] = json.loads(line)["ms"]
    print(f"ms with Muon / ms with AdamW alone: {found['muon'] / found['adamw']:.3f}")


if __name__ == "__main__":
    main()
