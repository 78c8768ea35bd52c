"""What Fabric calls in place of a module that is sharded."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import wrappers
from torch import nn
from typing_extensions import override

from lightning_zero.integrations.fabric.loop import LoopTracker

__all__ = ["ShardedModule", "unwrap_module"]


class ShardedModule(nn.Module):
    """Says of each call what it is: see :class:`LoopTracker`.

    Args:
        module: the user's, in which the parameters are shards.
        loop: hears of its calls.
    """

    def __init__(self, module: nn.Module, loop: LoopTracker) -> None:
        super().__init__()
        self.module = module
        self.loop = loop

    # Fabric compiles around this what the user had compiled by hand; inside, the strategy compiles its own way.
    @override
    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.loop.is_unsharded:
            return self._target()(*args, **kwargs)
        with self.loop.forward():
            return self._target()(*args, **kwargs)

    def _target(self) -> Any:
        """The module; or a method of it that was marked as one (``training_step``), which Fabric puts in the place of
        its ``forward``: the modules that such a method calls are compiled then, and what it logs stays outside."""
        forward = self.module.forward
        return forward if getattr(forward, "__module__", None) == wrappers.__name__ else self.module


def unwrap_module(module: nn.Module) -> nn.Module:
    """The user's own module."""
    return module.module if isinstance(module, ShardedModule) else module
