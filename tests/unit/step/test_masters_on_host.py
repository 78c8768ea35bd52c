"""Test offloaded master shards: all runners agree bitwise, and write the compute shards."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_zero.offload.pinned_memory import HostMemory
from lightning_zero.offload.staging_ring import StagingRing
from lightning_zero.optim.flat_runs import StateOnHost
from lightning_zero.optim.state_dtypes import Rounding
from lightning_zero.sharding.param_record import Role
from lightning_zero.step.runners import CapturedRunner
from lightning_zero.step.stepper import OptimizerStepper
from tests.helpers.one_rank import OneRank

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SHAPES = [(72, 61), (63, 65), (70, 90)]
STEPS, CLIP = 5, 0.4
MAKES: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-4),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),  # reads no state
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


class Training:
    def __init__(self, name: str, away: bool, capture: bool, narrow: bool) -> None:
        self.sharder: Any = OneRank(SHAPES)
        self.optimizer = MAKES[name](self.sharder.params)
        self.marked: set[int] = set()
        weights = self.sharder.executor.weights
        weights.mark_compute_shards_written, weights.valid_compute_shards = self.mark, lambda: sorted(self.marked)
        host = StateOnHost(HostMemory(CPU), StagingRing(CPU, 1 << 15)) if away else None
        if away:
            begin = self.sharder.live[0].shard
            copies = torch.full((sum(record.shard.numel() for record in self.sharder.live),), -1.0, dtype=BF16)
            for record in self.sharder.live:
                at = (record.shard.data_ptr() - begin.data_ptr()) // 4
                record.on_host = record.shard.detach()
                record.memory = {Role.COMPUTE_SHARD: copies[at : at + record.shard.numel()]}
        state_dtype = "bf16" if narrow else None
        self.stepper = OptimizerStepper(self.optimizer, self.sharder, capture, True, host, Rounding(state_dtype))

    def mark(self, indices: list[int], written: bool) -> None:
        self.marked = self.marked | {*indices} if written else self.marked - {*indices}

    def go(self, skip: float | None = None, without: tuple[int, ...] = ()) -> None:
        for step in range(STEPS):
            self.sharder.bring(step, without)
            self.stepper.clip_norm(CLIP, later=step % 2 == 1)
            self.stepper.begin(None if skip is None else torch.tensor(skip))
            self.optimizer.step()
            self.stepper.end()

    def kept(self) -> list[Any]:
        return [
            {"param": r.param.detach().clone(), **{k: v.clone() for k, v in self.optimizer.state[r.param].items()}}
            for r in self.sharder.live
        ]

    def copied(self) -> list[int]:
        found = [(r.index, torch.equal(r.memory[Role.COMPUTE_SHARD], r.shard.to(BF16))) for r in self.sharder.live]
        return [index for index, same in found if same]


@pytest.mark.parametrize(("name", "narrow"), [*((name, False) for name in MAKES), ("AdamW", True)])
@pytest.mark.parametrize("capture", [False, True], ids=["own", "captured"])
def test_all_ways_to_step_are_the_same_to_the_last_bit_and_write_copies(name: str, capture: bool, narrow: bool) -> None:
    here, away = (Training(name, away, capture, narrow) for away in (False, True))
    parts = []
    open_ = StagingRing.buffers
    with patch.object(
        StagingRing, "buffers", lambda ring, number, like: parts.append(number) or open_(ring, number, like)
    ):
        away.go(), here.go()
        torch.testing.assert_close(away.kept(), here.kept(), rtol=0, atol=0)
        away.go(without=(1,)), here.go(without=(1,))
    torch.testing.assert_close(away.kept(), here.kept(), rtol=0, atol=0)
    assert isinstance(away.stepper.runner, CapturedRunner) == (capture or narrow)
    alone = name == "SGD" and not capture  # it steps the flat parameters over the link
    assert alone or max(parts, default=0) > 4, "they passed in one piece"
    assert sorted(away.marked) == ([] if alone else [0, 1, 2]), "what was not stepped is what it was"
    assert set(away.marked) <= set(away.copied())
    for record in away.sharder.live:
        begin, end = record.layout.shard_range(0)
        assert not record.shard[end - begin :].any(), "padding"


def test_a_step_that_is_skipped_leaves_copies_that_are_right() -> None:
    training = Training("AdamW", True, True, False)
    training.go()
    before = training.kept()
    training.go(skip=1.0)
    torch.testing.assert_close(training.kept(), before, rtol=0, atol=0)
    assert training.copied() == [0, 1, 2]
    assert training.marked == {0, 1, 2}


def test_a_step_that_fails_leaves_copies_that_nobody_trusts() -> None:
    training = Training("AdamW", True, False, False)
    training.go()
    assert training.marked == {0, 1, 2}
    training.sharder.bring(9)
    training.stepper.begin()
    assert training.marked == set()
    with patch("torch.optim.adam.adam", side_effect=RuntimeError("no")), pytest.raises(RuntimeError, match="no"):
        training.optimizer.step()
    training.stepper.end()
    assert training.marked == set()
