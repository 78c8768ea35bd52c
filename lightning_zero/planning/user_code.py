"""Call users' code for an estimate: the loss of a batch, and the optimizers, as a Trainer would."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.config import EngineConfig
from lightning_zero.optim.state_dtypes import Rounding
from lightning_zero.planning.persistent_memory import OptimizerMemory, measure_optimizer_memory, shard_parameters


class UserCode:
    """The user's code around one module.

    Args:
        loss: returns the loss of the module and a batch; None calls its ``training_step``.
        optimizer: makes an optimizer of parameters; None calls its ``configure_optimizers``, or makes AdamW.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[nn.Module, Any], Any] | None,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None,
    ) -> None:
        self._module, self._loss, self._optimizer = module, loss, optimizer
        if loss is None and not hasattr(module, "training_step"):
            raise ValueError(
                f"{type(module).__name__} is no LightningModule. Pass what its loss is: "
                "training=lightning_zero.Training(loss=lambda module, batch: ...)."
            )

    @contextmanager
    def configured(self) -> Iterator[None]:
        """Give the module its layers, training mode and a stub Trainer within the context."""
        module: Any = self._module
        mode, trainer = module.training, getattr(module, "_trainer", None)
        level = logging.getLogger("lightning.pytorch").level
        if hasattr(module, "_trainer") and trainer is None:
            module._trainer = _StubTrainer()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if hasattr(module, "configure_model"):
                    with torch.device("meta"):
                        module.configure_model()
                module.train()
                yield
        finally:
            logging.getLogger("lightning.pytorch").setLevel(level)
            module.train(mode)
            if hasattr(module, "_trainer"):
                module._trainer = trainer

    @property
    def is_automatic(self) -> bool:
        """Return True if a Trainer calls backward and the optimizer once for each batch."""
        return bool(getattr(self._module, "automatic_optimization", True))

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        """Return the loss. Raises ``ValueError`` if the training step returns none."""
        if self._loss is not None:
            result = self._loss(module, batch)
        else:
            step: Any = module.training_step
            given = (batch, 0) if len(inspect.signature(step).parameters) > 1 else (batch,)
            result = step(*given)
        loss = result.get("loss") if isinstance(result, dict) else result
        if not isinstance(loss, Tensor):
            raise ValueError("The training step returns no loss (manual optimization cannot be planned).")
        return loss

    def optimizer_memory(self, dtype: torch.dtype | None, world_size: int, config: EngineConfig) -> OptimizerMemory:
        """Return the memory of the module's optimizers; ``dtype``: of parameters, see ``shard_parameters``."""
        tuning, captured = config.tuning, config.cuda_graph_step is not False
        params = list(self._module.parameters())
        shards = shard_parameters(self._module, world_size, dtype, tuning.state_dtype == "8bit")
        bucket = int(tuning.matrix_bucket_mb * 2**20)
        made = self._optimizers(params)
        return measure_optimizer_memory(made, params, shards, Rounding.of(tuning), bucket, captured)

    def _optimizers(self, params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        if self._optimizer is not None:
            return [self._optimizer(params)]
        configure = getattr(self._module, "configure_optimizers", None)
        configured = configure() if configure is not None else None
        found = list(_optimizers_in(configured))
        return found or [torch.optim.AdamW(params)]


def _optimizers_in(configured: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(configured, torch.optim.Optimizer):
        yield configured
    elif isinstance(configured, dict):
        yield from _optimizers_in(configured.get("optimizer"))
    elif isinstance(configured, (list, tuple)):
        for entry in configured:
            yield from _optimizers_in(entry)


class _StubTrainer(SimpleNamespace):
    """Attributes that modules read from a Trainer in ``configure_optimizers`` and ``training_step``."""

    def __init__(self) -> None:
        super().__init__(
            barebones=True,
            estimated_stepping_batches=1000,
            max_steps=1000,
            max_epochs=1,
            current_epoch=0,
            global_step=0,
            global_rank=0,
            local_rank=0,
            world_size=1,
            num_devices=1,
            num_nodes=1,
            accumulate_grad_batches=1,
            is_global_zero=True,
            training=True,
            sanity_checking=False,
            logger=None,
            loggers=[],
            datamodule=None,
            train_dataloader=None,
        )
