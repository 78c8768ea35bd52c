"""Ranges of flattened tensors as boxes, compared with torch's own indexing."""

import random
from math import prod

import pytest
import torch

from lightning_zero.checkpoint.sharded.boxes import Box, boxes, overlap


def test_boxes_hold_the_range_in_order_and_are_few() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(0, 4)))
        whole = torch.arange(prod(shape)).view(shape)
        begin = rng.randint(0, whole.numel())
        end = rng.randint(begin, whole.numel())
        everything = Box((0,) * len(shape), shape)
        for most in (None, 1, 3, 7):
            found = boxes(shape, begin, end, most)
            parts = [whole[box.within(everything)].reshape(-1) for box in found]
            assert torch.equal(torch.cat([*parts, whole.new_empty(0)]), torch.arange(begin, end)), (shape, begin, end)
            if most is None:
                assert len(found) <= max(1, 2 * len(shape) - 1)
            else:
                assert all(box.numel <= most for box in found)


def test_large_boxes_are_cut_between_rows() -> None:
    assert boxes((100, 10), 0, 1000, 250) == [Box((25 * n, 0), (25, 10)) for n in range(4)]
    assert [box.numel for box in boxes((7, 1, 10), 0, 70, 30)] == [30, 30, 10]


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (Box((), ()), Box((), ()), Box((), ())),
        (Box((0, 0), (4, 4)), Box((2, 3), (4, 4)), Box((2, 3), (2, 1))),
        (Box((0,), (4,)), Box((4,), (4,)), None),
        (Box((0, 0), (0, 4)), Box((0, 0), (0, 4)), None),
    ],
)
def test_overlap(one: Box, other: Box, shared: Box | None) -> None:
    assert overlap(one, other) == shared == overlap(other, one)


def test_a_box_of_a_permuted_tensor_holds_the_same_elements() -> None:
    whole = torch.arange(24).view(2, 3, 4)
    box = Box((0, 1, 2), (2, 1, 2))
    order = (2, 0, 1)
    permuted = box.permuted(order)
    everything = Box((0, 0, 0), (2, 3, 4))
    ours = whole.permute(order)[permuted.within(everything.permuted(order))]
    assert torch.equal(ours, whole[box.within(everything)].permute(order))
