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

An optimizer's own ``state_dict()`` may wrap entries in dicts; these are looked into. A tensor that is neither cut nor a
single number is refused by name: no rank could put it together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zero.compat.tensors import tree_leaves
from lightning_zero.errors import UnsupportedError
from lightning_zero.mesh import Mesh
from lightning_zero.optim.rules import StateNames, state_names
from lightning_zero.optim.support import check_state_dict, large_tensors
from lightning_zero.sharding.record import ShardedParameter
from lightning_zero.sharding.shard import Sharder
from lightning_zero.sharding.unsupported import without_shard_dispatch

__all__ = ["Entry", "OptimizerStateEntries", "gather_value", "nested"]


@dataclass(frozen=True)
class Entry:
    """One value that an optimizer keeps for one parameter.

    Attributes:
        key: its name, such as ``"exp_avg"``.
        value: as this rank has it, or as a checkpoint of whole values has it.
        record: of the parameter that it is cut like, whose ``layout`` tells the whole shape, each rank's range and the
            padding; None for what is the same on every rank.
        inside: keys of the dicts in which the optimizer's ``state_dict()`` wraps it, from the outermost on.
    """

    key: str
    value: Any
    record: ShardedParameter | None
    inside: tuple[str, ...] = ()

    @property
    def path(self) -> tuple[str, ...]:
        return (*self.inside, self.key)


class OptimizerStateEntries:
    """Of one optimizer of shards. Parameters have the numbers that they have in torch's state dicts."""

    def __init__(self, optimizer: torch.optim.Optimizer, sharder: Sharder) -> None:
        self._optimizer = optimizer
        self._sharder = sharder

    def held(self, packed: Mapping[str, Any]) -> dict[int, list[Entry]]:
        """What this rank holds, by parameter; ``packed``: the optimizer's own state dict.

        Raises:
            UnsupportedError: that holds tensors which cannot be put together from the ranks' pieces.
        """
        check_state_dict(self._optimizer, packed)
        found: dict[int, list[Entry]] = {}
        for number, param, record, names in self._parameters(packed):
            found[number] = []
            for inside, key, value in _leaves(packed["state"][number]):
                cut = _is_part(key, value, record, names)
                if record is not None and not cut:
                    self._check_whole(key, value, param, record, names)
                found[number].append(Entry(key, value, record if cut else None, inside))
        return found

    def _check_whole(self, key: str, value: Any, param: Tensor, record: ShardedParameter, names: StateNames) -> None:
        """Raise if ``value`` is not the same on every rank."""
        large = large_tensors(value)
        if large and names.elementwise(key) is False:
            cut = {v.data_ptr() for k, v in self._optimizer.state.get(param, {}).items() if names.elementwise(k)}
            large = [tensor for tensor in large if tensor.data_ptr() in cut]  # under another name
        if large:
            name = type(self._optimizer).__name__
            raise UnsupportedError(
                f"The state_dict() of {name} holds {key!r} of shape {tuple(large[0].shape)} for {record.name!r}, but "
                f"only tensors with one value for each element of the shard (shape "
                f"{tuple(record.layout.visible_shape)}) can be put together from all ranks. Have state_dict() return "
                "each such tensor under the name that it has in optimizer.state, or save without optimizers: "
                "ModelCheckpoint(save_weights_only=True)."
            )

    def saved(self, state: Mapping[str, Any]) -> dict[int, list[Entry]]:
        """What a state dict of whole values holds, by parameter.

        Raises:
            ValueError: it was saved for parameters of other shapes.
        """
        known = [(number, record, names) for number, _, record, names in self._parameters(state) if record is not None]
        others = [
            (key, value.dim())
            for number, record, _ in known
            for _, key, value in _leaves(state["state"][number])
            if isinstance(value, Tensor) and record.layout.shape
        ]
        counters = {key for key, dim in others if not dim} - {key for key, dim in others if dim}
        found: dict[int, list[Entry]] = {}
        for number, record, names in known:
            found[number] = [
                Entry(key, value, record if _is_whole(key, value, record, names, counters) else None, inside)
                for inside, key, value in _leaves(state["state"][number])
            ]
        return found

    def _parameters(
        self, state: Mapping[str, Any]
    ) -> Iterator[tuple[int, Tensor, ShardedParameter | None, StateNames]]:
        """Yield number, parameter, record and names of entries for each parameter that ``state`` has entries for."""
        number, saved = 0, state["param_groups"]
        for position, group in enumerate(self._optimizer.param_groups):
            # Loading a state dict brings its settings, too; names may depend on them.
            names = state_names(self._optimizer, group | (saved[position] if position < len(saved) else {}))
            for param in group["params"]:
                if number in state["state"]:
                    yield number, param, self._sharder.find(param), names
                number += 1


def nested(entries: Iterable[Entry], values: Iterable[Any]) -> dict[str, Any]:
    """Return one parameter's entries with other values, wrapped as they were."""
    root: dict[str, Any] = {}
    for entry, value in zip(entries, values, strict=True):
        place = root
        for key in entry.inside:
            place = place.setdefault(key, {})
        place[entry.key] = value
    return root


def _leaves(entries: Mapping[str, Any], inside: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Yield the wrapping keys, the key and the value of each entry; only dicts that hold tensors are looked into."""
    for key, value in entries.items():
        if isinstance(value, dict) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            yield from _leaves(value, (*inside, key))
        else:
            yield inside, key, value


def _is_part(key: str, value: Any, record: ShardedParameter | None, names: StateNames) -> bool:
    return record is not None and names.elementwise(key) is not False and record.has_shard_shape(value)


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


@without_shard_dispatch
def gather_value(value: Any, record: ShardedParameter | None, mesh: Mesh) -> Any:
    """The whole of what is cut like a parameter, in that parameter's shape and the value's dtype, on the mesh's device;
    its memory holds padding, too. Without a record, the value itself. Collective."""
    if record is None:
        return value
    return record.layout.full_view(mesh.all_gather_shard(value.reshape(-1)))
