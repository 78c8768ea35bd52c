"""What `lightning_zero.plan` estimates beside what is measured, on one GPU: memory at the peak and seconds of a step.

    python examples/benchmarks/plan_check.py [MODEL ...] [--memory GIB] [--option NAME=VALUE] [--limit [MODEL=]S]

Prints a row of a table, and a JSON line on stderr, for each model as soon as it has been trained. Each has a process of
its own: what an earlier one has left would be in the numbers. A process that reaches its limit is ended, and what it
had measured by then counts. All plans are made beside the trainings, by processes that see no GPU.

"peak" is what tensors held at most in steady steps, and for graphs all memory that is theirs; "reserved" what torch had
taken of the device, the first, eager step among the rest; "device" that and all that others had taken. With `--memory`
the plan on paper is one of what would be chosen; what was chosen in training stands in the JSON line, as "chosen", and
what the device had taken at most by the end of each of the first steps, or since peaks were last counted anew, as
"first_steps".
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from compare.timing import Clock, bytes_of_graphs
from lightning_zero import Tuning, ZeroStrategy
from lightning_zero.cli.models import Decoder
from lightning_zero.planning.estimate_training import plan

GIB = 2**30
TUNING = "tuning."


def decoder(width: int, layers: int, hidden: int) -> nn.Module:
    return Decoder(width, layers, width // 128, hidden)


def t5(width: int, layers: int, hidden: int) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=width, d_ff=hidden, num_layers=layers, num_heads=width // 64, d_kv=64, vocab_size=32128,
            dropout_rate=0.0, feed_forward_proj="gated-gelu", use_cache=False, decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def timm_model(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=1000)


def convolutional(name: str) -> nn.Module:
    return timm_model(name).to(memory_format=torch.channels_last)


def of_tokens(net: nn.Module, batch: Any) -> Tensor:
    return net(*batch)


def of_text(net: nn.Module, batch: Any) -> Tensor:
    return net(input_ids=batch[0], labels=batch[1]).loss


def of_images(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]).float(), batch[1])


@dataclass
class Row:
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: int
    length: int = 0  # tokens; of images 0


SMALL = {
    "decoder_1.36b": Row(lambda: decoder(2048, 24, 5632), of_tokens, 2, 2048),
    "vit_large": Row(lambda: timm_model("vit_large_patch16_224"), of_images, 64),
    "t5_base": Row(lambda: t5(768, 12, 2048), of_text, 16, 512),
    "convnext_base": Row(lambda: convolutional("convnext_base"), of_images, 64),
}
LARGE = {
    "decoder_3b": Row(lambda: decoder(2560, 36, 6912), of_tokens, 1, 2048),
    "decoder_6.7b": Row(lambda: decoder(4096, 32, 11008), of_tokens, 1, 2048),
    "vit_huge": Row(lambda: timm_model("vit_huge_patch14_224"), of_images, 64),
    "t5_large": Row(lambda: t5(1024, 24, 2816), of_text, 16, 512),
    "convnext_large": Row(lambda: convolutional("convnext_large"), of_images, 64),
}
ROWS = SMALL | LARGE


class Module(L.LightningModule):
    def __init__(self, row: Row, net: nn.Module) -> None:
        super().__init__()
        self.row, self.net = row, net

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.row.loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, weight_decay=0.1, fused=True)


def without_values(row: Row) -> nn.Module:
    try:
        with torch.device("meta"):
            return row.make()
    except (NotImplementedError, RuntimeError):  # a constructor that looks at values
        return row.make()


def batch_of(name: str, device: str) -> tuple[Tensor, Tensor]:
    row = ROWS[name]
    if row.length:
        tokens = torch.randint(32000, (row.batch, row.length), device=device)
        return tokens, tokens
    images = torch.randn(row.batch, 3, 224, 224, device=device)
    images = images.contiguous(memory_format=torch.channels_last) if "conv" in name else images
    return images, torch.randint(1000, (row.batch,), device=device)


class Same(Dataset):
    """One batch, on the device already."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> Any:
        return self.batch


class Meter(Clock):
    """Tells what has been measured so far, every few steps."""

    EVERY = 4

    def __init__(self, warm: int) -> None:
        super().__init__(warm)
        self.reserved_ever = self.others = 0
        self.first_steps: list[float] = []  # GiB
        self.started = time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        torch.cuda.empty_cache()  # what was needed to draw values is not asked for
        torch.cuda.reset_peak_memory_stats()
        super().on_train_start(trainer, module)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *rest: Any) -> None:
        free, total = torch.cuda.mem_get_info()
        self.others = max(self.others, total - free - torch.cuda.memory_reserved())
        self.reserved_ever = max(self.reserved_ever, torch.cuda.max_memory_reserved())
        if len(self.first_steps) < self.warm:
            self.first_steps.append(round((torch.cuda.max_memory_reserved() + self.others) / GIB, 2))
        super().on_train_batch_end(trainer, module, outputs, *rest)
        steps = len(self.marks)
        if steps <= 4 or steps == self.warm:
            print(f"  step {steps} ended after {time.perf_counter() - self.started:.1f} s", file=sys.stderr, flush=True)
        if steps > self.warm + 2 and (steps - self.warm) % self.EVERY == 0:
            self.tell(trainer)

    def tell(self, trainer: L.Trainer) -> None:
        peers = getattr(trainer.strategy, "peer_bytes", 0)
        found = {
            "ms": statistics.median(self.milliseconds()),
            "peak": torch.cuda.max_memory_allocated() + bytes_of_graphs() + peers,
            "reserved_steady": torch.cuda.max_memory_reserved() + peers,
            "reserved": self.reserved_ever + peers,
            "device": self.reserved_ever + self.others,
            "others": self.others,
            "first_steps": self.first_steps,
            "steps": len(self.marks),
            "seconds": round(time.perf_counter() - self.started, 1),
        }
        if trainer.strategy.memory_plan is not None:
            found["chosen"] = trainer.strategy.memory_plan.as_dict()
        print(json.dumps(found), flush=True)


def device_name() -> str:
    """As the table of devices has it."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    words = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    return next(word for word in words if word in ("H200", "H100", "A100", "B200", "L40S", "L4"))


def estimate(name: str) -> None:
    begun, row = time.perf_counter(), ROWS[name]
    found = plan(Module(row, without_values(row)), batch_of(name, "cpu"), device=ARGS.device, **options()).as_dict()
    print(json.dumps(found | {"planned_s": round(time.perf_counter() - begun, 1)}), flush=True)


def train(name: str) -> None:
    meter = Meter(ARGS.warm)
    trainer = L.Trainer(
        strategy=ZeroStrategy(**options()),
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=ARGS.warm + ARGS.steps,
        gradient_clip_val=1.0,
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with torch.device("cuda"):  # where drawing values takes no time
        net = ROWS[name].make()
    trainer.fit(Module(ROWS[name], net), DataLoader(Same(batch_of(name, "cuda")), batch_size=None))


def options() -> dict[str, Any]:
    given = {name: json.loads(value) for name, _, value in (one.partition("=") for one in ARGS.option)}
    tuning = {name.removeprefix(TUNING): value for name, value in given.items() if name.startswith(TUNING)}
    found = {name: value for name, value in given.items() if not name.startswith(TUNING)}
    found |= {"tuning": Tuning(**tuning)} if tuning else {}
    return found | ({"memory": ARGS.memory} if ARGS.memory else {})


# -- the process that starts the others


class Process:
    """This script on one model; in a session of its own, which is ended as a whole."""

    def __init__(self, what: str, name: str, folder: Path, **env: str) -> None:
        self.name, self.out, self.err = name, folder / f"{what}-{name}.json", folder / f"{what}-{name}.txt"
        command = [sys.executable, __file__, name, f"--{what}", f"--device={ARGS.device}", f"--steps={ARGS.steps}"]
        command += [f"--warm={ARGS.warm}", *(f"--option={one}" for one in ARGS.option)]
        command += [f"--memory={ARGS.memory}"] if ARGS.memory else []
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=err, env=os.environ | env, start_new_session=True
            )

    def result(self, limit: float) -> tuple[dict[str, Any] | None, str]:
        """The last thing that it said of numbers, and how it ended."""
        begun, how = time.perf_counter(), ""
        try:
            if code := self.process.wait(limit):
                how = f"ended with {code}"
        except subprocess.TimeoutExpired:
            how = f"was ended after {time.perf_counter() - begun:.0f} s"
        self.end()
        said = [line for line in self.out.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
        if how:
            last = "\n".join(self.err.read_text().splitlines()[-12:])
            print(f"{self.name}: {self.err.stem} {how}:\n{last}", file=sys.stderr, flush=True)
        return (json.loads(said[-1]) if said else None), how

    def end(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # compilers among them
        except ProcessLookupError:
            return
        self.process.wait()


def beside(ours: float | None, real: float | None, unit: float, digits: int = 2) -> str:
    shown = ["-" if value is None else f"{value / unit:.{digits}f}" for value in (ours, real)]
    return " / ".join(shown) + (f" ({ours / real - 1:+.1%})" if ours and real else "")


def row_of(name: str, ours: dict[str, Any], real: dict[str, Any]) -> str:
    first = ours.get("first_step_peak") or 0
    seconds = ours.get("seconds") or {}
    cells = [
        name,
        beside(ours.get("peak"), real.get("peak"), GIB),
        beside(max(ours["peak"], first) if ours else None, real.get("reserved"), GIB),
        beside(ours.get("on_device"), real.get("device"), GIB),
        beside(seconds.get("total"), real["ms"] / 1e3 if real else None, 1e-3, 1),
        f"{ours.get('planned_s', '-')} / {real.get('seconds', '-')} ({real.get('steps', 0)} steps)",
        ours.get("not_traced", ""),
    ]
    return f"| {' | '.join(cells)} |"


def limits() -> dict[str, float]:
    given = dict.fromkeys(ROWS, 150.0)
    for one in ARGS.limit:
        name, _, seconds = one.rpartition("=")
        given |= {name: float(seconds)} if name else dict.fromkeys(ROWS, float(seconds))
    return given


def main() -> None:
    ARGS.device = ARGS.device or device_name()
    names, allowed = ARGS.models or list(SMALL), limits()
    print(f"one {ARGS.device}, torch {torch.__version__}, {' '.join(ARGS.option) or 'no options'}", file=sys.stderr)
    print("| model | peak GiB, estimated / measured | reserved GiB | device GiB | ms per step | s | not traced |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        plans = {name: Process("plan", name, folder, **hidden) for name in names}
        try:
            for name in names:
                training = Process("train", name, folder)
                try:
                    real, _ = training.result(allowed[name])
                finally:
                    training.end()
                ours, _ = plans[name].result(allowed[name])
                print(row_of(name, ours or {}, real or {}), flush=True)
                print(json.dumps({"model": name, "estimated": ours, "measured": real}), file=sys.stderr, flush=True)
        finally:
            for process in plans.values():
                process.end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(ROWS)}; by default {', '.join(SMALL)}")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of ZeroStrategy, or tuning.NAME=VALUE, in JSON",
    )
    parser.add_argument("--limit", action="append", default=[], metavar="[MODEL=]S", help="seconds for each model: 150")
    parser.add_argument("--memory", type=float, metavar="GIB", help="that is to suffice")
    parser.add_argument("--warm", type=int, help="steps that are not measured: 8, or 18 with --memory")
    parser.add_argument("--steps", type=int, default=12, help="steps that are")
    parser.add_argument("--device", default="", help="as lightning_zero.plan has it; by default what there is")
    parser.add_argument("--plan", action="store_true", help="of one model, in this process")
    parser.add_argument("--train", action="store_true", help="likewise")
    ARGS = parser.parse_args()
    ARGS.warm = ARGS.warm or (18 if ARGS.memory else 8)
    if unknown := set(ARGS.models) - set(ROWS):
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(ROWS)}")
    if ARGS.plan:
        estimate(ARGS.models[0])
    elif ARGS.train:
        train(ARGS.models[0])
    else:
        main()
