"""An optimizer whose state lies on the host loads it without a detour over the device, which may have no room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["keep_aside", "keeping_aside"]


class _Aside:
    """A tensor that ``load_state_dict`` does not take for one: those it moves to their parameters' devices."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def keep_aside(optimizer: torch.optim.Optimizer) -> list[Any]:
    """From now on state with more than one element stays where it is when it is loaded; returns the handles of hooks
    that see to it. All other hooks see the tensors."""
    return [
        optimizer.register_load_state_dict_pre_hook(_put_aside),
        optimizer.register_load_state_dict_post_hook(_take_back, prepend=True),
    ]


@contextmanager
def keeping_aside(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Likewise, inside."""
    handles = keep_aside(optimizer)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _put_aside(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    state = {
        number: {k: _Aside(v) if isinstance(v, Tensor) and v.numel() > 1 else v for k, v in entries.items()}
        for number, entries in packed["state"].items()
    }
    return packed | {"state": state}


def _take_back(optimizer: torch.optim.Optimizer) -> None:
    for param, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, _Aside):
                # The dtype that torch gives it otherwise.
                entries[key] = value.value.to(param.dtype) if param.is_floating_point() else value.value
