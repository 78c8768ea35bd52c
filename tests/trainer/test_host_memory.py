"""Measure host memory of checkpoints, without the page cache.

Rank 0 holds one copy of everything during a full save. During a load each rank holds its shards and about one weight.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lightning_zero import export_safetensors, load_safetensors
from lightning_zero.cli.main import main
from tests.helpers.elsewhere import mount
from tests.helpers.large import LAYERS, WEIGHT, Few, fit
from tests.helpers.resident import MIB, Held, holding
from tests.helpers.trainer import close
from tests.ranks.pool import Ranks

ALL = 3 * LAYERS * WEIGHT  # with Adam's state
MARGIN = 8 * MIB  # of the interpreter, and of blocks that are compared
ON_THE_WAY = 4 * WEIGHT + MARGIN  # gloo's threads hold the gathered values a moment longer


class Parallel(Few):
    def configure_model(self) -> None:
        super().configure_model()
        for layer in self.net:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def _held(do: Callable[..., Any], *args: Any, **options: Any) -> Held:
    with holding() as held:
        do(*args, **options)
    return held


def _loading(path: str) -> Held:
    with holding() as held:
        module, trainer = fit(path)
    [optimizer] = trainer.optimizers
    assert all(entries["exp_avg"].any() for entries in optimizer.state.values())
    close(module)
    return held


def _assert_loaded(held: Held, world_size: int, more: int = 0) -> None:
    # Shards are in memory that other ranks read.
    assert held.most <= (ALL + WEIGHT) // world_size + MARGIN + more, held
    assert held.kept >= ALL // world_size, f"{held}: is nothing loaded?"


# -- our own


def _both_kinds(home: str) -> dict[str, Held]:
    found = {}
    for kind in ("full", "sharded"):
        module, trainer = fit(state_dict_type=kind)
        found[f"save {kind}"] = _held(trainer.save_checkpoint, f"{home}/{kind}.ckpt")
        if kind == "full":
            mount(home)
            found["save elsewhere"] = _held(trainer.save_checkpoint, "mounted://elsewhere.ckpt")
        close(module)
        del module, trainer
        found[f"load {kind}"] = _loading(f"{home}/{kind}.ckpt")
    found["load elsewhere"] = _loading("mounted://elsewhere.ckpt")
    return found


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.exhaustive), 2, pytest.param(3, marks=pytest.mark.exhaustive)]
)
def test_ranks_hold_what_is_promised(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    for rank, found in enumerate(ranks.run(world_size, _both_kinds, str(tmp_path), deadline=240)):
        for kind in ("full", "elsewhere"):
            assert found[f"save {kind}"].most <= (ALL if rank == 0 else 0) + ON_THE_WAY, found
        assert found["save sharded"].most <= MARGIN, found
        _assert_loaded(found["load full"], world_size)
        _assert_loaded(found["load sharded"], world_size)
        _assert_loaded(found["load elsewhere"], world_size, 16 * MIB)  # of the download


class SavesTwice(Callback):
    """The second save begins when the first one is being written."""

    def __init__(self, home: str) -> None:
        self.home, self.held = home, Held()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        with holding() as self.held:
            for number in range(2):
                trainer.save_checkpoint(f"{self.home}/{number}.ckpt")


def _beside_training(home: str) -> dict[str, Held]:
    found = {}
    for kind in ("full", "sharded"):
        saves = SavesTwice(f"{home}/{kind}")
        module, _ = fit(state_dict_type=kind, async_save=True, callbacks=[saves])
        found[kind] = saves.held
        close(module)
    return found


@pytest.mark.exhaustive  # see test_ranks_hold_what_is_promised
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow)])
def test_saves_beside_training_hold_one_copy(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    for rank, found in enumerate(ranks.run(world_size, _beside_training, str(tmp_path), deadline=240)):
        assert found["full"].most <= (ALL if rank == 0 else 0) + ON_THE_WAY, found
        assert found["sharded"].shared <= ALL // world_size + MARGIN, found
        assert found["sharded"].own <= MARGIN, found


class Moments(Callback):
    """Records addresses after loading and after a step."""

    def __init__(self) -> None:
        self.places: list[list[int]] = []

    def _note(self, trainer: Any, *args: Any) -> None:
        [optimizer] = trainer.optimizers
        self.places.append([v.data_ptr() for e in optimizer.state.values() for v in e.values() if v.numel() > 1])

    on_train_start = on_train_end = _note


def _stepped_on(path: str) -> list[list[int]]:
    module, trainer = fit(state_dict_type="sharded")
    trainer.save_checkpoint(path)
    close(module)
    moments = Moments()
    module, trainer = fit(path, steps=2, callbacks=[moments])
    close(module)
    return moments.places


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_loaded_stays_where_it_was_put(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    for before, after in ranks.run(world_size, _stepped_on, str(tmp_path / "x.ckpt"), deadline=240):
        assert len(before) == 2 * LAYERS
        assert before == after


# -- from elsewhere, and into other files


def _write(home: str) -> None:
    """By two ranks: both of our kinds, and FSDP2's."""
    for kind in ("full", "sharded"):
        module, trainer = fit(state_dict_type=kind)
        trainer.save_checkpoint(f"{home}/{kind}.ckpt")
        if kind == "sharded":
            held = _held(export_safetensors, module.net, f"{home}/files", max_shard_size=2 * WEIGHT)
            assert held.most <= 2 * WEIGHT + ON_THE_WAY, held
            held = _held(load_safetensors, module.net, f"{home}/files")
            assert held.most <= WEIGHT // 2 + MARGIN, held
        close(module)
        del module, trainer
    _, trainer = fit(module=Parallel(), strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))
    trainer.save_checkpoint(f"{home}/fsdp2.ckpt")
    if dist.get_rank() == 0:
        found = torch.load(f"{home}/full.ckpt", weights_only=True)
        torch.save(found, f"{home}/ddp.ckpt")  # as Lightning's own file is written


def _from_elsewhere(home: str) -> dict[str, Held]:
    close(fit()[0])  # imports on the way do not count
    return {name: _loading(f"{home}/{name}.ckpt") for name in ("full", "sharded", "ddp", "fsdp2")}


def _by_commands(home: str) -> dict[str, Held]:
    path, out = f"{home}/sharded.ckpt", f"{home}/out"
    export = ["export", path, "--output", out, "--max-shard-size", f"{WEIGHT}B"]
    commands = {"verify": ["verify", path], "consolidate": ["consolidate", path], "export": export}
    return {name: _held(main, ["checkpoint", *words]) for name, words in commands.items()}


@pytest.mark.exhaustive
def test_other_numbers_of_ranks_other_formats_and_commands(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, _write, str(tmp_path), deadline=240)
    for found in ranks.run(3, _from_elsewhere, str(tmp_path), deadline=240):
        for held in found.values():
            _assert_loaded(held, 3)
    [found] = ranks.run(1, _by_commands, str(tmp_path), deadline=240)
    assert found["verify"].most <= MARGIN, found
    assert found["consolidate"].most <= ALL + MARGIN, found
    assert found["export"].most <= 3 * WEIGHT + MARGIN, found
