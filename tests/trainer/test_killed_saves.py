"""Kill ranks by SIGKILL during a save, and resume bit for bit from the last or the new checkpoint.

tests/unit/checkpoint/sharded/test_commit.py tries every point of a save on copies of the folder. Here processes are
killed at the points that differ in the ranks' progress.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_zero.integrations.checkpoint_files import read_folder
from tests.helpers.marks import how_seldom
from tests.helpers.save_points import observed
from tests.helpers.saved import Scheduled
from tests.helpers.trainer import close, make_loader, make_trainer
from tests.helpers.writers import forked_writers
from tests.ranks.pool import RankFailure, Ranks

STEPS, EPOCHS = 4, 3
NEW = {False: "last-v1.ckpt", True: "last.ckpt"}

# Point, on which rank; "*" is the name of the checkpoint.
SHARDED = [
    ("after begin", 0),
    ("after write __1_0.distcp", 1),
    ("before fsync __0_0.distcp", 0),
    ("after create meta.pt", 0),
    ("after finish .metadata", 0),
    ("after fsync manifest.json", 0),
    ("after unlink .save_id", 0),
    ("before remove *.incomplete", 0),
    ("after commit", 0),
]
FULL = [
    ("after make folders", 0),
    ("after write *.incomplete", 0),
    ("before fsync *.incomplete", 0),
    ("before remove *.incomplete", 0),
]
BESIDE = [  # training, with a process that writes
    ("before copy", 1),
    ("after copy", 0),
    ("after order of rank 1", 1),
    ("before order of rank 0", 0),
    ("after order of rank 0", 0),
    ("after finish .metadata", 0),
    ("after fsync manifest.json", 0),
    ("after sync home", 0),
    ("before remove *.incomplete", 0),
    ("before parting", 0),
]
OPTIONS = {
    "sharded": {"state_dict_type": "sharded"},
    "full": {"state_dict_type": "full"},
    "beside": {"state_dict_type": "sharded", "async_save": True},
}
QUICK = [
    ("beside", "after order of rank 1"),
    ("sharded", "after write __1_0.distcp"),
    ("sharded", "after fsync manifest.json"),
    ("full", FULL[2][0]),
]
EXHAUSTIVE = [
    ("sharded", "before fsync __0_0.distcp"),
    ("sharded", "after create meta.pt"),
    ("sharded", "after unlink .save_id"),
    ("sharded", "before remove *.incomplete"),
    ("sharded", "after commit"),
    ("full", "after write *.incomplete"),
    ("beside", "after copy"),
    ("beside", "after order of rank 0"),
    ("beside", "after finish .metadata"),
    ("beside", "after fsync manifest.json"),
    ("beside", "before remove *.incomplete"),
    ("beside", "before parting"),
    ("beside", "before copy"),
    ("beside", "before order of rank 0"),
    ("beside", "after sync home"),
    ("sharded", "after begin"),
    ("sharded", "after finish .metadata"),
    ("full", "after make folders"),
]
WAYS = [(True, False), (False, True), (True, True), (False, False)]  # over another; everywhere
CASES = [
    (kind, point, rank, *((True, number % 2 == 0) if point.startswith("before remove") else WAYS[number % 4]))
    for kind, points in (("sharded", SHARDED), ("full", FULL), ("beside", BESIDE))
    for number, (point, rank) in enumerate(points)
]


class Noting(Scheduled):
    began = -1

    def on_train_start(self) -> None:
        self.began = self.trainer.global_step


def _fit(path: str | None, home: str, epochs: int, **options: Any) -> tuple[Any, Any]:
    module = Noting(seed=0 if path is None else 7)
    kept = ModelCheckpoint(home, save_last=True, every_n_epochs=99, save_on_train_epoch_end=False)
    kept.on_train_end = lambda *_: None  # type: ignore[method-assign] - it would save the last one
    trainer = make_trainer("eager", max_epochs=epochs, callbacks=[kept], enable_checkpointing=True, **options)
    trainer.fit(module, make_loader("eager", STEPS), ckpt_path=path)
    return module, trainer


@forked_writers()
def _prepare(kind: str, home: str) -> list[float]:
    module, _ = _fit(None, f"{home}/none", EPOCHS)
    losses = list(module.losses)
    close(module)
    module, trainer = _fit(None, home, 1, **OPTIONS[kind])
    trainer.save_checkpoint(f"{home}/last.ckpt")
    close(module)
    return losses


@forked_writers()
def _die(kind: str, home: str, name: str, point: str, victim: int, everywhere: bool) -> None:
    module, trainer = _fit("last", home, 2, **OPTIONS[kind])
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())

    def reach(reached: str) -> None:
        if reached == point and dist.get_rank() == victim:
            if everywhere:
                for pid in pids:
                    if pid != os.getpid():
                        os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.state.status = TrainerStatus.RUNNING  # no asynchronous save runs outside of training
    with observed(reach):
        trainer.save_checkpoint(f"{home}/{name}")
        trainer.strategy._finish_saving()
    raise AssertionError(f"{point} was never reached")


def _resume(home: str) -> tuple[int, list[float]]:
    module, _ = _fit("last", home, EPOCHS)
    found = module.began, list(module.losses)
    close(module)
    return found


def _step(path: Path) -> int:
    """Return a checkpoint that is fully readable."""
    content = read_folder(path, None) if path.is_dir() else torch.load(path, weights_only=True)
    return content["global_step"]


@pytest.fixture(scope="module")
def prepared(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Any]]]:
    """Return the folder with a checkpoint of this kind, and each rank's losses of the run without a kill."""
    made: dict[str, tuple[Path, list[Any]]] = {}

    def of(kind: str) -> tuple[Path, list[Any]]:
        if kind not in made:
            home = tmp_path_factory.mktemp(kind)
            made[kind] = home, ranks.run(2, _prepare, kind, str(home))
        return made[kind]

    return of


@pytest.mark.parametrize(
    ("kind", "point", "rank", "over", "everywhere"),
    [
        pytest.param(
            *case,
            marks=how_seldom(case[:2], QUICK, EXHAUSTIVE),
            id=f"{case[0]}, {case[1]}, {'over another' if case[3] else 'new'}, {'all' if case[4] else f'rank {case[2]}'}",
        )
        for case in CASES
    ],
)
def test_training_goes_on_as_if_nobody_had_been_killed(
    ranks: Ranks, prepared: Any, tmp_path: Path, kind: str, point: str, rank: int, over: bool, everywhere: bool
) -> None:
    source, uninterrupted = prepared(kind)
    home, name = tmp_path / "home", NEW[over]
    shutil.copytree(source, home)
    with pytest.raises(RankFailure) as caught:
        ranks.run(2, _die, kind, str(home), name, point.replace("*", name), rank, everywhere, deadline=60)
    assert "was never reached" not in str(caught.value)
    there = {entry: _step(home / entry) for entry in {name, "last.ckpt"} if (home / entry).exists()}
    wanted = {"last.ckpt": (STEPS, 2 * STEPS)} if over else {"last.ckpt": (STEPS,), name: (2 * STEPS,)}
    assert all(step in wanted[entry] for entry, step in there.items())
    for expected, (began, losses) in zip(uninterrupted, ranks.run(2, _resume, str(home), deadline=60), strict=True):
        assert began == max(there.values())
        assert losses == expected[began:]
    left = {entry.name for entry in home.iterdir()} - {"last.ckpt", name}
    assert left <= {f"{name}.incomplete"}
