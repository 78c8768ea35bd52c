"""Trainers that differ only in their strategy, on the same data.

The modules that they train are in lightning_modules.py.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_zero import ZeroStrategy
from lightning_zero.engine import engine_of
from lightning_zero.integrations.trainer.precision import unwrap_optimizer
from lightning_zero.step.runners import CapturedRunner
from tests.helpers.options import arguments
from tests.helpers.spread import check_spread

# Neither 2 nor 3 divides any of them, so there is padding; and of a matrix with two of them for its sides each of 2 or 3
# ranks holds a good part, which close() asserts.
INPUTS, WIDTH, HIDDEN, OUTPUTS = 23, 25, 29, 19
GLOBAL_BATCH = 6  # which 1, 2 and 3 ranks divide

RTOL = 1e-6  # float32, another order of summation


class Captured(ZeroStrategy):
    """Does all that a captured step does, without the graph, and notes for each step whether it was such a one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**arguments(**options, emulate_cuda_graph_step=True))
        self.captured: list[bool] = []

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, *args, **kwargs)
        stepper = self._require_engine().optimizers.stepper(unwrap_optimizer(optimizer))
        self.captured.append(isinstance(stepper.runner, CapturedRunner))
        return result


def check_captured(trainer: pl.Trainer, eager: Sequence[int] = ()) -> None:
    """For a ``captured`` Trainer: all of its steps were captured, except for these, and there were some."""
    if isinstance(trainer.strategy, Captured):
        captured = trainer.strategy.captured
        assert any(captured), f"none of {len(captured)} steps was captured"
        found = [step for step, was in enumerate(captured) if not was]
        assert found == list(eager), f"of {len(captured)} steps {found} were not captured, expected {list(eager)}"


def make_strategy(kind: str, **options: Any) -> Any:
    """Return ``compiled``, ``eager``, ``captured`` (eager) and ``compiled, captured`` of ours, or ``ddp`` and
    ``single``.

    ``captured`` has an optimizer step as it is captured on a GPU.
    """
    if kind.endswith("captured"):
        return Captured(compile=kind.startswith("compiled"), compile_backend="aot_eager", **options)
    if kind in ("compiled", "eager"):
        return ZeroStrategy(**arguments(compile=kind == "compiled", compile_backend="aot_eager", **options))
    return {"ddp": "ddp_find_unused_parameters_true", "single": "auto"}[kind]


def make_trainer(kind: str, **arguments: Any) -> pl.Trainer:
    """A Trainer on the ranks that call this; its files go to their common working directory."""
    options = {
        key: arguments.pop(key)
        for key in list(arguments)
        if key.startswith(
            (
                "bf16_",
                "reduce_",
                "cross_host_",
                "compute_shard_",
                "unsharded_",
                "consensus_",
                "grad_aliasing",
                "gather_",
                "state_d",
                "async_",
                "ranks_",
                "offload",
                "memory",
                "stage",
                "replicate_",
                "frozen_",
            )
        )
    }
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1 if kind == "single" else dist.get_world_size(),
        "strategy": make_strategy(kind, **options),
        "use_distributed_sampler": False,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
        "default_root_dir": "run",
    }
    if arguments.get("accelerator") == "gpu":
        defaults |= gpus_of_ranks()
    return pl.Trainer(**defaults | arguments)


def gpus_of_ranks() -> dict[str, Any]:
    """Return the arguments of a Trainer, or Fabric, for the pool's ranks.

    tests/ranks/shared_gpu.py has those for ranks of one GPU.
    """
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    return {"accelerator": "gpu", "devices": devices, "num_nodes": dist.get_world_size() // devices}


def make_loader(kind: str, steps: int = 4, seed: int = 0) -> DataLoader:
    """Batches of (x, y), the same ones for any number of ranks.

    ``single`` gets them whole, a rank its share.
    """
    rng = torch.Generator().manual_seed(seed)
    count = steps * GLOBAL_BATCH
    data = TensorDataset(torch.randn(count, INPUTS, generator=rng), torch.randn(count, OUTPUTS, generator=rng))
    if kind == "single":
        return DataLoader(data, batch_size=GLOBAL_BATCH)
    sampler: DistributedSampler = DistributedSampler(data, shuffle=False)
    return DataLoader(data, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)


def mlp(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS)
    )


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Return equal random numbers on every rank, after any random draws."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Regression(pl.LightningModule):
    """An MLP with AdamW that keeps the losses of its training steps."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.net = mlp()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]).float(), batch[1].float())  # torch 2.11 takes no others

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        # The usual eps of 1e-8 makes a full step out of a gradient that is rounding noise; no oracle could be followed.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)


def is_ours(kind: str) -> bool:
    return kind in ("compiled", "eager", "captured", "compiled, captured")


def whole_state(module: pl.LightningModule) -> dict[str, Tensor]:
    """The module's values as a plain module has them, on every rank. Collective for a sharded one."""
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


def mean_over_ranks(values: list[float]) -> list[float]:
    """Return the losses of a single device, as means over the ranks' equal shares."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def global_losses(kind: str, module: Any) -> list[float]:
    return list(module.losses) if kind == "single" else mean_over_ranks(module.losses)


def close(*modules: pl.LightningModule) -> None:
    """Frees the engines, so that the next call finds the ranks as new.

    Fails where a module was too narrow for its ranks: see ``check_spread``.
    """
    for module in modules:
        engine = engine_of(module)
        if engine is not None:
            engine.close()
            check_spread(engine, module)


@contextmanager
def fitted(
    kind: str, make: Callable[[], Any] = Regression, steps: int = 4, eager: Sequence[int] = (), **arguments: Any
) -> Iterator[tuple[Any, pl.Trainer]]:
    """A module trained under a strategy of this kind, and its Trainer. ``eager``: see ``check_captured``."""
    module, trainer = make(), make_trainer(kind, **arguments)
    try:
        trainer.fit(module, make_loader(kind, steps))
        check_captured(trainer, eager)
        yield module, trainer
    finally:
        close(module)


def train(
    kind: str, make: Callable[[], Any] = Regression, steps: int = 4, **arguments: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final values of a module trained under a strategy of this kind."""
    with fitted(kind, make, steps, **arguments) as (module, _):
        return global_losses(kind, module), whole_state(module)
