"""Steps of an optimizer that rounds state or weights, on one rank of several, with the same gradients in every run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_zero.offload.pinned_memory import HostMemory
from lightning_zero.offload.staging_ring import StagingRing
from lightning_zero.optim.flat_runs import StateOnHost
from lightning_zero.optim.quantized_state import SCALES
from lightning_zero.optim.state_dtypes import Rounding
from lightning_zero.sharding.layout import STATE_BLOCK
from lightning_zero.step.stepper import OptimizerStepper
from tests.helpers.lion import Lion
from tests.helpers.one_rank import OneRank

CPU = torch.device("cpu")
SHAPES = [(72, 61), (61,), (4096,), (63, 65), (70, 90)]  # the fourth has one element less than is needed
STEPS = 6
Make = Callable[[Any], torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "a user's own": lambda p: Lion(p, lr=0.01),
}


class Training:
    """One rank, whose gradients are equal in every training.

    round_weights: weights are bfloat16, and rounded stochastically
    """

    def __init__(
        self,
        make: Make,
        state_dtype: str | None = "bf16",
        on_host: bool = False,
        rank: int = 0,
        world: int = 1,
        round_weights: bool = False,
    ) -> None:
        dtype = torch.bfloat16 if round_weights else torch.float32
        blocks = state_dtype == "8bit"
        self.sharder: Any = OneRank(SHAPES, rank=rank, world_size=world, state_blocks=blocks, dtype=dtype)
        self.optimizer = make(self.sharder.params)
        self.host = StateOnHost(HostMemory(CPU), StagingRing(CPU, 1 << 15)) if on_host else None
        self.state_dtype, self.steps, self.round_weights = state_dtype, 0, round_weights
        self.capture(False)

    def capture(self, capture: bool) -> None:
        device: Any = (self.optimizer, self.sharder, capture, True)
        self.stepper = OptimizerStepper(*device, self.host, Rounding(self.state_dtype, self.round_weights))

    def go(
        self, steps: int = STEPS, skip: float | None = None, without: tuple[int, ...] = (), scale: float = 1.0
    ) -> Training:
        for _ in range(steps):
            self.steps += 1
            self.sharder.bring(self.steps, without)
            for record in self.sharder.live:
                record.gradient.mul_(scale)
            self.stepper.begin(None if skip is None else torch.tensor(skip))
            self.optimizer.step()
            self.stepper.end()
        return self

    def kept(self) -> list[dict[str, Any]]:
        """Return each parameter's values and optimizer state, without padding."""
        found = []
        for record in self.sharder.live:
            begin, end = record.layout.shard_range(self.sharder.rank)
            entries = {"param": record.param, **self.optimizer.state[record.param]}
            values = {key: value.detach() for key, value in entries.items() if isinstance(value, Tensor)}
            for key, value in values.items():
                size = -(-(end - begin) // STATE_BLOCK) if key.endswith(SCALES) else end - begin
                is_number = value.numel() == 1 and not key.endswith(SCALES)
                values[key] = float(value) if is_number else value.reshape(-1)[:size].clone()
            found.append(values)
        return found
