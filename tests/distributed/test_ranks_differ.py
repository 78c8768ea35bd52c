"""Ranks that do not do the same: gradients that only some of them have, arriving in another order on each."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.engine import Engine
from tests.helpers.options import config
from tests.helpers.oracle import assert_close_relative
from tests.helpers.spread import check_spread
from tests.ranks.pool import Ranks


class Uneven(nn.Module):
    """Every rank reads the same weights in the same order, as a collective requires.

    Only the added values differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(19, 25)
        self.only_0 = nn.Parameter(torch.randn(25))
        self.one, self.two = nn.Parameter(torch.randn(25)), nn.Parameter(torch.randn(1))
        self.unused = nn.Parameter(torch.randn(33))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = torch.tanh(self.linear(x))
        only_0, one, two, _ = self.only_0, self.one, self.two, self.unused
        first, then = (one, two) if rank % 2 else (two, one)
        x = torch.tanh(x + first) + then
        return x + only_0 if rank == 0 else x


def train(bucket_mb: float) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = Uneven()
    reference = Uneven()
    reference.load_state_dict(model.state_dict())
    engine = Engine(torch.device("cpu"), config(compile=False, reduce_bucket_mb=bucket_mb))
    engine.shard(model)
    check_spread(engine, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.5)
    batches = torch.randn(3, world, 4, 19)
    for batch in batches:
        with engine.train_step():
            loss = model(batch[rank], rank).square().mean()
        loss.backward()
        sum(reference(batch[r], r).square().mean() / world for r in range(world)).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        assert dict(model.named_parameters())["unused"].grad is None
        with engine.optimizers.stepping(optimizer, clip=0.5) as norm:
            assert_close_relative(norm, expected, 1e-5, what="norm")
            optimizer.step()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
        with engine.full_parameters(writeback=False):
            mine = {name: param.detach().clone() for name, param in model.named_parameters()}
        assert_close_relative(mine, dict(reference.named_parameters()), 1e-5)
        assert torch.equal(mine["unused"], reference.unused), "weight decay reached a parameter that no rank used"
    engine.close()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("bucket_mb", [64.0, 1e-6], ids=["one bucket", "a bucket each"])
def test_a_gradient_that_a_rank_lacks_is_zero_there(ranks: Ranks, world_size: int, bucket_mb: float) -> None:
    ranks.run(world_size, train, bucket_mb)
