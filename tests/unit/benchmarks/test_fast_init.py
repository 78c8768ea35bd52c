"""Weights that are drawn quickly are spread like others, and only inside."""

import torch
from torch import nn

from compare.fast_init import DRAWN, quick_draws


def test_large_weights_repeat_a_million_numbers_of_the_right_spread() -> None:
    weight = nn.Parameter(torch.empty(3, DRAWN))
    with quick_draws():
        nn.init.normal_(weight, 2.0, 0.5)
    assert torch.equal(weight[0], weight[1])
    assert torch.equal(weight[0], weight[2])
    assert abs(weight.mean() - 2.0) < 0.01
    assert abs(weight.std() - 0.5) < 0.01


def test_small_weights_and_those_afterwards_are_drawn_as_ever() -> None:
    with quick_draws():
        small = torch.empty(1000).uniform_()
    after = torch.empty(2 * DRAWN).normal_()
    assert small.unique().numel() > 900
    assert not torch.equal(after[:DRAWN], after[DRAWN:])
