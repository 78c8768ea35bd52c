"""What there is to save of an optimizer's state, and how it is cut: what every format of checkpoints asks.

An entry of the state either has one element for each of its parameter's, and is cut like the parameter, or is the same
on every rank. Its name says which, where we know the optimizer's rule (:func:`state_names`); shapes alone would not: a
scalar's moments look like a counter. For other names shapes must do:

- a shard has at least 32 elements, and so has whatever is cut like one: what is shaped like the shard is cut, and
  nothing else. A table that happens to have that shape is taken for moments, unless a rule is registered that does not
  name it;
- of whole values, what is shaped like the parameter is cut, except what is a single number for a parameter with
  dimensions, which makes the entry of that name a counter for scalars, too. An optimizer that trains scalars only, has
  no rule and counts by another name than ``"step"`` is mistaken; :func:`~lightning_zero.register_rule` helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zero.mesh import Mesh
from lightning_zero.optim.formulas import StateNames, state_names
from lightning_zero.sharding.record import ShardedParameter
from lightning_zero.sharding.refusals import on_plain_tensors
from lightning_zero.sharding.shard import Sharder

__all__ = ["Entry", "OptimizerInventory", "gather_value"]


@dataclass(frozen=True)
class Entry:
    """One value that an optimizer keeps for one parameter.

    Attributes:
        key: its name, such as ``"exp_avg"``.
        value: as this rank has it, or as a checkpoint of whole values has it.
        record: of the parameter that it is cut like, whose ``layout`` tells the whole shape, each rank's range and the
            padding; None for what is the same on every rank.
    """

    key: str
    value: Any
    record: ShardedParameter | None


class OptimizerInventory:
    """Of one optimizer of shards. Parameters have the numbers that they have in torch's state dicts."""

    def __init__(self, optimizer: torch.optim.Optimizer, sharder: Sharder) -> None:
        self._optimizer = optimizer
        self._sharder = sharder

    def held(self, packed: Mapping[str, Any]) -> dict[int, list[Entry]]:
        """What this rank holds, by parameter; ``packed``: the optimizer's own state dict."""
        found: dict[int, list[Entry]] = {}
        for number, record, names in self._parameters(packed):
            entries = packed["state"][number]
            found[number] = [Entry(k, v, record if _is_part(k, v, record, names) else None) for k, v in entries.items()]
        return found

    def saved(self, state: Mapping[str, Any]) -> dict[int, list[Entry]]:
        """What a state dict of whole values holds, by parameter.

        Raises:
            ValueError: it was saved for parameters of other shapes.
        """
        known = [(number, record, names) for number, record, names in self._parameters(state) if record is not None]
        others = [
            (key, value.dim())
            for number, record, _ in known
            for key, value in state["state"][number].items()
            if isinstance(value, Tensor) and record.layout.shape
        ]
        counters = {key for key, dim in others if not dim} - {key for key, dim in others if dim}
        found: dict[int, list[Entry]] = {}
        for number, record, names in known:
            entries = state["state"][number]
            found[number] = [
                Entry(k, v, record if _is_whole(k, v, record, names, counters) else None) for k, v in entries.items()
            ]
        return found

    def _parameters(self, state: Mapping[str, Any]) -> Iterator[tuple[int, ShardedParameter | None, StateNames]]:
        """Of those that ``state`` has entries for: number, record, and what is known of the entries' names."""
        number, saved = 0, state["param_groups"]
        for position, group in enumerate(self._optimizer.param_groups):
            # Loading a state dict brings its settings, too; names may depend on them.
            names = state_names(self._optimizer, group | (saved[position] if position < len(saved) else {}))
            for param in group["params"]:
                if number in state["state"]:
                    yield number, self._sharder.find(param), names
                number += 1


def _is_part(key: str, value: Any, record: ShardedParameter | None, names: StateNames) -> bool:
    return record is not None and names.elementwise(key) is not False and record.is_like_shard(value)


def _is_whole(key: str, value: Any, record: ShardedParameter, names: StateNames, counters: set[str]) -> bool:
    named = names.elementwise(key)
    if named is False or not isinstance(value, Tensor) or (named is None and not value.dim() and key in counters):
        return False
    if value.shape == record.layout.shape:
        return True
    raise ValueError(
        f"The checkpoint's optimizer state {key!r} for parameter {record.name!r} has shape {tuple(value.shape)}, but "
        f"the parameter has shape {tuple(record.layout.shape)}. The optimizer's parameters must come in the order in "
        "which they were saved."
    )


@on_plain_tensors
def gather_value(value: Any, record: ShardedParameter | None, mesh: Mesh) -> Any:
    """The whole of what is cut like a parameter, in that parameter's shape and the value's dtype, on the mesh's device;
    its memory holds padding, too. Without a record, the value itself. Collective."""
    if record is None:
        return value
    return record.layout.whole(mesh.all_shards(value.reshape(-1)))
