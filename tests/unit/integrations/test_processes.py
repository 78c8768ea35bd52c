"""A process group that exists already, and is not the one that a Trainer or Fabric asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_zero.integrations.processes import check_rank, check_world_size

CPU = torch.device("cpu")


@contextmanager
def group(backend: str | None = "gloo") -> Iterator[None]:
    """Make a process group of this process only, as a user does."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trainer(strategy: Any = "zero3", **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False, barebones=True, **options
    )


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        (
            {"devices": 2},
            r"\(devices=2\) asks for a process group of 2 ranks.*one of 1 rank .*Use .*\(devices=1\) here",
        ),
        ({"devices": 1, "num_nodes": 3}, r"\(devices=1, num_nodes=3\) asks for a process group of 3 ranks"),
    ],
)
def test_another_size_is_refused_before_a_process_is_started(choices: dict[str, int], says: str) -> None:
    with group():
        asked = trainer(**choices)
        with pytest.raises(MisconfigurationException, match=f"Trainer{says}.*script of its own"):
            asked.fit(pl.LightningModule())
        assert asked.strategy.launcher is not None
        assert asked.strategy.launcher.procs == []
        fabric = Fabric(accelerator="cpu", strategy="zero3", **choices)
        with pytest.raises(MisconfigurationException, match=f"Fabric{says}.*script of its own"):
            fabric.launch()
        assert fabric.strategy.launcher is not None
        assert fabric.strategy.launcher.procs == []


def test_fewer_devices_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with group():
        monkeypatch.setattr(dist, "get_world_size", lambda: 4)
        check_world_size("Trainer", 2, 2)
        with pytest.raises(
            MisconfigurationException, match=r"asks for .* 2 ranks.*of 4 ranks.*Trainer\(devices=4\) here"
        ):
            check_world_size("Trainer", 2, 1)
        with pytest.raises(MisconfigurationException, match=r"Use Fabric\(devices=2, num_nodes=2\) here"):
            check_world_size("Fabric", 4, 2)


def test_another_number_of_this_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with group():
        check_rank("Trainer", 0)
        with pytest.raises(MisconfigurationException, match="rank 0 of its process group, but rank 1 for the Trainer"):
            check_rank("Trainer", 1)


def test_without_a_process_group_all_is_well() -> None:
    check_world_size("Trainer", 2, 1)
    check_rank("Trainer", 1)
