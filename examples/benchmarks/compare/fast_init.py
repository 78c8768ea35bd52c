"""Random initial weights within a second. torch draws random numbers on one core, 1.5 billion in 20 s."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["quick_draws"]

DRAWN = 1 << 20  # random numbers, which then repeat
METHODS = ("normal_", "uniform_")


@contextmanager
def quick_draws() -> Iterator[None]:
    """Inside, let ``normal_`` and ``uniform_`` of large CPU tensors draw a million numbers and repeat them.

    Such weights are good enough to measure times, and equal on all ranks that have the same seed.
    """
    before = {name: getattr(Tensor, name) for name in METHODS}
    try:
        for name, method in before.items():
            setattr(Tensor, name, _repeating(method))
        yield
    finally:
        for name, method in before.items():
            setattr(Tensor, name, method)


def _repeating(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def drawn(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        plain = type(self) in (Tensor, torch.nn.Parameter) and self.device.type == "cpu" and self.is_contiguous()
        if not plain or self.numel() <= DRAWN:
            return draw(self, *args, **kwargs)
        with torch.no_grad():
            flat = self.view(-1)
            block = draw(flat[:DRAWN], *args, **kwargs)
            for part in flat[DRAWN:].split(DRAWN):
                part.copy_(block[: part.numel()])
        return self

    return drawn
