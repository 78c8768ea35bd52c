"""What `lightning_zero.plan` estimates beside what is measured, on one GPU: memory at the peak and seconds of a step of
five models. Prints a table, and one JSON line for each model.

    python examples/benchmarks/plan_check.py [MODEL ...]

Each model has a process of its own: what an earlier one has left would be in the numbers. The plan is made before the
GPU is touched. "peak" is what tensors held at most in steady steps, and for graphs all memory that is theirs;
"reserved" what torch had taken of the device, the first, eager step among the rest; "device" that and all that others
had taken.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_zero import ZeroStrategy
from lightning_zero.bench.clock import Clock
from lightning_zero.bench.decoder import Decoder
from lightning_zero.planning.plan import plan

STEPS, WARM = 24, 14


def decoder(width: int, layers: int, hidden: int) -> nn.Module:
    return Decoder(width, layers, width // 128, hidden)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=1024, d_ff=2816, num_layers=24, num_heads=16, d_kv=64, vocab_size=32128, dropout_rate=0.0,
            feed_forward_proj="gated-gelu", use_cache=False, decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def timm_model(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=1000)


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


ROWS = {
    "decoder_1.36b": Row(lambda: decoder(2048, 24, 5632), of_tokens, 2, 2048),
    "decoder_3b": Row(lambda: decoder(2560, 36, 6912), of_tokens, 1, 2048),
    "vit": Row(lambda: timm_model("vit_huge_patch14_224"), of_images, 64),
    "t5": Row(t5, of_text, 16, 512),
    "convnext": Row(lambda: timm_model("convnext_large").to(memory_format=torch.channels_last), of_images, 64),
}


class Module(L.LightningModule):
    def __init__(self, row: Row) -> None:
        super().__init__()
        self.row, self.net = row, row.make()

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.row.loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, weight_decay=0.1, fused=True)


class Data(Dataset):
    """Whole batches, each time the same."""

    def __init__(self, row: Row) -> None:
        self.row = row

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator, row = torch.Generator().manual_seed(index), self.row
        if row.length:
            tokens = torch.randint(32000, (row.batch, row.length), generator=generator)
            return tokens, tokens
        image = torch.randn(row.batch, 3, 224, 224, generator=generator)
        images = image.contiguous(memory_format=torch.channels_last) if "conv" in ARGS.models[0] else image
        return images, torch.randint(1000, (row.batch,), generator=generator)


class Memory(L.Callback):
    """Of the device, at the ends of batches; and the most that torch had reserved by then."""

    def __init__(self) -> None:
        self.reserved = self.others = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        free, total = torch.cuda.mem_get_info()
        self.others = max(self.others, total - free - torch.cuda.memory_reserved())
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())


def device_name() -> str:
    """As the table of devices has it."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    words = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    return next(word for word in words if word in ("H200", "H100", "A100", "B200", "L40S", "L4"))


def measure(name: str) -> None:
    row = ROWS[name]
    module, data, begun = Module(row), Data(row), time.perf_counter()
    estimated = plan(module, data[0], device=device_name(), **options()).as_dict()
    estimated["planned_s"] = round(time.perf_counter() - begun, 1)
    clock, memory = Clock(WARM), Memory()
    trainer = L.Trainer(
        strategy=ZeroStrategy(**options()),
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        callbacks=[memory, clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=None, num_workers=2))
    measured = {
        "ms": statistics.median(clock.milliseconds()),
        "peak": clock.peak * 2**30,
        "reserved_steady": clock.reserved * 2**30,
        "reserved": memory.reserved,
        "others": memory.others,
        "device": memory.reserved + memory.others,
    }
    print(json.dumps({"model": name, "torch": torch.__version__, "estimated": estimated, "measured": measured}))


def options() -> dict[str, Any]:
    return {name: json.loads(value) for name, _, value in (one.partition("=") for one in ARGS.option)}


def row_of(found: dict[str, Any]) -> list[str]:
    ours, real = found["estimated"], found["measured"]
    peaks = [(ours["peak"], real["peak"]), (max(ours["peak"], ours["first_step_peak"] or 0), real["reserved"])]
    peaks.append((ours["on_device"], real["device"]))
    shown = [f"{a / 2**30:.2f} / {b / 2**30:.2f} ({a / b - 1:+.1%})" for a, b in peaks]
    ms = ours["seconds"]["total"] * 1e3 if ours["seconds"] else float("nan")
    return [found["model"], *shown, f"{ms:.1f} / {real['ms']:.1f} ({ms / real['ms'] - 1:+.0%})", ours["not_traced"]]


def main() -> None:
    if ARGS.here:
        measure(ARGS.models[0])
        return
    rows = []
    for name in ARGS.models or ROWS:
        command = [sys.executable, __file__, name, "--here", *(f"--option={one}" for one in ARGS.option)]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=ARGS.limit, check=False)
        last = (ran.stdout.strip().splitlines() or [""])[-1]
        print(last or f"{name}: ended with {ran.returncode}", flush=True)
        if last.startswith("{"):
            rows.append(row_of(json.loads(last)))
    print("| model | peak GiB | reserved GiB | device GiB | ms per step | not traced |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[*ROWS, []], help="by default all")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of ZeroStrategy")
    parser.add_argument("--limit", type=float, default=300, metavar="S", help="seconds for each model")
    parser.add_argument("--here", action="store_true", help="one model, in this process")
    ARGS = parser.parse_args()
    main()
