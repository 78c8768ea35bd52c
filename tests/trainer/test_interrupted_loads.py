"""Interrupt a load half way: every rank reports the module's state, and none saves it."""

from __future__ import annotations

import logging
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn

from lightning_zero import export_safetensors, load_safetensors
from lightning_zero.errors import CheckpointError
from tests.helpers.damage import cut
from tests.helpers.fabric import closing, make_fabric, network, set_up, train
from tests.helpers.trainer import Regression, close, make_loader, make_trainer, whole_state
from tests.ranks.pool import Ranks


class Noted(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _interrupts(module: nn.Module, *args: Any) -> None:
    raise KeyboardInterrupt


def _fails(optimizer: torch.optim.Optimizer, state: Any) -> None:
    raise OSError("the disk is gone")


class InMoments(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        optimizer.register_load_state_dict_pre_hook(_fails)
        return optimizer


def _fit(module: Any, path: str | None, *callbacks: Any) -> list[str]:
    """Return the messages and the end."""
    trainer = make_trainer("eager", max_epochs=2, callbacks=list(callbacks), enable_checkpointing=bool(callbacks))
    noted = Noted()
    logging.getLogger("lightning_zero").addHandler(noted)
    before = signal.getsignal(signal.SIGINT)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, make_loader("eager"), ckpt_path=path)
        except (SystemExit, OSError, CheckpointError) as error:
            noted.said.append(repr(error))
        finally:
            signal.signal(signal.SIGINT, before)  # Lightning ignores it once it has seen one
            logging.getLogger("lightning_zero").removeHandler(noted)
    return noted.said + [str(warning.message) for warning in caught if "half way" in str(warning.message)]


def _interrupted(home: str) -> dict[str, Any]:
    path = f"{home}/whole.ckpt"
    first, trainer = Regression(), make_trainer("eager")
    trainer.fit(first, make_loader("eager"))
    trainer.save_checkpoint(path)
    saved = whole_state(first)
    if dist.get_rank() == 0:
        cut(Path(shutil.copy(path, f"{home}/cut.ckpt")), 0.5)
    dist.barrier()

    module, optimizers = Regression(), InMoments()
    with torch.no_grad():
        for param in module.parameters():
            param.add_(1.0)
    found: dict[str, Any] = {"opening": _fit(module, f"{home}/cut.ckpt", OnExceptionCheckpoint(home, "opening"))}
    handle = module.net[2].register_load_state_dict_pre_hook(_interrupts)
    own = {key: value.clone() for key, value in module.state_dict().items()}
    found["weights"] = _fit(module, path, OnExceptionCheckpoint(home, "weights"))
    handle.remove()
    state = whole_state(module)
    found["state"] = {k: "saved" if v.equal(saved[k]) else "own" if v.equal(own[k]) else "?" for k, v in state.items()}
    found["moments"] = _fit(optimizers, path, OnExceptionCheckpoint(home, "moments"))
    found["without"] = _fit(module, None), _fit(module, None)
    found["again"] = _fit(optimizers, path), _fit(module, path), _fit(module, path)
    close(first, module, optimizers)
    return found


def _by_hand(home: str) -> list[list[str]]:
    """Return the messages of Fabric, twice, and of ``load_safetensors``."""
    fabric, said = make_fabric("eager"), []
    model, optimizer = set_up(fabric, network())
    state, path = {"model": model, "optimizer": optimizer}, f"{home}/fabric.ckpt"
    train(fabric, model, optimizer, batches=2)
    fabric.save(path, state)
    export_safetensors(model.module, f"{home}/files")
    weights = model.module[2].register_load_state_dict_pre_hook
    moments = optimizer.optimizer.register_load_state_dict_pre_hook
    for register, hook, load in (
        (weights, _interrupts, lambda: fabric.load(path, state)),
        (moments, _fails, lambda: fabric.load(path, state)),
        (weights, _interrupts, lambda: load_safetensors(model.module, f"{home}/files")),
    ):
        noted, handle = Noted(), register(hook)
        logging.getLogger("lightning_zero").addHandler(noted)
        with pytest.raises((KeyboardInterrupt, OSError)):
            load()
        logging.getLogger("lightning_zero").removeHandler(noted)
        handle.remove()
        said.append(noted.said)
    with closing(model):
        return said


@pytest.mark.parametrize("world_size", [1])
def test_loads_by_hand_tell_it_too(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    [said] = ranks.run(world_size, _by_hand, str(tmp_path))
    for texts, where, what in zip(
        said, ("fabric.ckpt", "fabric.ckpt", "files"), ("some", "optimizer", "some"), strict=True
    ):
        [text] = texts
        assert f"Loading {tmp_path}/{where} ended half way" in text
        assert {"some": "some weights", "optimizer": "the optimizer's state is not"}[what] in text


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.exhaustive_variants("1")
def test_who_goes_on_is_told_and_nothing_is_saved(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    for rank, found in enumerate(ranks.run(world_size, _interrupted, str(tmp_path))):
        unsaved, end = found["opening"]  # the module is unchanged
        assert "No checkpoint is saved" in unsaved
        assert "cut.ckpt is damaged" in end
        half, unsaved, end = found["weights"]
        assert "whole.ckpt ended half way (KeyboardInterrupt): some weights of the module" in half
        assert "No checkpoint is saved after this exception, because it occurred while loading one" in unsaved
        assert end == "SystemExit(1)"
        assert found["state"]["net.0.weight"] == "saved"
        assert found["state"]["net.4.weight"] == "own"
        half, unsaved, end = found["moments"]
        assert "the optimizer's state is not" in half
        assert "No checkpoint is saved" in unsaved
        assert "the disk is gone" in end
        first, second = found["without"]
        assert [text[:7] for text in first] == (["Loading"] if rank == 0 else []), "once, and by rank 0"
        assert second == []
        failed, *whole = found["again"]
        assert "the optimizer's state is not" in failed[0]
        assert whole == [[], []], "a whole one makes it good"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cut.ckpt", "whole.ckpt"]
