"""Use ``reshard_after_forward="auto"`` under a Trainer with a schedule that recompiles."""

from typing import Any
from unittest.mock import patch

import torch

from lightning_zero import PassSchedule
from lightning_zero.profiling.device_gauges import DeviceMemory, MemoryGauge
from tests.helpers.callbacks import MINIMAL, Count
from tests.helpers.trainer import fitted, make_strategy
from tests.ranks.pool import Ranks


class Roomy(MemoryGauge):
    """A device with room for everything."""

    reports_memory = True

    def start(self, anew: bool = False) -> None:
        pass

    def read(self) -> DeviceMemory:
        return DeviceMemory(2**30, 0, 0, 0, 0)


def train(schedule: Any) -> tuple[list[int], list[str]]:
    torch._dynamo.reset()
    counts = Count()
    strategy = make_strategy("compiled", reshard_after_forward="auto")
    gauge = patch("lightning_zero.compile.session.MemoryGauge", Roomy)
    # All weights of this model are small, and would stay anyway.
    with gauge, patch("lightning_zero.compile.context.SMALL_BYTES", 0):
        callbacks = [PassSchedule(schedule), counts]
        with fitted("compiled", steps=9, strategy=strategy, callbacks=callbacks) as (_, trainer):
            kept = sorted({gather.until for graph in trainer.strategy.plan().graphs for gather in graph.gathers})
            return [gathers for _, gathers in counts.batches], kept


def test_a_schedule_delays_the_budget_and_takes_nothing_from_it(ranks: Ranks) -> None:
    for gathers, kept in ranks.run(2, train, [(0, MINIMAL), (3, None)]):
        # Other passes from the fourth step on: three more are measured.
        assert gathers[4:7] == [gathers[4]] * 3
        assert gathers[7:] == [gathers[7]] * 2
        assert gathers[7] < gathers[6]
        assert "backward" in kept
