"""An optimizer whose state lies on the host, or is kept in fewer bytes, loads it without a detour over the device in
torch's own dtype, for which there may be no room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_zero.optim.bf16_state import ROUNDINGS

__all__ = ["Place", "Places", "keep_aside", "keeping_aside"]

Place = Callable[[Tensor, str, Tensor], Tensor]  # of a parameter, a name and what was loaded: what is kept
Places = Callable[[torch.optim.Optimizer], Place]  # as its groups are, which are loaded first


class _Aside:
    """A tensor that ``load_state_dict`` does not take for one: those it moves to their parameters' devices."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def keep_aside(optimizer: torch.optim.Optimizer, places: Places) -> list[Any]:
    """From now on state with more than one element goes where ``places`` have it when it is loaded; returns the handles
    of hooks that see to it, for our own counts, too. All other hooks see the tensors."""

    def take_back(optimizer: torch.optim.Optimizer) -> None:
        place = places(optimizer)
        for param, entries in optimizer.state.items():
            for key, value in entries.items():
                if isinstance(value, _Aside):
                    entries[key] = value.value if key == ROUNDINGS else place(param, key, value.value)

    return [
        optimizer.register_load_state_dict_pre_hook(_put_aside),
        optimizer.register_load_state_dict_post_hook(take_back, prepend=True),
    ]


@contextmanager
def keeping_aside(optimizer: torch.optim.Optimizer, places: Places) -> Iterator[None]:
    """Likewise, inside."""
    handles = keep_aside(optimizer, places)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _put_aside(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    state = {
        number: {k: _Aside(v) if isinstance(v, Tensor) and _moves(k, v) else v for k, v in entries.items()}
        for number, entries in packed["state"].items()
    }
    return packed | {"state": state}


def _moves(key: str, value: Tensor) -> bool:
    """Whether torch would do with it what is not wanted: counts would be as wide as parameters, and bfloat16 counts to
    256 (of which torch spares those that it knows)."""
    return value.numel() > 1 or key == ROUNDINGS
