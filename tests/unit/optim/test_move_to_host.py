"""State leaves the device as soon as it is to lie on the host."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_zero.optim.move_to_host import move_state_to_host


class OnDevice:
    """Stands for a tensor of a device that this machine has not."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def to(self, device: str) -> str:
        return f"{self.shape} on {device}"


def test_what_is_as_large_as_shards_leaves_and_the_rest_stays() -> None:
    shard, stranger = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    record: Any = SimpleNamespace(has_shard_shape=lambda value: getattr(value, "shape", None) == (4,))
    optimizer: Any = SimpleNamespace(state={})
    count, kept = OnDevice(()), OnDevice((4,))
    optimizer.state[shard] = {"exp_avg": OnDevice((4,)), "step": count, "lr": 0.1}
    optimizer.state[stranger] = {"exp_avg": kept}
    entries = optimizer.state[shard]
    move_state_to_host(optimizer, lambda param: record if param is shard else None)
    assert optimizer.state[shard] is entries
    assert entries == {"exp_avg": "(4,) on cpu", "step": count, "lr": 0.1}
    assert optimizer.state[stranger] == {"exp_avg": kept}
