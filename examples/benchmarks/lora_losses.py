"""Losses of LoRA by the format of the frozen weights; prints one JSON line per format.

    python examples/benchmarks/lora_losses.py --steps 200

A small Llama first learns bytes of this repository's Python files, as plain torch. Adapters of rank 16 then learn its
pages. All formats train on the same batches from the same adapters, but for `dequantized, other batches`, which shows
the noise. `dequantized` has the values of `nf4` as bfloat16 weights, and `bfloat16` those before quantization. Formats
that end in `, fp8` multiply frozen weights in fp8.
"""

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero import Tuning
from lightning_zero.integrations.trainer.strategy import ZeroStrategy
from lightning_zero.sharding.weight_format import WeightFormat
from state_formats import ROOT

FORMATS = ("nf4", "int8", "nf4, fp8", "int8, fp8", "dequantized", "dequantized, other batches", "bfloat16")
HELD_OUT = 1 << 16  # bytes of each text
EVALUATED = 20  # batches


def read_bytes(*patterns: str) -> Tensor:
    files = sorted(file for pattern in patterns for file in ROOT.glob(pattern))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


class Batches(IterableDataset):
    """Batches [batch, length] of random places of a text."""

    def __init__(self, text: Tensor, shape: tuple[int, int], seed: int) -> None:
        self.text, self.shape, self.seed = text, shape, seed

    def __iter__(self) -> Iterator[Tensor]:
        rng, (batch, length) = torch.Generator().manual_seed(self.seed), self.shape
        while True:
            begins = torch.randint(len(self.text) - length, (batch, 1), generator=rng)
            yield self.text[begins + torch.arange(length)]


def next_byte_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return model(input_ids=rows, labels=rows, use_cache=False).loss


def base_model(width: int, layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=width // 64, **shape))


def pretrain(model: nn.Module, batches: Batches, steps: int, device: torch.device) -> float:
    """Train all weights in place with bfloat16 autocast, and return the last loss."""
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for step, rows in zip(range(1, steps + 1), batches, strict=False):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1, step / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        with torch.autocast(device.type, torch.bfloat16):
            loss = next_byte_loss(model, rows.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


class Adapted(L.LightningModule):
    def __init__(self, base: nn.Module, form: str) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__()
        base = copy.deepcopy(base).bfloat16().requires_grad_(False)
        if form.startswith("dequantized"):
            for name, linear in base.named_modules():
                if isinstance(linear, nn.Linear) and name != "lm_head":
                    packing = WeightFormat("nf4", linear.weight.shape, linear.weight.dtype)
                    linear.weight.data = packing.decode(packing.encode(linear.weight))
        torch.manual_seed(1)
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        self.net = get_peft_model(base, lora)
        self.losses: list[Tensor] = []

    def training_step(self, rows: Tensor, index: int) -> Tensor:
        loss = next_byte_loss(self.net, rows)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, rows: Tensor, index: int) -> Tensor:
        return next_byte_loss(self.net, rows)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=5e-4, fused=self.device.type == "cuda")


class HeldOut(L.Callback):
    """Keep the losses of validation."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs))


def finetune(base: nn.Module, form: str, text: Tensor, args: argparse.Namespace) -> tuple[dict[str, Any], list[float]]:
    begin, shape, held_out = time.perf_counter(), (args.batch, args.length), HeldOut()
    stored, _, products = form.partition(", ")
    options: dict[str, Any] = {"frozen_dtype": stored} if stored in ("nf4", "int8") else {}
    if products == "fp8":  # also of matrices whose casts would take longer
        options |= {"linear_dtype": "fp8", "tuning": Tuning(fp8_min_gain=0, fp8_exclude=("*lora_*",))}
    module = Adapted(base, form)
    trainer = L.Trainer(
        strategy=ZeroStrategy(compile_backend=args.backend, **options),
        precision="bf16-mixed",
        devices=1,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        max_steps=args.steps,
        val_check_interval=args.steps,
        limit_val_batches=EVALUATED,
        num_sanity_val_steps=0,
        callbacks=[held_out],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trained = Batches(text[:-HELD_OUT], shape, 8 if "other" in form else 7)
    unseen = Batches(text[-HELD_OUT:], shape, 9)
    trainer.fit(module, DataLoader(trained, batch_size=None), DataLoader(unseen, batch_size=None))
    losses = torch.stack(module.losses).tolist()
    result = {
        "frozen": form,
        "steps": len(losses),
        "first_loss": round(losses[0], 5),
        "mean_of_last_50": round(statistics.fmean(losses[-50:]), 5),
        "held_out_loss": round(statistics.fmean(held_out.losses[-EVALUATED:]), 5),
        "seconds": round(time.perf_counter() - begin, 1),
    }
    return result, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pretrain", type=int, default=600)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--formats", default="/".join(FORMATS), help="names, separated by slashes")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = base_model(args.width, args.layers)
    code = read_bytes("lightning_zero/**/*.py", "tests/**/*.py")
    begin = time.perf_counter()
    last = pretrain(base, Batches(code, (args.batch, args.length), 1), args.pretrain, device)
    print(json.dumps({"pretrained_to": round(last, 4), "seconds": round(time.perf_counter() - begin, 1)}), flush=True)
    text = read_bytes("examples/**/*.md")
    found: dict[str, list[float]] = {}
    for form in args.formats.split("/"):
        result, found[form] = finetune(base, form, text, args)
        if form != "nf4" and "nf4" in found:
            apart = [abs(a - b) for a, b in zip(found["nf4"], found[form], strict=True)]
            result["mean_distance_from_nf4"] = round(statistics.fmean(apart), 5)
        print(json.dumps(result | {"torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
