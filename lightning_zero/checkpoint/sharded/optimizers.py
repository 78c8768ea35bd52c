"""An optimizer's state by the names of parameters, as sharded checkpoints hold it, and by their numbers, as torch's
optimizers and full checkpoints do."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_zero.checkpoint.inventory import Entry, OptimizerStateEntries, nested
from lightning_zero.checkpoint.sharded.values import CheckpointShard
from lightning_zero.sharding.shard import Sharder
from lightning_zero.sharding.unsupported import without_shard_dispatch

__all__ = ["state_by_name", "state_by_number", "has_parameter_names", "numbered"]


@without_shard_dispatch
def state_by_name(optimizer: torch.optim.Optimizer, module: nn.Module, sharder: Sharder) -> dict[str, Any]:
    """The optimizer's state dict, with the parameters' names in ``module`` for numbers, and this rank's part of what is
    cut like a parameter."""
    packed = optimizer.state_dict()
    if not packed:
        return {}  # Lightning's stand-in for no optimizer
    names, mesh = _names(optimizer, module), sharder.mesh
    held = OptimizerStateEntries(optimizer, sharder).held(packed)

    def value(entry: Entry) -> Any:
        if entry.record is None:
            return entry.value
        return CheckpointShard(entry.record.layout, entry.value, mesh.shard_index, mesh.replica)

    state = {key: entries for key, entries in packed["state"].items() if key not in held}  # of no parameter
    state |= {names[number]: nested(entries, map(value, entries)) for number, entries in held.items()}
    groups = [group | {"params": [names[number] for number in group["params"]]} for group in packed["param_groups"]]
    return {**packed, "state": state, "param_groups": groups}


def has_parameter_names(state: Mapping[str, Any]) -> bool:
    """Whether parameters have names there, and not numbers."""
    return any(isinstance(param, str) for group in state.get("param_groups", ()) for param in group["params"])


def state_by_number(state: Mapping[str, Any], optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """The same state dict with the numbers that the parameters have in ``optimizer``, group by group. Groups and what
    is in them may stand in another order than they were saved in.

    Raises:
        ValueError: groups hold other parameters than the saved ones.
    """
    names = _names(optimizer, module)
    numbers = {name: number for number, name in enumerate(names)}
    saved = {frozenset(group["params"]): group for group in state["param_groups"]}
    groups, begin = [], 0
    for position, group in enumerate(optimizer.param_groups):
        own = names[begin : begin + len(group["params"])]
        found = saved.get(frozenset(own))
        if found is None:
            raise ValueError(_other_groups(position, own, state["param_groups"]))
        groups.append(found | {"params": list(range(begin, begin + len(own)))})
        begin += len(own)
    left = set(chain.from_iterable(saved)) - numbers.keys()
    entries = {numbers.get(name, name): value for name, value in state["state"].items() if name not in left}
    return {**state, "state": entries, "param_groups": groups}


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same state dict with the numbers that the parameters had in the optimizer that was saved."""
    names = list(chain.from_iterable(group["params"] for group in state["param_groups"]))
    numbers = {name: number for number, name in enumerate(names)}
    groups = [group | {"params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    entries = {numbers.get(name, name): value for name, value in state["state"].items()}
    return {**state, "state": entries, "param_groups": groups}


def _other_groups(position: int, own: list[str], saved: list[Mapping[str, Any]]) -> str:
    known = set(chain.from_iterable(group["params"] for group in saved))
    missing = [name for name in own if name not in known]
    if missing:
        what = f"trains {missing[0]!r}, of which the checkpoint's optimizer knows nothing"
        what += f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    else:
        what = f"holds other parameters than any of the {len(saved)} groups in the checkpoint"
    return (
        f"The optimizer's parameter group {position} {what}. Configure the optimizer as it was when the checkpoint was "
        "saved, or load only the weights with load_from_checkpoint()."
    )


def _names(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[str]:
    """Of the optimizer's parameters, in their order; of tied ones the first."""
    known = {id(param): name for name, param in module.named_parameters()}
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    return [known.get(id(param), f"a parameter outside of the module, number {n}") for n, param in enumerate(params)]
