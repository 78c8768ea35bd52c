"""Whether code draws random numbers: whatever its name, by the ops that run."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from lightning_zero.compat.tensors import TorchDispatchMode

__all__ = ["RandomOpFound", "ForbidRandomOps", "draws"]


class RandomOpFound(Exception):
    """A random number would have been drawn."""


class ForbidRandomOps(TorchDispatchMode):
    """A context in which no random number is drawn: an op that would raises :class:`RandomOpFound`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RandomOpFound(func)
        return func(*args, **(kwargs or {}))


def draws(node: Node) -> bool:
    """Whether a node of a graph of ops does."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
