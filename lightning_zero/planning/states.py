"""What an optimizer keeps: asked of the optimizer itself, by a step on shards of a few elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_zero.planning.ledger import Ledger
from lightning_zero.planning.static import Cut

__all__ = ["Kept", "kept_by"]

SMALL = 64  # elements of a shard that stands for one of any size


@dataclass(frozen=True)
class Kept:
    """Of one rank, in bytes.

    Attributes:
        states: what stays from step to step.
        temporary: what a step takes besides, for a moment, where the optimizer itself makes it.
        words: what is kept for each element, for instance "exp_avg 4, exp_avg_sq 4".
    """

    states: int
    temporary: int
    words: str


def kept_by(optimizers: Sequence[torch.optim.Optimizer], params: Sequence[nn.Parameter], cuts: Sequence[Cut]) -> Kept:
    """Of optimizers of ``params``, which are cut like that. Their groups hold other parameters afterwards.

    Raises:
        Exception: whatever their step raises.
    """
    of = {id(param): cut for param, cut in zip(params, cuts, strict=True)}
    states = temporary = 0
    words: dict[str, int] = {}
    for optimizer in optimizers:
        stood_for: dict[Tensor, Cut] = {}
        for group in optimizer.param_groups:
            chosen = [of[id(param)] for param in group["params"] if of[id(param)].trained]
            group["params"] = [_small(cut) for cut in chosen]
            stood_for.update(zip(group["params"], chosen, strict=True))
        ledger = Ledger(stood_for)
        with ledger:
            optimizer.step()
        per_element = (ledger.peak - ledger.alive) / max(sum(param.nbytes for param in stood_for), 1)
        temporary = max(temporary, int(per_element * sum(cut.elements * cut.dtype.itemsize for cut in of.values())))
        for param, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    alike = value.shape == param.shape
                    states += value.itemsize * (stood_for[param].elements if alike else value.numel())
                    words |= {name: value.itemsize} if alike else {}
    return Kept(states, temporary, ", ".join(f"{name} {size}" for name, size in words.items()) or "nothing")


def _small(cut: Cut) -> nn.Parameter:
    """A parameter with as many dimensions as a shard has."""
    shape = (1,) * (len(cut.layout.shape) - 1) + (SMALL,)
    param = nn.Parameter(torch.zeros(shape, dtype=cut.dtype))
    param.grad = torch.zeros_like(param)
    return param
