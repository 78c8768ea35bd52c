"""An oracle for Muon (Newton-Schulz in the parameters' own dtype, without the strategy's code), and a model for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero import MatrixRule, register_matrix_rule
from lightning_zero.optim.matrix_rules import _muon

__all__ = ["ROWS", "Net", "WideMuon", "batch", "orthogonalize"]

ROWS = 12  # a batch, divisible by 1, 2 and 3


def orthogonalize(update: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return the Newton-Schulz result for one matrix."""
    a, b, c = coefficients
    x = update.T if update.shape[0] > update.shape[1] else update
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if update.shape[0] > update.shape[1] else x


class WideMuon(torch.optim.Muon):
    """``torch.optim.Muon`` without bfloat16, also for parameters of more dimensions, whose last ones form the columns."""

    def __init__(self, params: Any, **options: Any) -> None:
        params = list(params)
        flat = [torch.nn.Parameter(torch.zeros(1, 1)) for _ in params]
        super().__init__(flat, **options)
        self.param_groups[0]["params"] = params

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                average = state["momentum_buffer"].lerp_(param.grad, 1 - group["momentum"])
                update = param.grad.lerp(average, group["momentum"]) if group["nesterov"] else average
                settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
                matrices = update if update.ndim == 3 else update.reshape(1, update.shape[0], -1)
                done = torch.stack([orthogonalize(matrix, *settings) for matrix in matrices])
                rows, columns = matrices.shape[1:]
                factor = 0.2 * max(rows, columns) ** 0.5 if group["adjust_lr_fn"] else max(1, rows / columns) ** 0.5
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(done.reshape(param.shape), alpha=group["lr"] * factor)
        return loss


def _rule(group: Mapping[str, Any]) -> MatrixRule:
    settings = tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"], group["adjust_lr_fn"] or "original"
    return _muon(group["nesterov"], *settings, torch.float32)


register_matrix_rule(WideMuon, _rule)


class Net(nn.Module):
    """Matrices of several shapes, some alike.

    A convolution, a batch of experts, vectors, and an unused part.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(61, 70), nn.Linear(70, 33)
        self.alike = nn.ModuleList(nn.Linear(70, 70, bias=False) for _ in range(3))
        self.conv = nn.Conv2d(2, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.experts = nn.Parameter(torch.randn(3, 35, 70) / 8)
        self.unused = nn.Linear(7, 5)
        self.norm = nn.LayerNorm(70)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.alike:
            x = x + torch.tanh(layer(x))
        x = x + self.conv(x.view(-1, 2, 5, 7)).mean(1).repeat(1, 1, 2).view(-1, 70)
        x = torch.cat([x @ expert.T for expert in self.experts], 1)[:, :70]
        return self.last(self.norm(x))


def batch(step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(step)
    x, y = torch.randn(ROWS, 61, generator=rng), torch.randn(ROWS, 33, generator=rng)
    return x[rank::world], y[rank::world]
