"""Interrupt a load half way: no rank saves the module."""

from __future__ import annotations

import logging
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn

from lightning_zero.errors import CheckpointError
from tests.helpers.damage import cut
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
    try:
        trainer.fit(module, make_loader("eager"), ckpt_path=path)
    except (SystemExit, OSError, CheckpointError) as error:
        noted.said.append(repr(error))
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores it once it has seen one
        logging.getLogger("lightning_zero").removeHandler(noted)
    return noted.said


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
    close(first, module, optimizers)
    return found


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.exhaustive_variants("1")
def test_nothing_is_saved(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    for found in ranks.run(world_size, _interrupted, str(tmp_path)):
        unsaved, end = found["opening"]  # the module is unchanged
        assert "No checkpoint is saved" in unsaved
        assert "cut.ckpt is damaged" in end
        unsaved, end = found["weights"]
        assert "No checkpoint is saved after this exception, because it occurred while loading one" in unsaved
        assert end == "SystemExit(1)"
        assert found["state"]["net.0.weight"] == "saved"
        assert found["state"]["net.4.weight"] == "own"
        unsaved, end = found["moments"]
        assert "No checkpoint is saved" in unsaved
        assert "the disk is gone" in end
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cut.ckpt", "whole.ckpt"]
