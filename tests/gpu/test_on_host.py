"""Copies of a GPU's values in memory of the host."""

import pytest
import torch
from torch import Tensor

from lightning_zero.sharding.host_memory import BLOCK_BYTES, copy_to_host

pytestmark = pytest.mark.gpu(1)


def large(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize(
    "make",
    [
        lambda: large(3 * BLOCK_BYTES // 4 + 5),
        lambda: large(4000, 9001, dtype=torch.bfloat16),
        lambda: large(64, 128, 40, 40).contiguous(memory_format=torch.channels_last),
        lambda: large(5000, 5000).t(),
        lambda: large(5000, 5000)[:, ::2],
        lambda: large(5000, 1).expand(5000, 5000),
        lambda: large(10),
        lambda: torch.ones((), device="cuda"),
    ],
)
def test_a_copy_holds_what_was_there_when_it_was_asked_for(make: object) -> None:
    value: Tensor = make()  # type: ignore[operator]
    expected = value.cpu()
    copy = copy_to_host(value)
    if value.is_contiguous():
        value.zero_()
    assert copy.device.type == "cpu"
    assert not copy.is_pinned()
    assert copy.stride() == value.to("cpu", copy=True).stride()
    assert torch.equal(copy, expected)
