"""Ranks may evaluate other numbers of batches, as under DDP: all of them, and each once."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import INPUTS, OUTPUTS, RTOL, Regression, close, make_loader, make_trainer, whole_state
from tests.ranks.pool import Ranks


def uneven_loader() -> DataLoader:
    """Loader with five batches on rank 0, two fewer on each other rank, and a smaller last one."""
    rank = dist.get_rank()
    rng = torch.Generator().manual_seed(11 + rank)
    count = 4 * (5 - 2 * rank) - rank
    return DataLoader(
        TensorDataset(torch.randn(count, INPUTS, generator=rng), torch.randn(count, OUTPUTS, generator=rng)), 4
    )


class Evaluated(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.batches: list[int] = []

    def validation_step(self, batch: Any, index: int) -> None:
        loss = self.loss(batch)
        self.batches.append(index)
        self.mean.update(loss, len(batch[0]))
        self.log("mean", self.mean)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)

    test_step = validation_step


def _evaluated(kind: str) -> dict[str, Any]:
    module = Evaluated()
    trainer = make_trainer(kind, max_epochs=3)
    trainer.fit(module, make_loader(kind), uneven_loader())
    out = {"fitted": dict(trainer.callback_metrics)}
    out["tested"] = trainer.test(module, uneven_loader(), verbose=False)[0]
    out["batches"] = module.batches
    out["values"] = whole_state(module)
    close(module)
    return out


def _both(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return _evaluated("ddp"), _evaluated(kind)


@pytest.mark.parametrize(("world_size", "kind"), [(2, "compiled"), (2, "eager"), (3, "eager")])
def test_evaluations_with_other_numbers_of_batches_equal_ddps(ranks: Ranks, world_size: int, kind: str) -> None:
    for rank, (ddp, ours) in enumerate(ranks.run(world_size, _both, kind, deadline=120)):
        assert ours["batches"] == ddp["batches"] == [*range(5 - 2 * rank)] * 4
        for what in ("fitted", "tested", "values"):
            assert_close_relative(ours[what], ddp[what], 3 * RTOL, what=f"{what} on rank {rank}")


class OneLooks(Regression):
    """Read weights on rank 0 alone, while other ranks have no reason to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def look(self) -> None:
        if self.global_rank == 0:
            self.seen.append(float(self.net[0].weight.abs().sum()))

    on_fit_start = on_train_epoch_start = on_validation_end = on_train_end = look

    def on_train_batch_end(self, *unused: Any) -> None:
        self.look()


def _looked(kind: str) -> tuple[list[float], dict[str, Any]]:
    module = OneLooks()
    make_trainer(kind, max_epochs=2).fit(module, make_loader(kind), make_loader(kind, 1, seed=1))
    out = module.seen, whole_state(module)
    close(module)
    return out


def _both_looked(kind: str) -> tuple[Any, Any]:
    return _looked("ddp"), _looked(kind)


@pytest.mark.parametrize("kind", ["compiled", "eager"])
def test_one_rank_may_look_at_weights_in_any_hook(ranks: Ranks, kind: str) -> None:
    for rank, (ddp, ours) in enumerate(ranks.run(2, _both_looked, kind, deadline=120)):
        assert len(ddp[0]) == 14 * (rank == 0)
        assert_close_relative(ours, ddp, 3 * RTOL, what=f"rank {rank}")
