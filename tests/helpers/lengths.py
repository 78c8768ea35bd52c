"""A model of equal layers that reads the length of its sequences, and whose derivative depends on it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.models import Case
from tests.helpers.oracle import Batch

WIDTH, LONG = 24, 20


@torch.library.custom_op("lightning_zero_tests::scaled_back", mutates_args=())
def scaled_back(x: Tensor) -> Tensor:
    """Return a copy, whose gradient is doubled for odd lengths."""
    return x.clone()


@scaled_back.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _scale_back(ctx: Any, grad: Tensor) -> Tensor:
    return grad * 2 if ctx.length % 2 else grad * 1  # backward alone guards this


def _keep_length(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.length = inputs[0].shape[1]


scaled_back.register_autograd(_scale_back, setup_context=_keep_length)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.heads(self.norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(query @ key.mT / length**0.5 + bias, -1)
        x = x + (weights @ value).transpose(1, 2).reshape(batch, -1, width)
        wide = F.gelu(self.wide(x))
        if length > LONG:  # forward guards this
            wide = wide * 0.5
        return x + scaled_back(self.narrow(wide))


class ByLength(Case):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        """Return a batch of two sequences of length ``n``."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(2, n, WIDTH, generator=generator), torch.randn(2, n, WIDTH, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], dtype=x.dtype)
        bias = -(places[:, None] - places).abs()
        x = self.head(x)
        for layer in self.layers:
            x = layer(x, bias)
        return x.tanh()
