"""Loss of a small language model by the format of its weights, on a CPU; prints one JSON line per format.

    python examples/benchmarks/weight_formats.py --steps 800

The model, the text and the learning rates are those of `state_formats.py`. All formats train by Fabric's `zero3` from
the same weights on the same batches, but for `other batches`, which shows the noise. Weights begin as bfloat16 numbers,
so that all formats begin alike. `nearest` rounds bfloat16 weights to the nearest value, as torch's optimizers do.
"""

import argparse
import json
import math
import os
import time
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_zero import FabricZeroStrategy, Tuning
from state_formats import BATCH, BETAS, DECAY, EPS, RATE, Model, batch, held_out_loss, loss_of, read_text

STOCHASTIC = {"bf16_stochastic_round": True}
# Precision of the Trainer, dtype of the weights, options
FORMATS: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "float32": ("bf16-mixed", torch.float32, {}),
    "float32, other batches": ("bf16-mixed", torch.float32, {}),
    "float32, 8-bit state": ("bf16-mixed", torch.float32, {"state_dtype": "8bit"}),
    "bf16 nearest": ("bf16-true", torch.bfloat16, {}),
    "bf16 nearest, 8-bit state": ("bf16-true", torch.bfloat16, {"state_dtype": "8bit"}),
    "bf16 stochastic": ("bf16-true", torch.bfloat16, STOCHASTIC),
    "bf16 stochastic, 8-bit state": ("bf16-true", torch.bfloat16, STOCHASTIC | {"state_dtype": "8bit"}),
}


def train(name: str, arguments: argparse.Namespace, text: Tensor, held_out: Tensor) -> dict[str, object]:
    precision, dtype, tuning = FORMATS[name]
    steps, begin = arguments.steps, time.perf_counter()
    strategy = FabricZeroStrategy(compile=False, tuning=Tuning(**tuning))
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, precision=precision)
    fabric.launch()
    torch.manual_seed(1)
    plain = Model().to(torch.bfloat16).to(dtype)
    optimizer: Any = torch.optim.AdamW(plain.parameters(), RATE, BETAS, EPS, DECAY)
    model, optimizer = fabric.setup(plain, optimizer)
    rng = torch.Generator().manual_seed(8 if "other" in name else 7)
    losses = []
    for step in range(1, steps + 1):
        loss = loss_of(model, batch(text, BATCH, rng))
        fabric.backward(loss)
        losses.append(loss.item())
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        for group in optimizer.param_groups:
            group["lr"] = arguments.rate * min(1, step / 50) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimizer.step()
        optimizer.zero_grad()
    validation = held_out_loss(model, held_out)
    return {
        "format": name,
        "steps": steps,
        "rate": arguments.rate,
        "held_out_loss": round(validation, 4),
        "last_100_losses": round(sum(losses[-100:]) / len(losses[-100:]), 4),
        "seconds": round(time.perf_counter() - begin),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rate", type=float, default=RATE, help="largest learning rate")
    parser.add_argument("--formats", default="/".join(FORMATS), help="names, separated by slashes")
    arguments = parser.parse_args()
    os.environ.setdefault("MASTER_PORT", "29591")
    torch.set_num_threads(1)
    text = read_text()
    for name in arguments.formats.split("/"):
        print(json.dumps(train(name, arguments, text[:-200_000], text[-200_000:])), flush=True)


if __name__ == "__main__":
    main()
