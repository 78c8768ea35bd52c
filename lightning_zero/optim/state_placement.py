"""Placement of optimizer state: on the host, or in fewer bytes, also while it is loaded.

``load_state_dict`` would move state to the device in the parameter's dtype, for which there may be no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_zero.optim.bf16_state import ROUNDING_COUNT
from lightning_zero.optim.quantized_state import is_stored_key
from lightning_zero.sharding.param_record import ShardedParameter

StatePlacer = Callable[[Tensor, str, Tensor], Tensor]  # (parameter, name, loaded value) -> stored value
MakePlacer = Callable[[torch.optim.Optimizer], StatePlacer]  # called after the groups are loaded


class _WrappedTensor:
    """Hides a tensor from ``load_state_dict``, which moves tensors to their parameters' devices."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def register_placement_hooks(optimizer: torch.optim.Optimizer, make_placer: MakePlacer) -> list[Any]:
    """Place state with more than one element, and our own counts, when it is loaded.

    All other hooks see tensors. Return the handles of the hooks.
    """

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
    """Apply :func:`register_placement_hooks` in this context."""
    handles = register_placement_hooks(optimizer, make_placer)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _wrap_tensors(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    state = {
        number: {
            k: _WrappedTensor(v) if isinstance(v, Tensor) and _needs_placement(k, v) else v for k, v in entries.items()
        }
        for number, entries in packed["state"].items()
    }
    return packed | {"state": state}


def _needs_placement(key: str, value: Tensor) -> bool:
    """Return True if torch would change the value.

    It loads counts in the parameters' dtype, and bfloat16 counts only to 256. A scale of 8-bit state may be alone.
    """
    return value.numel() > 1 or key == ROUNDING_COUNT or is_stored_key(key)


def move_state_to_host(optimizer: torch.optim.Optimizer, find: Callable[[Tensor], ShardedParameter | None]) -> None:
    """Move shard-sized state to pageable host memory, as soon as offload is enabled.

    The next step moves it to its final memory. The forward and backward before that step need the device memory
    already.
    """
    for param, entries in optimizer.state.items():
        record = find(param)
        if record is not None:
            placed = {k: v for k, v in entries.items() if record.has_shard_shape(v) or is_stored_key(k)}
            entries.update({key: value.to("cpu") for key, value in placed.items()})
