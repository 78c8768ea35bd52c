"""Save asynchronously the values at the call, even if code writes to them before the next step."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging

import lightning_zero
from lightning_zero.integrations.checkpoint_files import BackgroundFileIO, read_folder, to_trainer_keys
from tests.helpers.late_copies import Late, late_copies
from tests.helpers.noted_saves import NotedSaves
from tests.helpers.trainer import INPUTS, Regression, close, make_loader, make_trainer
from tests.helpers.writers import forked_writers
from tests.ranks.pool import Ranks

SAVED = 2  # after that step


def _shards(module: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(module.parameters()), 2.0)


def _clipped(module: Any) -> None:
    module.net[0].weight.data.clamp_(-1e-3, 1e-3)


def _assigned(module: Any) -> None:
    module.net[0].weight.data = torch.zeros_like(module.net[0].weight)


def _held_before(module: Any) -> None:
    with torch.no_grad():
        module.held.mul_(2.0)


def _whole(module: Any) -> None:
    with lightning_zero.full_parameters(module), torch.no_grad():
        for param in module.parameters():
            param.mul_(2.0)


def _loaded(module: Any) -> None:
    module.load_state_dict({key: 2 * value for key, value in module.state_dict().items()})


EDITS = [_shards, _clipped, _assigned, _held_before, _whole, _loaded]


class Edits(pl.Callback):
    """Edits the saved values; records if copies were still pending after the next backward."""

    def __init__(self, edit: Callable[[Any], None], late: Late) -> None:
        self.edit, self.late, self.waiting = edit, late, False

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        module.held = None

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == SAVED:
            self.edit(module)

    def on_after_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == SAVED:
            self.waiting = self.late.waiting


class Saves(NotedSaves):
    """Also holds a weight that was read before."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        module.held = module.net[2].weight
        super().on_train_batch_end(trainer, module, *args)


@forked_writers()
def _fit(home: str, edit: Callable[[Any], None], transport: str) -> tuple[int, bool]:
    with late_copies() as late:
        saves, edits, module = Saves(home, (SAVED,)), Edits(edit, late), Regression()
        options = {"state_dict_type": "sharded", "async_save": True, "gather_transport": transport}
        make_trainer("eager", callbacks=[saves, edits], **options).fit(module, make_loader("eager"))
        close(module)
    return saves.compare(sharded=True), edits.waiting


def _fit_with_each(home: str, transport: str) -> dict[str, tuple[int, bool]]:
    return {edit.__name__: _fit(f"{home}/{edit.__name__}", edit, transport) for edit in EDITS}


@pytest.mark.parametrize("transport", ["auto", "collective"])
@pytest.mark.exhaustive_variants("collective")
def test_what_is_written_behind_a_save_is_not_in_it(ranks: Ranks, tmp_path: Path, transport: str) -> None:
    found, _ = ranks.run(2, _fit_with_each, str(tmp_path), transport, deadline=120)
    assert found == {edit.__name__: (2 * 6, False) for edit in EDITS}


def _read(module: Any) -> None:
    module.held = module.net[0].weight


@pytest.mark.parametrize("transport", ["auto", "collective"])
def test_what_only_reads_does_not_wait_for_a_save(ranks: Ranks, tmp_path: Path, transport: str) -> None:
    assert ranks.run(2, _fit, str(tmp_path), _read, transport)[0] == (2 * 6, True)


class Averages(WeightAveraging):
    """Updates after each step and each epoch, and saves before the latter."""

    path = ""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return True

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        if trainer.global_step == SAVED:
            assert self._average_model is not None
            named = self._average_model.module.named_parameters()
            self.wanted = {name: param.detach().flatten().clone() for name, param in named}
            self.buffers = {name: buffer.clone() for name, buffer in self._average_model.module.named_buffers()}
            trainer.save_checkpoint(self.path)


@forked_writers()
def _averaged(path: str) -> list[str]:
    with late_copies():
        averages, module = Averages(), Regression()
        averages.path = path
        options = {"state_dict_type": "sharded", "async_save": True}
        make_trainer("eager", callbacks=[averages], max_epochs=2, **options).fit(module, make_loader("eager", SAVED))
        close(module)
    found = to_trainer_keys(read_folder(path, None))["state_dict"]
    assert len(averages.wanted) == 6
    saved = {name: found[name].full_tensor().flatten() for name in averages.wanted}
    return [name for name, value in averages.wanted.items() if not torch.equal(value[: len(saved[name])], saved[name])]


def test_averages_that_are_updated_at_the_end_of_the_epoch_are_saved_as_they_were(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(1, _averaged, str(tmp_path / "x.ckpt")) == [[]]


class Normed(Regression):
    """Has buffers, of which averages are made, too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(INPUTS), *self.net)


@forked_writers()
def _averaged_buffers(kind: str, path: str) -> list[str]:
    save = BackgroundFileIO._save

    def slow(*args: Any) -> None:
        time.sleep(0.5)
        save(*args)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(BackgroundFileIO, "_save", slow)
        averages, module = Averages(), Normed()
        averages.path = path
        options = {"state_dict_type": kind, "async_save": True}
        make_trainer("eager", callbacks=[averages], **options).fit(module, make_loader("eager"))
        close(module)
    found = to_trainer_keys(read_folder(path, None)) if kind == "sharded" else torch.load(path)
    assert len(averages.buffers) == 3
    saved = {name: found["state_dict"][name] for name in averages.buffers}
    saved = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in saved.items()}
    return [name for name, value in averages.buffers.items() if not torch.equal(value, saved[name])]


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_buffers_of_averages_are_saved_as_they_were(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    assert ranks.run(1, _averaged_buffers, kind, str(tmp_path / "x.ckpt")) == [[]]
