"""Full checkpoints: plain state dicts, as a single process would write them, gathered on rank 0 tensor by tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.inventory import OptimizerInventory, gather_value
from lightning_zero.checkpoint.sharded.values import SavedValue
from lightning_zero.sharding.record import ShardedParameter
from lightning_zero.sharding.refusals import on_plain_tensors
from lightning_zero.sharding.shard import Sharder
from lightning_zero.sharding.state import StateDictHooks, whole_on_cpu

__all__ = ["model_state", "optimizer_state", "shard_optimizer_state"]


def model_state(module: nn.Module, hooks: StateDictHooks) -> dict[str, Any]:
    """The module's state dict with whole values on the CPU of rank 0; empty on other ranks. Collective."""
    here = hooks.sharder.mesh.rank == 0
    tied: dict[int, Tensor | None] = {}  # they stay one tensor, as in a plain module's state dict
    whole: set[int] = set()

    def show(record: ShardedParameter) -> Tensor | None:
        value = tied[record.index] if record.index in tied else whole_on_cpu(record, here)
        if len(record.owners) > 1:
            tied[record.index] = value
        whole.add(id(value))  # which the state dict keeps
        return value

    with hooks.showing(show):
        state = module.state_dict()
    if not here:
        return {}
    copies: dict[int, Tensor] = {}  # of buffers, too: a file may be written while they change
    for key, value in state.items():
        if isinstance(value, Tensor) and id(value) not in whole:
            state[key] = copies.setdefault(id(value), value.detach().to("cpu", copy=True))
    return state


@on_plain_tensors
def optimizer_state(optimizer: torch.optim.Optimizer, sharder: Sharder) -> dict[str, Any]:
    """The optimizer's state dict with whole values on the CPU of rank 0; empty on other ranks. Collective."""
    packed = optimizer.state_dict()
    if not packed:
        return {}  # Lightning's stand-in for no optimizer
    rank = sharder.mesh.rank
    state: dict[int, dict[str, Any]] = {}
    for number, entries in OptimizerInventory(optimizer, sharder).held(packed).items():
        whole = {entry.key: gather_value(entry.value, entry.record, sharder.mesh) for entry in entries}
        if rank == 0:
            # Copies: a file would hold the padding, too, and training may go on before it is written.
            state[number] = {k: v.to("cpu", copy=True) if isinstance(v, Tensor) else v for k, v in whole.items()}
    return {"state": state, "param_groups": packed["param_groups"]} if rank == 0 else {}


def shard_optimizer_state(state: dict[str, Any], optimizer: torch.optim.Optimizer, sharder: Sharder) -> dict[str, Any]:
    """This rank's part of a whole optimizer state dict, for ``optimizer.load_state_dict``. Not collective.

    Raises:
        ValueError: the state was saved for parameters of other shapes, or without an optimizer.
    """
    if not state:
        if optimizer.state_dict():
            raise ValueError(
                "The checkpoint was written where configure_optimizers() returned nothing, so it holds no state for "
                f"{type(optimizer).__name__}. Load only the weights: with load_from_checkpoint(), or by "
                "load_state_dict() in configure_model()."
            )
        return {}
    saved, here = _sizes(state["param_groups"]), _sizes(optimizer.param_groups)
    if saved != here:
        raise ValueError(
            f"The checkpoint's optimizer has parameter groups of {saved} parameters, and {type(optimizer).__name__} of "
            f"{here}. Configure the optimizer as it was when the checkpoint was saved, or load only the weights with "
            "load_from_checkpoint()."
        )
    sharded: dict[Any, Any] = dict(state["state"])
    for number, entries in OptimizerInventory(optimizer, sharder).saved(state).items():
        sharded[number] = {e.key: _whole(e.value) if e.record is None else e.record.part_of(e.value) for e in entries}
    return {"state": sharded, "param_groups": state["param_groups"]}


def _sizes(groups: list[dict[str, Any]]) -> str:
    return ", ".join(str(len(group["params"])) for group in groups) or "no"


def _whole(value: Any) -> Any:
    """What is the same on every rank, in memory of its own where it still lies in a checkpoint."""
    return value.whole() if isinstance(value, SavedValue) else value
