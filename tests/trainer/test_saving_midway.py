"""Save from a callback within an accumulation, before the first step and after it, as DDP would.

It may hold only a module's entries that the user selects.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.checkpoint.async_save.writer_process import WriterProcess
from lightning_zero.integrations.checkpoint_files import read_folder
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    INPUTS,
    OUTPUTS,
    RTOL,
    Regression,
    close,
    make_loader,
    make_trainer,
    seeded,
    whole_state,
)
from tests.helpers.writers import forked_writers
from tests.ranks.pool import Ranks

SLOW = pytest.mark.slow
KINDS = {"full": {"state_dict_type": "full"}, "sharded": {"state_dict_type": "sharded"}}
KINDS |= {f"{kind}, async": options | {"async_save": True} for kind, options in KINDS.items()}
MIDDLE = 2  # of the second step's two batches the first


class Adapted(Regression):
    """A network that is frozen, and low-rank adapters, which alone are trained and saved."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.net.requires_grad_(False)
        with seeded():
            self.up, self.down = nn.Parameter(torch.randn(OUTPUTS, 9) / 9), nn.Parameter(torch.zeros(9, INPUTS))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + x @ (self.up @ self.down).T

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([self.up, self.down], lr=1e-2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]  # of a full checkpoint it is rank 0's alone
        checkpoint["state_dict"] = {key: state[key] for key in ("up", "down") if key in state}


class Saves(pl.Callback):
    def __init__(self, home: str) -> None:
        self.home = home

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (0, MIDDLE):
            trainer.save_checkpoint(f"{self.home}/{batch_idx}.ckpt")


def _fit(kind: str, module: Any, path: str | None = None, *callbacks: Any, **options: Any) -> dict[str, Tensor]:
    trainer = make_trainer(kind, accumulate_grad_batches=2, callbacks=list(callbacks), **options)
    trainer.fit(module, make_loader("eager", steps=6), ckpt_path=path)
    assert trainer.global_step == 3
    state: dict[str, Tensor] = module.state_dict() if kind == "ddp" else whole_state(module)
    close(module)
    return {key: value.clone() for key, value in state.items()}


def _midway(saved: str, home: str) -> tuple[dict[str, Tensor], ...]:
    """A training that saves, one that goes on from that, and one that does neither."""
    real = WriterProcess.write

    def later(self: WriterProcess, *args: Any) -> Any:
        time.sleep(0.3)  # the next step is first; it prepares memory for the save
        return real(self, *args)

    options = KINDS[saved]
    with forked_writers(), patch.object(WriterProcess, "write", later):
        saving = _fit("eager", Regression(), None, Saves(home), **options)
    dist.barrier()
    path = f"{home}/{MIDDLE}.ckpt"
    return saving, _fit("eager", Regression(), path, **options), _fit("eager", Regression(), **options)


def _under_ddp(home: str) -> dict[str, Tensor]:
    _fit("ddp", Regression(), None, Saves(home))
    dist.barrier()
    return _fit("ddp", Regression(), f"{home}/{MIDDLE}.ckpt")


@pytest.mark.parametrize(
    "saved",
    [
        "sharded, async",
        pytest.param("full", marks=SLOW),
        *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("sharded", "full, async")),
    ],
)
def test_in_the_middle_of_an_accumulation(ranks: Ranks, tmp_path: Path, saved: str) -> None:
    for name in ("ours", "ddp"):
        (tmp_path / name).mkdir()
    wanted = ranks.run(2, _under_ddp, str(tmp_path / "ddp"))[0]
    for saving, resumed, neither in ranks.run(2, _midway, saved, str(tmp_path / "ours")):
        assert saving.keys() == neither.keys()
        assert all(torch.equal(saving[key], neither[key]) for key in neither)
        assert_close_relative(resumed, wanted, 5 * RTOL)


def _adapters(saved: str, path: str) -> tuple[dict[str, Tensor], ...]:
    """Return a save, the training that resumes from it, and the training that runs through."""
    ends: list[dict[str, Tensor]] = []
    for epochs, source in ((1, None), (2, path), (2, None)):
        module = Adapted()
        trainer = make_trainer("eager", max_epochs=epochs, **KINDS[saved])
        trainer.fit(module, make_loader("eager", steps=3), ckpt_path=source)
        ends.append(whole_state(module))
        if epochs == 1:
            trainer.save_checkpoint(path)
        close(module)
    found = Adapted.load_from_checkpoint(path).state_dict()
    return found, *ends


@pytest.mark.parametrize("saved", ["sharded", pytest.param("full", marks=SLOW)])
def test_adapters_alone(ranks: Ranks, tmp_path: Path, saved: str) -> None:
    path = tmp_path / "x.ckpt"
    for found, then, resumed, at_once in ranks.run(2, _adapters, saved, str(path)):
        assert all(torch.equal(found[key], then[key]) for key in then)
        assert all(torch.equal(resumed[key], at_once[key]) for key in at_once)
        assert not torch.equal(resumed["up"], then["up"]), "nothing was trained"
    content = read_folder(path, None) if saved == "sharded" else torch.load(path)
    assert set(content["state_dict"]) == {"up", "down"}
