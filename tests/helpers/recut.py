"""A training whose compiled code is captured before all ranks know the order of reads of weights.

Afterwards hosts cut the exchange into other parts, and fewer.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lightning_zero.compile.cuda_graphs.manager import WARMUP_RUNS, GraphDispatcher
from tests.helpers.models import Case, _regression, build, make_batches
from tests.helpers.oracle import Reference, train_reference
from tests.helpers.sharded import engine_for, sgd, train_sharded

WIDTH, PAIRS, STEPS, SAMPLES = 24, 3, 4, 12
MICRO = WARMUP_RUNS + 3
BIG_MB = 4 * WIDTH * WIDTH / 2**20
ACROSS: dict[str, Any] = {"ranks_per_host": 1, "gather_group_mb": BIG_MB}


class BigAndSmall(Case):
    """Registered in turns, each of which is a part of its own.

    Read are the big ones first, and then all small ones together are one part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(
            nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH // 4, bias=False)])
            for _ in range(PAIRS)
        )

    @staticmethod
    def make_batch(seed: int, n: int) -> Any:
        return _regression(seed, n, WIDTH, WIDTH // 4)

    def forward(self, x: Tensor) -> Tensor:
        for big, _ in self.pairs:
            x = torch.tanh(big(x))
        return sum((small(x) for _, small in self.pairs), start=torch.zeros((), device=x.device))


def train_captured_at_once(device: str = "cpu", **options: Any) -> tuple[Reference, list[int], list[str], int]:
    """Return the trained weights, and by step the parts of its exchange and the reason to drop captures.

    Also return the number of replays of the last step.
    """
    model = build(BigAndSmall)
    parts: list[int] = []
    dropped: list[str] = []
    invalidate = GraphDispatcher.invalidate

    def note(call: GraphDispatcher, reason: str) -> None:
        dropped.append(f"in step {len(parts)}: {reason}")
        invalidate(call, reason)

    with (
        patch.object(GraphDispatcher, "invalidate", note),
        engine_for(model, device=device, **ACROSS | options) as engine,
    ):

        def count(model: nn.Module, index: int) -> None:
            if index and index % MICRO == 0:
                parts.append(engine.executor.counters()["exchanged_parts"])
                engine.executor.reset_counters()

        batches = [tuple(t.to(device) for t in batch) for batch in make_batches(BigAndSmall, STEPS * MICRO, SAMPLES)]
        out = train_sharded(engine, model, batches, sgd(model), accumulate=MICRO, before_batch=count)
        counters = engine.executor.counters()
        return out, [*parts, counters["exchanged_parts"]], dropped, counters.get("replayed_graphs", 0)


def expected(world_size: int) -> Reference:
    batches = make_batches(BigAndSmall, STEPS * MICRO, SAMPLES)
    return train_reference(build(BigAndSmall), batches, sgd, world=world_size, accumulate=MICRO)
