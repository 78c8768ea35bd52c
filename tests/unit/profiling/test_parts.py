"""Parts of one memory are what slices and views of one tensor are."""

import pytest
import torch
from torch import Tensor

from lightning_zero.compat.tensors import FakeTensorMode
from lightning_zero.profiling.graph_tensors import FakeBuffer

fake = FakeTensorMode()


def described(value: Tensor) -> tuple[object, ...]:
    return type(value), value.dtype, value.device, value.shape, value.stride(), value.storage_offset()


@pytest.mark.parametrize("shape", [[24], [2, 3, 4], [6, 1, 4], [0, 3], [4, 0, 2], []], ids=str)
@pytest.mark.parametrize("like", ["fake", "meta"])
def test_a_part_is_a_view_of_a_slice(shape: list[int], like: str) -> None:
    with fake:
        value = torch.empty(2, dtype=torch.bfloat16) if like == "fake" else None
    value = torch.empty(2, dtype=torch.bfloat16, device="meta") if value is None else value
    numel = torch.Size(shape).numel()
    whole = value.new_empty(40)
    memory = FakeBuffer(value, 40)
    assert described(memory.part(5, shape)) == described(whole[5 : 5 + numel].view(shape))


def test_parts_lie_in_one_memory_inside_a_mode_or_not() -> None:
    with fake:
        value = torch.empty(2)
        memory = FakeBuffer(value, 40)
        parts = [memory.part(0, [40]), memory.part(8, [4, 2])]
    parts.append(memory.part(16, [4]))
    assert len({part.untyped_storage()._cdata for part in parts}) == 1
    assert parts[1].fake_mode is fake
    with fake:
        assert (parts[1] + parts[2][:2]).shape == (4, 2)
