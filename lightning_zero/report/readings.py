"""What an engine says of itself: memory by what it is for, and what is not replayed and why."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_zero.compat.tensors import tree_leaves
from lightning_zero.engine import Engine
from lightning_zero.sharding.param_record import Role
from lightning_zero.sharding.shard_tensor import no_shard_dispatch

__all__ = ["memory_by_role", "replay_blockers"]

FORWARD_BACKWARD, OPTIMIZER = "forward_backward", "optimizer_step"


def memory_by_role(engine: Engine, optimizers: Sequence[torch.optim.Optimizer] = ()) -> dict[str, int]:
    """Bytes of this rank. What peers read is also counted by what it is for, and ``transports`` is memory that the device's
    allocator knows nothing of; what ends in ``_on_host`` is
    memory of the host."""
    memory = engine.sharder.memory
    with no_shard_dispatch():
        found = {role.value.replace(" ", "_").replace("-", "_"): _bytes(memory.tensors(role)) for role in Role}
        copies = {
            t.data_ptr() for what in (Role.COMPUTE_SHARD, Role.FULL_PRECISION_SHARD) for t in memory.tensors(what)
        }
        # Other gradients lie over copies, and other resident weights are host shards.
        for name, role in (("gradient", Role.GRADIENT), ("resident_weight", Role.UNSHARDED_CACHE)):
            found[name] = _bytes([tensor for tensor in memory.tensors(role) if tensor.data_ptr() not in copies])
        away = memory.on_host.nbytes if memory.on_host is not None else 0
        found["master_shard"] -= away
        found["master_shard_on_host"] = away
        kept = tree_leaves([list(optimizer.state.values()) for optimizer in optimizers])
        states = [value for value in kept if isinstance(value, torch.Tensor)]
        states_away = [value for value in states if engine.optimizers.on_host and value.device.type == "cpu"]
        found["optimizer_state"] = _bytes(states) - _bytes(states_away)
        found["optimizer_state_on_host"] = _bytes(states_away)
    found["reduce_buckets"] = engine.executor.counters().get("bucket_bytes", 0)
    found["activations_on_host"] = engine.executor.activations.nbytes
    found["captures"] = engine.replays.nbytes
    found["peers"] = engine.transports.nbytes
    return found


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def replay_blockers(engine: Engine, optimizers: Sequence[torch.optim.Optimizer] = ()) -> dict[str, str]:
    """Of ``forward_backward`` and ``optimizer_step``: why they are not replayed as graphs of the device, in words;
    empty where nothing is known against it."""
    compiled = engine.config.compiled.enabled
    steps = [engine.optimizers.stepper(optimizer).eager_reason for optimizer in optimizers]
    return {
        FORWARD_BACKWARD: engine.replays.disabled_reason() if compiled else "nothing is compiled",
        OPTIMIZER: "; ".join(sorted({reason for reason in steps if reason})),
    }
