"""What replays add to a step, on paper: it depends on where the loss is computed."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.memory_planner.inputs import CAPTURE_GAP_SHARE
from lightning_zero.planning.estimate_training import Training, plan
from lightning_zero.planning.fake_step import StepEstimate

WIDTH, SAMPLES = 64, 1024
BYTES = SAMPLES * WIDTH * 4  # of what comes in, of each layer's result, and of the last one's gradient


class Chain(nn.Module):
    def __init__(self, with_loss: bool) -> None:
        super().__init__()
        self.layers, self.with_loss = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))), with_loss

    def forward(self, x: Tensor) -> Tensor:
        found = self.layers(x)
        return found.square().mean() if self.with_loss else found


def step(with_loss: bool, **options: Any) -> tuple[StepEstimate, int]:
    """Of a chain, and what a steady step takes besides what stays."""
    with torch.device("meta"):
        module, x = Chain(with_loss), torch.empty(SAMPLES, WIDTH)

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch) if with_loss else module(batch).square().mean()

    options = {"compile_backend": "aot_eager", "precision": "32-true"} | options
    found = plan(module, x, training=Training(loss=loss), **options)
    assert found.passes.compiled is not None
    assert found.transient is not None
    return found.passes.compiled, found.transient


def test_a_loss_outside_lies_beside_the_graphs_memory() -> None:
    (inside, replayed), (outside, _) = step(True), step(False)
    assert inside.outside == BYTES + 2 * 4, "a copy of what comes in, and of the loss and its gradient"
    assert replayed == int(inside.peak * (1 + CAPTURE_GAP_SHARE) + inside.outside)
    # Copies of what comes in, what goes out and its gradient; and the square, its gradient and the result's, of which
    # the graphs could have used a part.
    assert 3 * BYTES + 1 * BYTES <= outside.outside <= 3 * BYTES + 3 * BYTES


def test_without_graphs_nothing_is_added() -> None:
    found, run = step(False, cuda_graphs=False)
    assert run == found.peak
