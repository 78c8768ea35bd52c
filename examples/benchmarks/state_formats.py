"""Loss of a small language model by the format of AdamW's state, on a CPU; prints one JSON line per format.

    python examples/benchmarks/state_formats.py --steps 800

The model has three layers of width 96 and reads bytes of this repository's own Python files and pages. All formats
train from the same weights on the same batches, but for `other batches`, which shows the noise. `8bit` is
`state_dtype="8bit"`. `8bit nearest` has the same codes without stochastic rounding. `dynamic nearest` has the dynamic
maps of Dettmers et al. (2021) for blocks of 256, as in torchao and bitsandbytes.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.optim.quantized_state import NONNEGATIVE, SIGNED, dequantize, quantize

WIDTH, LAYERS, LENGTH, BATCH = 96, 3, 96, 12
RATE, BETAS, EPS, DECAY = 2e-3, (0.9, 0.999), 1e-8, 0.1
MIN_NUMEL, BLOCK = 4096, 256
ROOT = Path(__file__).resolve().parents[2]

Round = Callable[[Tensor, torch.dtype], Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.bytes(x) + self.places.weight)))


def dynamic_map(signed: bool) -> Tensor:
    """Return 256 shares: in each decade twice as many as in the one below it."""
    shares = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1)
        values = (10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        shares += values + [-value for value in values if signed]
    return torch.tensor(sorted(shares))


MAPS = {SIGNED: dynamic_map(True), NONNEGATIVE: dynamic_map(False)}


def ours(stochastic: bool) -> Round:
    def rounded(blocks: Tensor, dtype: torch.dtype) -> Tensor:
        noise = torch.randint(1 << 16, (len(blocks), 1), dtype=torch.int32) if stochastic else None
        return dequantize(*quantize(blocks, dtype, noise))

    return rounded


def dynamic(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    shares, largest = MAPS[dtype], blocks.abs().amax(1, keepdim=True)
    middles = (shares[1:] + shares[:-1]) / 2
    return shares[torch.bucketize(torch.where(largest > 0, blocks / largest, 0.0), middles)] * largest


FORMATS: dict[str, Round | None] = {
    "float32": None,
    "float32, other batches": None,
    "8bit": ours(True),
    "8bit nearest": ours(False),
    "dynamic nearest": dynamic,
}


def read_text() -> Tensor:
    files = sorted([*ROOT.glob("lightning_zero/**/*.py"), *ROOT.glob("examples/docs/**/*.md")])
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def batch(text: Tensor, size: int, rng: torch.Generator) -> Tensor:
    begins = torch.randint(len(text) - LENGTH - 1, (size,), generator=rng)
    return torch.stack([text[begin : begin + LENGTH + 1] for begin in begins.tolist()])


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, held_out: Tensor) -> float:
    """Return the mean loss of 20 batches of text, which are the same for each model."""
    rng = torch.Generator().manual_seed(1)
    return sum(loss_of(model, batch(held_out, 32, rng)).item() for _ in range(20)) / 20


def train(name: str, steps: int, text: Tensor, held_out: Tensor) -> dict[str, object]:
    rounded, begin = FORMATS[name], time.perf_counter()
    torch.manual_seed(1)
    model = Model()
    rng = torch.Generator().manual_seed(8 if "other" in name else 7)
    state = [(torch.zeros_like(param), torch.zeros_like(param)) for param in model.parameters()]
    losses = []
    for step in range(1, steps + 1):
        loss = loss_of(model, batch(text, BATCH, rng))
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = RATE * min(1, step / 50) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        with torch.no_grad():
            for param, (first, second) in zip(model.parameters(), state, strict=True):
                first.lerp_(param.grad, 1 - BETAS[0])
                second.lerp_(param.grad.square(), 1 - BETAS[1])
                size, root = rate / (1 - BETAS[0] ** step), math.sqrt(1 - BETAS[1] ** step)
                param.mul_(1 - rate * DECAY).sub_(size * first / (second.sqrt() / root + EPS))
                param.grad = None
                if rounded is not None and param.numel() >= MIN_NUMEL:
                    for moment, dtype in ((first, SIGNED), (second, NONNEGATIVE)):
                        moment.copy_(rounded(moment.view(-1, BLOCK), dtype).view(moment.shape))
    validation = held_out_loss(model, held_out)
    return {
        "format": name,
        "steps": steps,
        "held_out_loss": round(validation, 4),
        "last_100_losses": round(sum(losses[-100:]) / 100, 4),
        "seconds": round(time.perf_counter() - begin),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--formats", default="/".join(FORMATS), help="names, separated by slashes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = read_text()
    for name in arguments.formats.split("/"):
        print(json.dumps(train(name, arguments.steps, text[:-200_000], text[-200_000:])), flush=True)


if __name__ == "__main__":
    main()
