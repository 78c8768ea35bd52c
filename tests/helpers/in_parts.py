"""Training steps that run several compiled graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.models import Case

__all__ = ["BrokenInTwo", "FrozenEncoder", "HoldsWeight", "OtherHeads", "Parts", "TiedParts", "WithTeacher"]

WIDTH = 32


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Parts(Case):
    """Modules that are called one after another, and code between them."""

    tied = False

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.encoder = layers()
        self.head = nn.Linear(WIDTH, 64, bias=False)
        if self.tied:
            self.head.weight = self.embedding.weight

    @staticmethod
    def make_batch(seed: int, n: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(64, (n, 8), generator=generator), torch.randint(64, (n, 8), generator=generator)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.float().flatten(0, 1), target.flatten())

    def loss(self, batch: Any, call: Any = None) -> Tensor:
        ids, target = batch
        return self.criterion(self.head(self.encode(self.embedding(ids) * 2)), target)

    def encode(self, x: Tensor) -> Tensor:
        return F.relu(self.encoder(x)) + x


class TiedParts(Parts):
    """One weight in two graphs."""

    tied = True


class FrozenEncoder(Parts):
    """The middle needs no gradients, and earlier modules get none."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder.requires_grad_(False)

    def encode(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().encode(x)


class WithTeacher(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = layers().requires_grad_(False)

    def encode(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        found = super().encode(x)
        return found + 0.1 * (found - wanted).square()


class HoldsWeight(Parts):
    """Eager code has a weight while the encoder is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def encode(self, x: Tensor) -> Tensor:
        gain = self.gain
        return gain * super().encode(x)


class OtherHeads(Parts):
    """Batches in turn have heads of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 64, bias=False)
        self.batches = 0

    def loss(self, batch: Any, call: Any = None) -> Tensor:
        ids, target = batch
        self.batches += 1
        head = self.head if self.batches // 2 % 2 else self.other
        return self.criterion(head(self.encode(self.embedding(ids))), target)


class BrokenInTwo(Parts):
    """One module, whose forward is two graphs."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.encoder(self.embedding(ids))
        torch._dynamo.graph_break()
        return self.head(x)

    def loss(self, batch: Any, call: Any = None) -> Tensor:
        return Case.loss(self, batch, call)
