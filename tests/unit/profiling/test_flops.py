"""Operations that run eagerly are counted, in forward and in backward."""

import torch
import torch.nn.functional as F
from torch import nn

from lightning_zero.profiling.node_costs import FlopCount


def test_forward_and_backward_are_counted() -> None:
    layer, x = nn.Linear(4, 8), torch.ones(2, 4)
    with FlopCount() as count:
        loss = layer(x).sum()
        assert count.total == 2 * 2 * 4 * 8
        loss.backward()
    assert count.total == 2 * (2 * 2 * 4 * 8), "only the weight has a gradient"
    layer(x)
    assert count.total == 2 * (2 * 2 * 4 * 8), "no more after the end"


def test_attention_is_counted_on_cpus() -> None:
    q = torch.ones(1, 2, 8, 16, requires_grad=True)
    with FlopCount() as count:
        F.scaled_dot_product_attention(q, q, q)
    assert count.total == 2 * (2 * 2 * 8 * 8 * 16)
