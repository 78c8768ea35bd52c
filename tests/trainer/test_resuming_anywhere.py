"""Resume an interrupted training as if it had run through.

Covers the middle of an epoch and its border, shuffled samples, dropout and a schedule. Covers either kind of
checkpoint, other numbers of ranks, DDP and FSDP2.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_zero.cli.checkpoint import _consolidate
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import INPUTS, RTOL, Regression, close, global_losses, make_trainer, seeded, whole_state
from tests.helpers.writers import forked_writers
from tests.ranks.pool import Ranks

BATCH, STEPS, EPOCHS = 12, 4, 2  # samples of all ranks, which 1 to 4 divide; batches of an epoch
WIDTH, OUTPUTS = 25, 29  # each of up to 4 ranks holds a good part of each matrix


class Dropping(Regression):
    """Draws the random numbers of a step from the step's own seed, as in the README."""

    def __init__(self, dropout: float, seed: int = 0) -> None:
        super().__init__()
        with seeded(seed):
            self.net = nn.Sequential(
                nn.Linear(INPUTS, WIDTH), nn.Dropout(dropout), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS)
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(1000 * self.global_step + self.global_rank)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5), "interval": "step"}
        ]


class Parallel(Dropping):
    """For FSDP2."""

    def configure_model(self) -> None:
        for layer in (self.net[0], self.net[3], self.net):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class Shuffled(DataLoader):
    """Loader with other samples in each epoch, the same on any number of ranks, that can resume."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)
        count = STEPS * BATCH
        data = TensorDataset(torch.randn(count, INPUTS, generator=rng), torch.randn(count, OUTPUTS, generator=rng))
        super().__init__(data, BATCH // dist.get_world_size(), sampler=DistributedSampler(data, shuffle=True))
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        begin, self.given = self.given % STEPS, self.given % STEPS
        for number, batch in enumerate(super().__iter__()):
            if number >= begin:
                self.given += 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def _fit(
    kind: str, dropout: float, home: str = "", path: str | None = None, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of all steps from the checkpoint at ``path`` on, and the values after them.

    Save at each step.
    """
    fsdp2 = kind == "fsdp2"
    module = (Parallel if fsdp2 else Dropping)(dropout, seed=0 if path is None else 7)
    if fsdp2:
        options["strategy"] = ModelParallelStrategy(dist.get_world_size(), tensor_parallel_size=1)
    callbacks = [
        ModelCheckpoint(home, "{step}", every_n_train_steps=1, save_top_k=-1),
        ModelCheckpoint(home, "{epoch}", every_n_epochs=1, save_top_k=-1),
    ]
    trainer = make_trainer(
        "ddp" if fsdp2 else kind,
        max_epochs=EPOCHS,
        callbacks=callbacks if home else [],
        enable_checkpointing=bool(home),
        **options,
    )
    trainer.fit(module, Shuffled(), ckpt_path=path)
    assert trainer.global_step == EPOCHS * STEPS
    found = global_losses(kind, module), whole_state(module)
    close(module)
    return found


INTERRUPTED = {"step=3": 3, "step=4": 4, "epoch=0": 4, "step=6": 6}
KINDS = {"full": {"state_dict_type": "full"}, "sharded": {"state_dict_type": "sharded"}}
KINDS |= {f"{kind}, async": options | {"async_save": True} for kind, options in KINDS.items()}


@forked_writers()
def _resumed(kind: str, home: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    whole = _fit(kind, 0.3, home, **options)
    names = ["step=3", "epoch=0"] if kind == "compiled" else INTERRUPTED  # each compiles anew
    return whole, {name: _fit(kind, 0.3, path=f"{home}/{name}.ckpt") for name in names}


@pytest.mark.parametrize(
    ("kind", "saved"),
    [("eager", "sharded"), ("eager", "full"), ("ddp", "")]
    + [
        pytest.param(kind, saved, marks=pytest.mark.slow)
        for kind, saved in (("eager", "sharded, async"), ("compiled", "sharded"))
    ]
    + [pytest.param("eager", "full, async", marks=pytest.mark.exhaustive)],
)
@pytest.mark.exhaustive_variants("eager-sharded, async", "compiled-sharded", "eager-full")
def test_it_goes_on_from_any_step(ranks: Ranks, tmp_path: Path, kind: str, saved: str) -> None:
    for (losses, state), resumed in ranks.run(2, _resumed, kind, str(tmp_path), KINDS.get(saved, {})):
        for name, found in resumed.items():
            rtol = RTOL if kind == "compiled" else 0.0
            assert_close_relative(found[0], losses[INTERRUPTED[name] :], rtol, what=name)
            assert_close_relative(found[1], state, rtol, what=name)


def _written(home: str) -> list[float]:
    """Return the losses of an uninterrupted run with stages 1 and 2."""
    for stage, kind in ((1, "full"), (2, "sharded")):
        whole = _fit("eager", 0.0, f"{home}/{kind}", stage=stage, **KINDS[kind])
    for kind in ("ddp", "fsdp2"):
        _fit(kind, 0.0, f"{home}/{kind}")
    if dist.get_rank() == 0:
        arguments = {"path": f"{home}/sharded/step=3.ckpt", "output": f"{home}/one.ckpt", "json": True, "trust": False}
        _consolidate(argparse.Namespace(**arguments))
    dist.barrier()
    return whole[0]


def _going_on(ways: list[tuple[str, dict[str, Any], str]]) -> dict[str, list[float]]:
    return {f"{path} under {kind}, {chosen}": _fit(kind, 0.0, path=path, **chosen)[0] for kind, chosen, path in ways}


@pytest.fixture(scope="module")
def written(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    home = str(tmp_path_factory.mktemp("written"))
    return home, ranks.run(2, _written, home)[0]


WAYS: list[tuple[str, dict[str, Any], str]] = [
    ("ddp", {}, "full/step=3"),
    ("ddp", {}, "one"),
    ("fsdp2", {}, "sharded/step=3"),
    ("eager", {}, "ddp/step=3"),
    ("eager", {}, "fsdp2/step=3"),
    ("eager", {}, "one"),
    ("eager", {}, "sharded/step=3"),
    ("eager", {"stage": 1}, "sharded/step=3"),
    ("eager", {"stage": 2, "offload": ("optimizer",)}, "full/step=3"),
]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_it_goes_on_elsewhere(ranks: Ranks, written: tuple[str, list[float]], world_size: int) -> None:
    home, losses = written
    # others' strategies read a file on four ranks as they do on two
    ways = [way for way in WAYS if way[0] == "eager" or world_size == 2]
    for resumed in ranks.run(
        world_size, _going_on, [(kind, chosen, f"{home}/{name}.ckpt") for kind, chosen, name in ways]
    ):
        for way, found in resumed.items():
            assert_close_relative(found, losses[3:], 5 * RTOL, what=f"{way} on {world_size} ranks: ")
