"""Test that loaded state keeps its placement and dtype, and that hooks see tensors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.optim.bf16_state import ROUNDING_COUNT
from lightning_zero.optim.state_placement import move_state_to_host, place_loaded_state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_what_has_one_element_goes_to_the_parameters_device(dtype: torch.dtype) -> None:
    made = torch.nn.Parameter(torch.randn(40))
    first = torch.optim.NAdam([made])
    made.grad = torch.randn(40)
    first.step()
    saved = first.state_dict()
    # Like a device other than the host: torch would move all but the step count there.
    param = torch.nn.Parameter(torch.empty(40, dtype=dtype, device="meta"))
    optimizer = torch.optim.NAdam([param])
    seen: list[Any] = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(type(state["state"][0]["exp_avg"])))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(type(o.state[param]["exp_avg"])))
    with place_loaded_state(optimizer, lambda _: lambda param, key, value: value.to(param.dtype)):
        optimizer.load_state_dict(saved)
    state = optimizer.state[param]
    assert seen == [torch.Tensor, torch.Tensor]
    for key in ("exp_avg", "exp_avg_sq"):
        assert state[key].device.type == "cpu"
        assert torch.equal(state[key], first.state[made][key].to(dtype))
    assert state["mu_product"].device.type == "meta"
    assert float(state["step"]) == 1
    assert list(state) == list(first.state[made])
    optimizer.load_state_dict(saved)
    assert optimizer.state[param]["exp_avg"].device.type == "meta"


def test_a_count_of_ours_is_as_wide_as_it_was() -> None:
    """Torch would round it to the parameter's dtype: bfloat16 counts to 256."""
    param = torch.nn.Parameter(torch.zeros(40, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([param], momentum=0.9)
    saved = optimizer.state_dict()
    saved["state"][0] = {"momentum_buffer": torch.zeros(40), ROUNDING_COUNT: torch.tensor(1001.0)}
    with place_loaded_state(optimizer, lambda _: lambda param, key, value: value.to(param.dtype)):
        optimizer.load_state_dict(saved)
    assert optimizer.state[param][ROUNDING_COUNT].tolist() == 1001
    assert optimizer.state[param]["momentum_buffer"].dtype is torch.bfloat16


class OnDevice:
    """Stands for a tensor on a device that this machine does not have."""

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
