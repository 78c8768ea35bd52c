"""The part of Fabric's strategy that starts processes, and passes values between them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.utilities.types import ReduceOp
from torch import Tensor
from typing_extensions import override

from lightning_zero.integrations.launchers import FabricLauncher, check_interactive
from lightning_zero.integrations.processes import ProcessGroupMixin, reduce_in_place
from lightning_zero.native.failures import ShownErrorHook

__all__ = ["FabricProcessStrategy"]


class FabricProcessStrategy(ProcessGroupMixin, ParallelStrategy):
    """One process for each device, in one process group."""

    api_name = "Fabric"

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        check_interactive(self.cluster_environment, self.num_processes * self.num_nodes, self.api_name)
        # Always: when processes are started from outside, the launcher is what compares `devices` with their number.
        self._launcher = FabricLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def _set_world_ranks(self) -> None:
        self.set_world_ranks()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        install_excepthook(self)

    def failed(self, error: BaseException) -> None:
        """An exception ends this process."""
        if self._startup is not None:
            self._startup.fail(error)

    def _watch_collective_of(self, group: Any, what: str) -> AbstractContextManager[None]:
        every = group is None or group is torch.distributed.group.WORLD
        return self._watch_collective(what) if every and torch.distributed.is_initialized() else nullcontext()

    @override
    def all_reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        if not isinstance(tensor, Tensor):
            return tensor
        with self._watch_collective_of(group, "Fabric's all_reduce"):
            return reduce_in_place(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        with self._watch_collective_of(group, "Fabric's all_gather"):
            return super().all_gather(tensor, group, sync_grads)


class _ExceptHook:
    """In the place of ``sys.excepthook``: the other ranks hear of an exception that ends this process. Nobody else
    would tell them, as nobody surrounds a user's loop."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self.strategies: weakref.WeakSet[FabricProcessStrategy] = weakref.WeakSet()
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            for strategy in list(self.strategies):
                strategy.failed(error)
        finally:
            self._before(kind, error, traceback)


def install_excepthook(strategy: FabricProcessStrategy) -> None:
    """From now on the strategy is told of an exception that ends this process."""
    if not isinstance(sys.excepthook, _ExceptHook):
        sys.excepthook = _ExceptHook(ShownErrorHook(sys.excepthook))
    sys.excepthook.strategies.add(strategy)
