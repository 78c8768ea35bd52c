"""Save the values at the call with ``async_save=True``, and raise errors later."""

import gc
import os
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_zero import CheckpointError, ZeroStrategy
from lightning_zero.checkpoint.async_save.writer_process import WriterProcess
from lightning_zero.integrations.checkpoint_files import BackgroundFileIO, FileIO
from tests.helpers.callbacks import SavesAfter
from tests.helpers.noted_saves import NotedSaves
from tests.helpers.oracle import assert_close_relative
from tests.helpers.saved import MODULES, resume, uninterrupted_fit
from tests.helpers.trainer import RTOL, Regression, close, make_loader, make_trainer, whole_state
from tests.helpers.writers import forked_writers
from tests.ranks.pool import Ranks

KINDS = ["sharded", "full"]


def _slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is written before two more steps have been made."""
    for cls, name in ((WriterProcess, "write"), (BackgroundFileIO, "_save")):
        real = getattr(cls, name)

        def slow(self: Any, *args: Any, real: Any = real, **kwargs: Any) -> Any:
            time.sleep(0.5)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, slow)


def _train(kind: str, name: str, path: str, plugin: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"plugins": [AsyncCheckpointIO()]} if plugin else {"async_save": True}
    with pytest.MonkeyPatch.context() as monkeypatch, forked_writers() if plugin else nullcontext():
        _slowly(monkeypatch)
        module = MODULES[name]()
        trainer = make_trainer("eager", state_dict_type=kind, max_epochs=2, callbacks=[SavesAfter(4, path)], **options)
        trainer.fit(module, make_loader("eager"))
        there = os.path.exists(path)
    state = whole_state(module)
    close(module)
    return {"there": there, "state": state, "left": sorted(p.name for p in Path(path).parent.iterdir())}


@pytest.mark.parametrize(
    ("kind", "plugin"),
    [
        *((kind, False) for kind in KINDS),
        pytest.param("full", True, marks=pytest.mark.slow),
        pytest.param("sharded", True, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.exhaustive_variants("full-True")
def test_training_goes_on_as_from_the_moment_of_the_save(ranks: Ranks, tmp_path: Path, kind: str, plugin: bool) -> None:
    path = str(tmp_path / "x.ckpt")
    name = "Scheduled"
    wanted = ranks.run(1, uninterrupted_fit, name)[0]
    for found in ranks.run(2, _train, kind, name, path, plugin):
        assert found["there"]
        assert found["left"] == ["x.ckpt"]
        assert_close_relative(found["state"], wanted[1], 5 * RTOL)
    for world_size in (1, 2):
        for resumed in ranks.run(world_size, resume, "eager", name, [path]):
            assert_close_relative(resumed[path][0], wanted[0], RTOL)
            assert_close_relative(resumed[path][1], wanted[1], 5 * RTOL)


class _Collected(pl.Callback):
    """Record the batches before a full garbage collection, and those in which it could run during a save."""

    def __init__(self, path: str) -> None:
        self.path, self.batch, self.all_looked_at, self.may_in_save = path, 0, [], [gc.isenabled()]

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.batch += 1

    def look(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            self.all_looked_at.append(self.batch)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.batch == 11:
            trainer.save_checkpoint(self.path)
            self.may_in_save.append(gc.isenabled())

    def on_save_checkpoint(self, *args: Any) -> None:
        self.may_in_save.append(gc.isenabled())


def _collects(kind: str, path: str, beside: bool) -> tuple[bool, list[bool]]:
    callback, module = _Collected(path), Regression()
    trainer = make_trainer("eager", state_dict_type=kind, async_save=beside, max_epochs=6, callbacks=[callback])
    gc.callbacks.append(callback.look)
    try:
        trainer.fit(module, make_loader("eager"))
    finally:
        gc.callbacks.remove(callback.look)
    close(module)
    assert callback.batch > 11
    return 11 in callback.all_looked_at, callback.may_in_save


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.exhaustive_variants("sharded")
def test_python_looks_for_garbage_when_the_start_is_over_and_not_in_a_save(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """Collect all objects, which takes longer than the save."""
    assert ranks.run(1, _collects, kind, str(tmp_path / "x.ckpt"), True) == [(True, [True, False, True])]
    assert ranks.run(1, _collects, kind, str(tmp_path / "y.ckpt"), False) == [(False, [True, True, True])]


@forked_writers()
def _fails(kind: str, home: str, again: bool) -> dict[str, Any]:
    """The first save cannot be written: the second one says so, or the end of fit."""
    os.makedirs(f"{home}/gone", exist_ok=True)
    seen: list[str] = []

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(f"{home}/x.ckpt")
            elif trainer.global_step == 3 and again:
                try:
                    trainer.save_checkpoint(f"{home}/y.ckpt")
                except CheckpointError as error:
                    seen.append(str(error))
                trainer.save_checkpoint(f"{home}/z.ckpt")

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as monkeypatch:
        rank = torch.distributed.get_rank()
        if kind == "sharded" and rank == 1:
            real = WriterProcess.write
            monkeypatch.setattr(
                WriterProcess, "write", lambda self, order, *a: full() if "x.ckpt" in order.path else real(self, order)
            )
        if kind == "full":
            save = BackgroundFileIO._save
            monkeypatch.setattr(
                BackgroundFileIO,
                "_save",
                lambda self, value, path, *a: full() if "x.ckpt" in str(path) else save(self, value, path, *a),
            )
        module = MODULES["Scheduled"]()
        trainer = make_trainer("eager", state_dict_type=kind, async_save=True, callbacks=[Saves()])
        end = ""
        try:
            trainer.fit(module, make_loader("eager"))
        except CheckpointError as error:
            end = str(error)
    close(module)
    return {"seen": seen, "end": end, "left": sorted(p.name for p in Path(home).iterdir())}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_errors_show_on_every_rank_at_the_next_save_or_the_end(
    ranks: Ranks, tmp_path: Path, kind: str, again: bool
) -> None:
    for found in ranks.run(2, _fails, kind, str(tmp_path), again):
        said = found["seen"][0] if again else found["end"]
        assert "No space left on device" in said
        assert ("rank 1" if kind == "sharded" else "rank 0") in said
        assert found["end"] == "" or not again
        assert found["left"] == (["gone", "z.ckpt"] if again else ["gone"])


@forked_writers()
def _kept(kind: str, home: str) -> list[str]:
    module = MODULES["Scheduled"]()
    keeps = ModelCheckpoint(
        home, "{step}", monitor="step", mode="max", save_top_k=2, every_n_train_steps=1, save_last="link"
    )
    trainer = make_trainer("eager", state_dict_type=kind, async_save=True, callbacks=[keeps], enable_checkpointing=True)
    trainer.fit(module, make_loader("eager"))
    close(module)
    return sorted(p.name for p in Path(home).iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.exhaustive_variants("sharded")
def test_model_checkpoint_keeps_what_it_is_told_to(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    for found in ranks.run(2, _kept, kind, str(tmp_path)):
        assert found == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    assert (tmp_path / "last.ckpt").resolve() == tmp_path / "step=4.ckpt"


def _goes_on(home: str) -> int:
    """Kill a save, so that Lightning's link refers to an unfinished checkpoint."""
    if torch.distributed.get_rank() == 0:
        Path(home, "last.ckpt").unlink()
        Path(home, "last.ckpt").symlink_to("step=9.ckpt")
    torch.distributed.barrier()
    module = MODULES["Scheduled"]()
    keeps = ModelCheckpoint(home, "{step}", save_last="link")
    trainer = make_trainer("eager", callbacks=[keeps], enable_checkpointing=True, max_epochs=2)
    begun: list[int] = []
    module.on_train_start = lambda: begun.append(trainer.global_step)  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, make_loader("eager"), ckpt_path="last")
    wanted = "was not saved to its end. Going on from"
    assert torch.distributed.get_rank() or any(wanted in str(warning.message) for warning in said)
    close(module)
    return begun[0]


def test_a_link_that_leads_nowhere_is_no_new_beginning(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, _kept, "sharded", str(tmp_path))
    assert ranks.run(2, _goes_on, str(tmp_path)) == [4, 4]


@forked_writers()
def _named_alike(kind: str, home: str) -> dict[str, Any]:
    """Give the second of two best checkpoints of one name a number before the first is written.

    Then save after the training, synchronously.
    """
    module = MODULES["Scheduled"]()
    keeps = ModelCheckpoint(home, "best", monitor="step", mode="max", save_top_k=2, every_n_train_steps=1)
    known: list[int] = []
    module.on_train_batch_start = lambda *_: known.append(len(keeps.best_k_models))  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as monkeypatch:
        _slowly(monkeypatch)
        trainer = make_trainer(
            "eager", state_dict_type=kind, async_save=True, callbacks=[keeps], enable_checkpointing=True
        )
        trainer.fit(module, make_loader("eager"))
        found = sorted(p.name for p in Path(home).iterdir())
        torch.distributed.barrier()  # or another rank finds the next checkpoint
        trainer.save_checkpoint(f"{home}/after")
        there = os.path.exists(f"{home}/after")
    state = whole_state(module)
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(2.0)
    trainer.validate(module, make_loader("eager", 0), ckpt_path=f"{home}/after", verbose=False)
    loaded = whole_state(module)
    close(module)
    same = all(torch.equal(value, loaded[key]) for key, value in state.items() if key != "calls")
    steps = {
        torch.load(f"{path}/meta.pt" if kind == "sharded" else path)["global_step"] for path in keeps.best_k_models
    }
    return {"found": found, "there": there, "same": same, "steps": steps, "known": known}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.exhaustive_variants("full")
def test_names_of_saves_that_go_on_are_taken_and_nothing_goes_on_after_training(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    for found in ranks.run(2, _named_alike, kind, str(tmp_path)):
        assert found["found"] == ["best-v1.ckpt", "best.ckpt"]
        assert found["steps"] == {3, 4}
        assert found["known"] == [0, 1, 2, 2], "two of one name"
        assert found["there"], "it was saved, and is not there"
        assert found["same"]


WITH: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "state on the host": {"offload": ("optimizer",), "offload_buffer_mb": 0.0001},
    "two hosts": {"ranks_per_host": 1},
    "two replicas": {"ranks_per_host": 1, "replicate_over": "hosts"},
    "two hosts, whole copies": {"ranks_per_host": 1, "compute_shard_group": "all"},
}


@forked_writers()
def _with_options(home: str) -> dict[str, int]:
    found = {}
    for name, options in WITH.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            _slowly(monkeypatch)
            saves, module = NotedSaves(f"{home}/{name}", (2, 4)), Regression()
            options = options | {"state_dict_type": "sharded", "async_save": True}
            make_trainer("captured", callbacks=[saves], **options).fit(module, make_loader("eager", 6))
        found[name] = saves.compare(sharded=True)
        close(module)
    return found


@pytest.mark.exhaustive  # the first test here does so for one way to shard
def test_it_is_what_was_there_whatever_is_sharded_how(ranks: Ranks, tmp_path: Path) -> None:
    compared, _ = ranks.run(2, _with_options, str(tmp_path), deadline=120)
    assert compared == dict.fromkeys(WITH, 2 * 6 * 2)


class Mine(TorchCheckpointIO):
    """Slow CheckpointIO of a user that records its writes."""

    def __init__(self) -> None:
        self.wrote: list[str] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        time.sleep(0.3)
        super().save_checkpoint(checkpoint, path)
        self.wrote.append(Path(path).name)


def _save_by_mine(home: str) -> dict[str, Any]:
    mine, there = Mine(), []

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(f"{home}/x.ckpt")
                there.append(os.path.exists(f"{home}/x.ckpt"))

    module = MODULES["Scheduled"]()
    trainer = make_trainer("eager", plugins=[AsyncCheckpointIO(mine)], callbacks=[Saves()])
    trainer.fit(module, make_loader("eager"))
    trainer.save_checkpoint(f"{home}/y.ckpt")
    there.append(os.path.exists(f"{home}/y.ckpt"))
    read = torch.load(f"{home}/y.ckpt")["state_dict"]
    state = whole_state(module)
    close(module)
    return {"there": there, "wrote": mine.wrote, "read": read, "state": state}


def test_what_users_put_inside_of_the_plugin_writes_beside_training(ranks: Ranks, tmp_path: Path) -> None:
    """It was left out without a word. Outside of a training the file is there when the call returns."""
    (found,) = ranks.run(1, _save_by_mine, str(tmp_path))
    assert found["there"] == [False, True]
    assert found["wrote"] == ["x.ckpt", "y.ckpt"]
    assert_close_relative(found["read"], found["state"], 0)


def test_a_plugin_around_another_one_writes_by_ours() -> None:
    outer = AsyncCheckpointIO(AsyncCheckpointIO())
    strategy = ZeroStrategy(checkpoint_io=outer)
    assert strategy.checkpoint_io is outer
    assert isinstance(outer.checkpoint_io, AsyncCheckpointIO)
    ours = outer.checkpoint_io.checkpoint_io
    assert type(ours) is FileIO
    assert strategy.checkpoint_io is outer
    assert outer.checkpoint_io.checkpoint_io is ours


def test_the_plugin_is_not_forgotten_once_the_checkpoint_io_was_asked_for() -> None:
    """Sharded checkpoints were then written while training waited."""
    strategy = ZeroStrategy(checkpoint_io=AsyncCheckpointIO(), state_dict_type="sharded")
    assert isinstance(strategy.checkpoint_io, BackgroundFileIO)
    assert strategy.saves_async
    assert not ZeroStrategy().saves_async
