"""Full checkpoints: plain state dicts, as a single process would write them, gathered on rank 0 one tensor at a time.

Optimizer state of a parameter is recognised as sharded by having the shard's shape. Everything else (step counters,
scalars) is the same on every rank and passes through.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.profiling.bandwidth import all_gather_into
from lightning_zero.sharding.record import ShardedParameter
from lightning_zero.sharding.refusals import on_plain_tensors
from lightning_zero.sharding.shard import Sharder
from lightning_zero.sharding.state import StateDictHooks

__all__ = ["gather_value", "model_state", "optimizer_state", "shard_optimizer_state"]


def model_state(module: nn.Module, hooks: StateDictHooks) -> dict[str, Any]:
    """The module's state dict with whole values on the CPU of rank 0; empty on other ranks. Collective."""
    with hooks.mode("rank0"):
        state = module.state_dict()
    return state if hooks.sharder.mesh.rank == 0 else {}


@on_plain_tensors
def optimizer_state(optimizer: torch.optim.Optimizer, sharder: Sharder) -> dict[str, Any]:
    """The optimizer's state dict with whole values on the CPU of rank 0; empty on other ranks. Collective."""
    packed = optimizer.state_dict()
    if not packed:
        return {}  # Lightning's stand-in for no optimizer
    rank = sharder.mesh.rank
    state: dict[int, dict[str, Any]] = {}
    for number, record in _numbered(optimizer, sharder):
        if number not in packed["state"]:
            continue
        entries = packed["state"][number]
        whole = {key: gather_value(value, record, sharder) for key, value in entries.items()}
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
    sharded: dict[Any, Any] = dict(state["state"])
    known = [(n, record) for n, record in _numbered(optimizer, sharder) if n in sharded and record is not None]
    # A scalar parameter's moments and its step counter have the same shape; what is a scalar for all other parameters,
    # too, is no moment.
    others = [entry for n, r in known if r.layout.shape for entry in sharded[n].items() if isinstance(entry[1], Tensor)]
    scalars = {"step", *(k for k, v in others if v.dim() == 0)} - {k for k, v in others if v.dim() > 0}
    for number, record in known:
        sharded[number] = {
            key: value if key in scalars else _cut(key, value, record, sharder)
            for key, value in sharded[number].items()
        }
    return {"state": sharded, "param_groups": state["param_groups"]}


def _numbered(optimizer: torch.optim.Optimizer, sharder: Sharder) -> Iterator[tuple[int, ShardedParameter | None]]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return ((number, sharder.find(param)) for number, param in enumerate(params))


@on_plain_tensors
def gather_value(value: Any, record: ShardedParameter | None, sharder: Sharder) -> Any:
    """The whole of what has one element for each of a parameter's; anything else as it is. On the device; its memory
    holds padding, too. Collective."""
    if record is None or not isinstance(value, Tensor) or value.shape != record.layout.visible_shape:
        return value
    shard = value.reshape(-1).to(sharder.mesh.device)
    full = shard.new_empty(shard.numel() * sharder.mesh.world_size)
    all_gather_into()(full, shard, group=sharder.mesh.shard_group)
    return record.layout.whole(full)


def _cut(key: str, value: Any, record: ShardedParameter, sharder: Sharder) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape != record.layout.shape:
        raise ValueError(
            f"The checkpoint's optimizer state {key!r} for parameter {record.name!r} has shape {tuple(value.shape)}, "
            "but the parameter has "
            f"shape {tuple(record.layout.shape)}. The optimizer's parameters must come in the order in which they were "
            "saved."
        )
    shard = torch.zeros(record.layout.shard_numel, dtype=value.dtype)
    record.layout.write(shard, value, sharder.mesh.rank)
    return shard.view(record.layout.visible_shape)
