"""An optimizer whose state lies on the host, or is kept in fewer bytes, loads it without a detour over the device in
torch's own dtype, for which there may be no room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_zero.optim.bf16_state import ROUNDING_COUNT

__all__ = ["StatePlacer", "MakePlacer", "register_placement_hooks", "place_loaded_state"]

StatePlacer = Callable[[Tensor, str, Tensor], Tensor]  # of a parameter, a name and what was loaded: what is kept
MakePlacer = Callable[[torch.optim.Optimizer], StatePlacer]  # as its groups are, which are loaded first


class _WrappedTensor:
    """A tensor that ``load_state_dict`` does not take for one: those it moves to their parameters' devices."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def register_placement_hooks(optimizer: torch.optim.Optimizer, make_placer: MakePlacer) -> list[Any]:
    """From now on state with more than one element goes where ``make_placer`` have it when it is loaded; returns the handles
    of hooks that see to it, for our own counts, too. All other hooks see the tensors."""

    def place_tensors(optimizer: torch.optim.Optimizer) -> None:
        placer = make_placer(optimizer)
        for param, entries in optimizer.state.items():
            for key, value in entries.items():
                if isinstance(value, _WrappedTensor):
                    entries[key] = value.value if key == ROUNDING_COUNT else placer(param, key, value.value)

    return [
        optimizer.register_load_state_dict_pre_hook(_wrap_tensors),
        optimizer.register_load_state_dict_post_hook(place_tensors, prepend=True),
    ]


@contextmanager
def place_loaded_state(optimizer: torch.optim.Optimizer, make_placer: MakePlacer) -> Iterator[None]:
    """Likewise, inside."""
    handles = register_placement_hooks(optimizer, make_placer)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _wrap_tensors(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    state = {
        number: {k: _WrappedTensor(v) if isinstance(v, Tensor) and _needs_placement(k, v) else v for k, v in entries.items()}
        for number, entries in packed["state"].items()
    }
    return packed | {"state": state}


def _needs_placement(key: str, value: Tensor) -> bool:
    """Whether torch would do with it what is not wanted: counts would be as wide as parameters, and bfloat16 counts to
    256 (of which torch spares those that it knows)."""
    return value.numel() > 1 or key == ROUNDING_COUNT
