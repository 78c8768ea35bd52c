"""Models of commands: a Llama-like decoder in several sizes, or ``script.py:Module``."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_zero.cli.model_sizes import SIZES

VOCABULARY = 32000
LONGEST = 8192


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:]).to(x.dtype) * self.weight.to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, key_heads: int) -> None:
        super().__init__()
        self.head_width, self.grouped = width // heads, key_heads != heads
        self.norms = nn.ModuleList([Norm(width), Norm(width)])
        narrow = self.head_width * key_heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, outputs, bias=False) for outputs in (width, narrow, narrow, width)
        )
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.norms[0](x)
        q, k, v = (
            project(normed).view(batch, length, -1, self.head_width).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Decoder(nn.Module):
    """Return the mean cross entropy (0-dim, float32) of tokens and targets, each int64 of (batch, length)."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        hidden: int,
        key_heads: int | None = None,
        vocabulary: int | None = None,
    ) -> None:
        super().__init__()
        self.angles = width // heads // 2
        self.embedding = nn.Embedding(vocabulary or VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden, key_heads or heads) for _ in range(layers))
        self.norm = Norm(width)
        self.head = nn.Linear(width, vocabulary or VOCABULARY, bias=False)
        self.register_buffer("cos", torch.empty(LONGEST, self.angles), persistent=False)
        self.register_buffer("sin", torch.empty(LONGEST, self.angles), persistent=False)
        if not self.cos.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        rates = 1e4 ** (-torch.arange(self.angles, dtype=torch.float32) / self.angles)
        table = torch.outer(torch.arange(LONGEST, dtype=torch.float32), rates)
        self.cos.copy_(table.cos())
        self.sin.copy_(table.sin())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Tokens(Dataset):
    """Random samples, int64 of ``length`` + 1, that are equal on all ranks and in all runs."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(VOCABULARY, (self.length + 1,), generator=torch.Generator().manual_seed(index))


class DecoderModule(pl.LightningModule):
    """Train a decoder of ``SIZES`` on random tokens, from weights that depend on the seed alone."""

    def __init__(self, size: str, batch: int, length: int) -> None:
        super().__init__()
        self.batch, self.length = batch, length
        self.net = Decoder(*SIZES[size])

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.net(batch[:, :-1], batch[:, 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.1, fused=self.device.type == "cuda")

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Tokens(self.length), self.batch)


def model_class(name: str) -> type[pl.LightningModule]:
    """Return the class that ``script.py:Module`` names.

    Raises:
        ValueError: there is no such file or class, or it is no LightningModule.
    """
    path, _, wanted = name.rpartition(":")
    file = Path(path)
    if not path or not file.is_file():
        raise ValueError(f"{name!r} is none of {', '.join(SIZES)}, nor a file and a class, as in model.py:Module.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    importlib.import_module("lightning_zero.api")  # the file may name a strategy, and expects it to be registered
    spec.loader.exec_module(module)
    found = getattr(module, wanted, None)
    if not (isinstance(found, type) and issubclass(found, pl.LightningModule)):
        raise ValueError(f"{file} has no LightningModule called {wanted!r}.")
    return found
