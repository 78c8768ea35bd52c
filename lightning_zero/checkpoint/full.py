"""Full checkpoints: plain state dicts, as a single process would write them, gathered on rank 0 tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.inventory import Entry, OptimizerStateEntries, gather_value, nested
from lightning_zero.checkpoint.sharded.values import CheckpointTensor
from lightning_zero.checkpoint.telling import Telling, untold
from lightning_zero.compat.tensors import tree_map_only
from lightning_zero.sharding.host_memory import copy_to_host
from lightning_zero.sharding.mapped import mapped
from lightning_zero.sharding.record import ShardedParameter
from lightning_zero.sharding.shard import Sharder
from lightning_zero.sharding.state import StateDictHooks, ignore_bytes, full_on_cpu
from lightning_zero.sharding.unsupported import without_shard_dispatch

__all__ = ["Room", "model_state", "optimizer_state", "shard_optimizer_state"]

Room = Callable[[int, torch.dtype], Tensor]  # new memory for so many elements, 1-D


def model_state(module: nn.Module, hooks: StateDictHooks, gathered: Callable[[int], object] = ignore_bytes) -> dict[str, Any]:
    """The module's state dict with whole values on the CPU of rank 0; empty on other ranks. Collective.

    gathered: is told of bytes
    """
    here = hooks.sharder.mesh.rank == 0
    tied: dict[int, Tensor | None] = {}  # they stay one tensor, as in a plain module's state dict
    whole: set[int] = set()

    def show(record: ShardedParameter) -> Tensor | None:
        if record.index in tied:
            value = tied[record.index]
        else:
            value = full_on_cpu(record, here)
            gathered(record.layout.numel * record.param.itemsize)
        if len(record.owners) > 1:
            tied[record.index] = value
        whole.add(id(value))  # which the state dict keeps
        return value

    with hooks.overriding_values(show):
        state = module.state_dict()
    if not here:
        return {}
    copies: dict[int, Tensor] = {}  # of buffers, too: a file may be written while they change
    for key, value in state.items():
        if isinstance(value, Tensor) and id(value) not in whole:
            state[key] = copies.setdefault(id(value), copy_to_host(value))
    return state


@without_shard_dispatch
def optimizer_state(
    optimizer: torch.optim.Optimizer, sharder: Sharder, telling: Callable[[int], Telling] | None = None
) -> dict[str, Any]:
    """The optimizer's state dict with whole values on the CPU of rank 0; empty on other ranks. Collective.

    telling: gives what tells of so many bytes
    """
    packed = optimizer.state_dict()
    if not packed:
        return {}  # Lightning's stand-in for no optimizer
    rank = sharder.mesh.rank
    state: dict[int, dict[str, Any]] = {}
    found = OptimizerStateEntries(optimizer, sharder).held(packed)
    with (telling or untold)(sum(map(_whole_bytes, chain.from_iterable(found.values())))) as gathered:
        for number, entries in found.items():
            kept: list[Any] = []
            for entry in entries:
                whole = gather_value(entry.value, entry.record, sharder.mesh)  # one at a time
                if rank == 0:
                    # A copy: a file would hold the padding, too, and training may go on before it is written.
                    kept.append(copy_to_host(whole) if isinstance(whole, Tensor) else whole)
                del whole
                gathered(_whole_bytes(entry))
            if rank == 0:
                state[number] = nested(entries, kept)
    if rank:
        return {}
    rest = {key: value for key, value in packed["state"].items() if key not in state}  # of no parameter
    return {**packed, "state": state | tree_map_only(Tensor, copy_to_host, rest)}


def shard_optimizer_state(
    state: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    sharder: Sharder,
    room: Room | None = None,
    telling: Callable[[int], Telling] | None = None,
) -> dict[str, Any]:
    """This rank's part of a whole optimizer state dict, for ``optimizer.load_state_dict``. Not collective.

    Args:
        state: the whole one.
        optimizer: which will load it.
        sharder: knows its parameters.
        room: where the part goes; None: the host, where all of it would stand for a while on its way to a device.
        telling: gives what tells of so many bytes.

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
    found = OptimizerStateEntries(optimizer, sharder).saved(state)
    parts = _parts(found, room or _on_host, telling or untold)
    for number, entries in found.items():
        values = [_whole(e.value) if e.record is None else parts[number, e.path] for e in entries]
        sharded[number] = nested(entries, values)
    return tree_map_only(CheckpointTensor, _whole, {**state, "state": sharded})


def _parts(
    found: Mapping[int, Sequence[Entry]], room: Room, telling: Callable[[int], Telling]
) -> dict[tuple[int, tuple[str, ...]], Tensor]:
    """This rank's elements of what is cut, by parameter and key. What stands under one key lies in one piece of memory,
    in the order of the shards, as optimizers step it: nobody need move it later, which would take as much again."""
    together: dict[tuple[tuple[str, ...], torch.dtype], list[tuple[int, ShardedParameter, Tensor]]] = {}
    for number, entries in found.items():
        for e in entries:
            if e.record is not None:
                together.setdefault((e.path, e.value.dtype), []).append((number, e.record, e.value))
    parts: dict[tuple[int, tuple[str, ...]], Tensor] = {}
    total = sum(r.layout.shard_numel * v.itemsize for values in together.values() for _, r, v in values)
    with telling(total) as read:
        for (path, dtype), values in together.items():
            values.sort(key=lambda one: one[1].shard.data_ptr())
            sizes = [record.layout.shard_numel for _, record, _ in values]
            for piece, (number, record, value) in zip(room(sum(sizes), dtype).split(sizes), values, strict=True):
                record.write_local_part(mapped(value), piece)
                parts[number, path] = piece.view(record.layout.visible_shape)
                read(piece.nbytes)
    return parts


def _whole_bytes(entry: Entry) -> int:
    return 0 if entry.record is None else int(entry.record.layout.numel * entry.value.itemsize)


def _on_host(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype)


def _sizes(groups: list[dict[str, Any]]) -> str:
    return ", ".join(str(len(group["params"])) for group in groups) or "no"


def _whole(value: Any) -> Any:
    """What is the same on every rank, in memory of its own where it still lies in a checkpoint."""
    return value.whole() if isinstance(value, CheckpointTensor) else value
