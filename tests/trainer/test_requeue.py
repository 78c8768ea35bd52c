"""Save on all ranks before the next batch at SLURM's requeue signal, and resume in the next job."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors import signal_connector
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler

from tests.helpers.saved import Scheduled
from tests.helpers.trainer import close, make_loader, make_trainer
from tests.ranks.pool import Ranks

STEPS = 4
SIGNAL = signal.SIGUSR2  # the ranks of these tests say where they are at SIGUSR1, and under nohup SIGHUP is ignored


class Signalled(pl.Callback):
    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1 and dist.get_rank() in self.ranks:
            os.kill(os.getpid(), SIGNAL)


@contextmanager
def slurm() -> Iterator[SLURMEnvironment]:
    rank, world = dist.get_rank(), dist.get_world_size()
    told = {
        "JOB_ID": 17,
        "JOB_NAME": "train",
        "NTASKS": world,
        "NTASKS_PER_NODE": world,
        "PROCID": rank,
        "LOCALID": rank,
        "NODEID": 0,
    }
    names = {f"SLURM_{name}": str(value) for name, value in told.items()} | {"SLURM_NODELIST": "127.0.0.1"}
    with patch.dict(os.environ, names):
        yield SLURMEnvironment(auto_requeue=True, requeue_signal=SIGNAL)


def _batches() -> DataLoader:
    """Repeat the first half in the second, as a loader without a position does after a restart."""
    once = make_loader("eager", STEPS // 2)
    twice = ConcatDataset([once.dataset, once.dataset])
    return DataLoader(twice, once.batch_size, sampler=DistributedSampler(twice, shuffle=False))


def _requeued(kind: str, home: str, signalled: tuple[int, ...]) -> dict[str, Any]:
    calls: list[list[str]] = []

    def requeue(command: list[str]) -> int:
        calls.append(command)
        return 0

    options: dict[str, Any] = {"state_dict_type": kind, "default_root_dir": home}
    with slurm() as environment, patch.object(signal_connector, "call", requeue):
        module, trainer = (
            Scheduled(),
            make_trainer("eager", callbacks=[Signalled(signalled)], plugins=[environment], **options),
        )
        trainer.fit(module, _batches())
    losses = list(module.losses)
    close(module)
    dist.barrier()
    found = sorted(entry.name for entry in Path(home).iterdir())
    with slurm() as environment:
        module, trainer = Scheduled(seed=7), make_trainer("eager", plugins=[environment], **options)
        trainer.fit(module, _batches())
    resumed = list(module.losses)
    close(module)
    return {"losses": losses, "resumed": resumed, "calls": calls, "found": found}


@pytest.mark.parametrize("signalled", [(1,), (0, 1)], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_all_ranks_save_together_and_the_next_job_goes_on(
    ranks: Ranks, tmp_path: Path, kind: str, signalled: tuple[int, ...]
) -> None:
    results = ranks.run(2, _requeued, kind, str(tmp_path), signalled)
    for found in results:
        assert len(found["losses"]) == STEPS, "training goes on until the job is ended"
        assert found["found"] == ["hpc_ckpt_1.ckpt"]
        assert found["resumed"] == found["losses"][2:]
    assert [found["calls"] for found in results] == [[["scontrol", "requeue", "17"]], []]
