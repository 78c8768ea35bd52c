"""What a tensor spans is what its memory must have."""

import pytest
import torch

from lightning_zero.sharding.tensor_extent import extent

BASE = torch.arange(60).view(3, 4, 5)
TENSORS = {
    "plain": BASE,
    "transposed": BASE.permute(2, 0, 1),
    "with gaps": BASE[::2, 1:3, ::4],
    "expanded": BASE[:, :1].expand(3, 9, 5),
    "one element": BASE[1, 1, 1],
    "empty": BASE[:, :0],
}


@pytest.mark.parametrize("name", TENSORS)
def test_it_is_as_far_as_the_last_element(name: str) -> None:
    tensor = TENSORS[name]
    first = tensor.storage_offset()
    last = max((int(value) for value in tensor.flatten()), default=first - 1)  # values say where they lie
    assert extent(tensor.size(), tensor.stride()) == last + 1 - first
