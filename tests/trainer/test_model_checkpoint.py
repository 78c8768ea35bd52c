"""Use ``ModelCheckpoint`` in all its modes, and save when training is stopped."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_zero.checkpoint import rank_tasks
from lightning_zero.engine import engine_of
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.trainer import trainer_checkpoints
from tests.helpers.damage import flip
from tests.helpers.saved import Scheduled
from tests.helpers.trainer import close, make_loader, make_trainer, whole_state
from tests.helpers.writers import forked_writers
from tests.ranks.pool import RankFailure, Ranks

KINDS = {"full": {"state_dict_type": "full"}, "sharded": {"state_dict_type": "sharded"}}
KINDS |= {f"{kind}, async": options | {"async_save": True} for kind, options in KINDS.items()}
SLOW = [pytest.param(f"{kind}, async", marks=pytest.mark.slow) for kind in ("full", "sharded")]


# -- while it trains


@forked_writers()
def _kept(saved: str, home: str) -> dict[str, Any]:
    """Keep the best two of the checkpoints of all steps, and the last one; then damage the best one."""
    module = Scheduled()
    keeps = ModelCheckpoint(
        home, "{step}", monitor="step", mode="max", save_top_k=2, train_time_interval=timedelta(0), save_last=True
    )
    trainer = make_trainer("eager", callbacks=[keeps], enable_checkpointing=True, **KINDS[saved])
    trainer.fit(module, make_loader("eager"))
    state = whole_state(module)
    found = sorted(entry.name for entry in Path(home).iterdir())
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(2.0)
    trainer.validate(module, make_loader("eager"), ckpt_path="best", verbose=False)
    loaded = whole_state(module)
    same = all(torch.equal(value, loaded[key]) for key, value in state.items() if key != "calls")
    dist.barrier()
    if dist.get_rank() == 0:
        best = Path(keeps.best_model_path)
        flip(best / "__1_0.distcp" if best.is_dir() else best, 0.5)
    dist.barrier()
    with pytest.raises(CheckpointError) as damaged:
        trainer.validate(module, make_loader("eager"), ckpt_path="best", verbose=False)
    close(module)
    return {"found": found, "same": same, "damaged": str(damaged.value)}


@pytest.mark.parametrize("saved", ["full", "sharded", *SLOW])
def test_the_best_and_the_last_are_kept_and_a_damaged_best_is_named(ranks: Ranks, tmp_path: Path, saved: str) -> None:
    for found in ranks.run(2, _kept, saved, str(tmp_path)):
        assert found["found"] == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
        assert found["same"]
        assert "step=4.ckpt" in found["damaged"]
        assert "is damaged" in found["damaged"]


# -- when it is stopped


class Stopping(pl.Callback):
    """Raise an exception in the third step on these ranks."""

    def __init__(self, what: str, ranks: tuple[int, ...]) -> None:
        self.what, self.ranks = what, ranks

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and dist.get_rank() in self.ranks:
            if self.what == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                raise KeyboardInterrupt if self.what == "Ctrl-C" else ArithmeticError("the user's")


def _stopped(saved: str, home: str, what: str, ranks: tuple[int, ...], how: str) -> dict[str, Any]:
    saves: Any = ModelCheckpoint(home, "{step}", save_on_exception=True, save_last=how == "True" or how)
    if how == "OnExceptionCheckpoint":
        saves = OnExceptionCheckpoint(home, "failed")
    module = Scheduled()
    trainer = make_trainer("eager", callbacks=[Stopping(what, ranks), saves], enable_checkpointing=True, **KINDS[saved])
    begun, ended = time.monotonic(), ""
    try:
        trainer.fit(module, make_loader("eager"))
    except BaseException as error:
        ended = type(error).__name__
    return {"ended": ended, "s": time.monotonic() - begun, "module": module}


@forked_writers()
def _all_stopped(saved: str, home: str, what: str, ranks: tuple[int, ...], how: str) -> dict[str, Any]:
    found = _stopped(saved, home, what, ranks, how)
    module = found.pop("module")
    found["state"] = whole_state(module)
    close(module)
    dist.barrier()  # rank 0 has ended, too, and with it its background writer
    return found | {"found": sorted(entry.name for entry in Path(home).iterdir())}


ENDS = {"an error": "ArithmeticError", "Ctrl-C": "SystemExit", "SIGTERM": "SIGTERMException"}


@pytest.mark.parametrize(
    ("saved", "what", "ranks_", "how"),
    [
        ("full", "an error", (0, 1), "True"),
        ("sharded", "SIGTERM", (1,), "link"),
        ("sharded", "Ctrl-C", (0, 1), "OnExceptionCheckpoint"),
        pytest.param("sharded, async", "an error", (0, 1), "True", marks=pytest.mark.slow),
        pytest.param("full, async", "SIGTERM", (0, 1), "True", marks=pytest.mark.exhaustive),
    ],
)
def test_all_ranks_that_are_stopped_save(
    ranks: Ranks, tmp_path: Path, saved: str, what: str, ranks_: tuple[int, ...], how: str
) -> None:
    steps = 3 if what == "SIGTERM" else 2  # which is looked for before each batch
    for found in ranks.run(2, _all_stopped, saved, str(tmp_path), what, ranks_, how):
        assert found["ended"] == ENDS[what]
        names = ["failed.ckpt"] if how == "OnExceptionCheckpoint" else ["last.ckpt", f"step={steps}.ckpt"]
        assert found["found"] == names
        for name in names:
            state = Scheduled.load_from_checkpoint(tmp_path / name).state_dict()
            assert all(torch.equal(value, found["state"][key]) for key, value in state.items())


def _one_stopped(saved: str, home: str, what: str, rank: int, how: str) -> None:
    """The group of these ranks is of no use any more, so they end."""
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(rank_tasks, "ARRIVAL_TIMEOUT_S", 1.0)
        patch.setattr(trainer_checkpoints.log, "error", lambda text, *args: said.append(text % args))
        found = _stopped(saved, f"{home}/saved", what, (rank,), how)
    if (engine := engine_of(found["module"])) is not None:
        engine.watchdog.close()  # or its timer may end this rank while it waits for the other's file
    told = {"ended": found["ended"], "s": found["s"], "said": said}
    Path(home, f"{dist.get_rank()}.json").write_text(json.dumps(told))
    deadline = time.monotonic() + 40
    while len(list(Path(home).glob("*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    raise RuntimeError("has ended")


@pytest.mark.parametrize(
    ("saved", "rank", "how"),
    [("full", 1, "link"), pytest.param("sharded", 0, "OnExceptionCheckpoint", marks=pytest.mark.slow)],
)
@pytest.mark.exhaustive_variants("sharded-0-OnExceptionCheckpoint")
def test_a_rank_that_raises_alone_saves_nothing_and_nobody_waits(
    ranks: Ranks, tmp_path: Path, saved: str, rank: int, how: str
) -> None:
    with pytest.raises(RankFailure, match="has ended"):
        ranks.run(2, _one_stopped, saved, str(tmp_path), "an error", rank, how)
    found = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2)]
    assert found[rank]["ended"] == "ArithmeticError"
    assert found[1 - rank]["ended"] == "RankFailedError"
    for one in found:
        assert f"rank {1 - rank} did not raise one, too" in one["said"][0]
    assert max(one["s"] for one in found) < 40
    assert not (tmp_path / "saved").exists() or not list((tmp_path / "saved").iterdir())
