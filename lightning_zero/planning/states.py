"""What an optimizer keeps: asked of the optimizer itself, by a step on shards of a few elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_zero.optim.bf16_state import STATE_DTYPE, keeps_bf16_state
from lightning_zero.optim.flat_runs import MAX_CHUNK_NUMEL
from lightning_zero.optim.update_rules import rule_for
from lightning_zero.planning.ledger import MemoryCounter
from lightning_zero.planning.static import ParamShard

__all__ = ["OptimizerMemory", "measure_optimizer_memory"]

SMALL = 64  # elements of a shard that stands for one of any size


@dataclass(frozen=True)
class OptimizerMemory:
    """Of one rank, in bytes.

    Attributes:
        states: what stays from step to step.
        temporary: what a step takes besides, for a moment, where the optimizer itself makes it.
        words: what is kept for each element, for instance "exp_avg 4, exp_avg_sq 4".
    """

    states: int
    temporary: int
    words: str


def measure_optimizer_memory(
    optimizers: Sequence[torch.optim.Optimizer],
    params: Sequence[nn.Parameter],
    cuts: Sequence[ParamShard],
    narrow: bool = False,
) -> OptimizerMemory:
    """Of optimizers of ``params``, which are cut like that. Their groups hold other parameters afterwards. ``narrow``:
    as ``state_dtype="bf16"`` has it.

    Raises:
        Exception: whatever their step raises.
    """
    of = {id(param): cut for param, cut in zip(params, cuts, strict=True)}
    states = temporary = 0
    words: dict[str, int] = {}
    for optimizer in optimizers:
        stood_for: dict[Tensor, ParamShard] = {}
        for group in optimizer.param_groups:
            chosen = [of[id(param)] for param in group["params"] if of[id(param)].trained]
            group["params"] = [_small(cut) for cut in chosen]
            stood_for.update(zip(group["params"], chosen, strict=True))
        ledger = MemoryCounter(stood_for)
        with ledger:
            optimizer.step()
        per_byte = (ledger.peak - ledger.alive) / max(sum(param.nbytes for param in stood_for), 1)
        stepped = sum(cut.elements * cut.dtype.itemsize for cut in of.values())
        if narrow:  # the optimizer itself steps a few elements at a time
            stepped = min(stepped, MAX_CHUNK_NUMEL * torch.float32.itemsize)
        temporary = max(temporary, int(per_byte * stepped))
        names = _narrow(optimizer, stood_for) if narrow else {}
        for param, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    alike = value.shape == param.shape
                    size = STATE_DTYPE.itemsize if alike and name in names.get(param, ()) else value.itemsize
                    states += size * (stood_for[param].elements if alike else value.numel())
                    words |= {name: min(size, words.get(name, size))} if alike else {}
    return OptimizerMemory(states, temporary, ", ".join(f"{name} {size}" for name, size in words.items()) or "nothing")


def _narrow(optimizer: torch.optim.Optimizer, stood_for: dict[Tensor, ParamShard]) -> dict[Tensor, tuple[str, ...]]:
    found = {}
    for group in optimizer.param_groups:
        rule = rule_for(optimizer, group)
        for param in group["params"]:
            cut = stood_for[param]
            if rule is not None and keeps_bf16_state(cut.layout.numel, cut.dtype):
                found[param] = rule.state
    return found


def _small(cut: ParamShard) -> nn.Parameter:
    """A parameter with as many dimensions as a shard has."""
    shape = (1,) * (len(cut.layout.shape) - 1) + (SMALL,)
    param = nn.Parameter(torch.zeros(shape, dtype=cut.dtype))
    param.grad = torch.zeros_like(param)
    return param
