"""What is known of one sharded parameter, and of all."""

from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn

from lightning_zero.sharding.layout import ShardLayout
from lightning_zero.sharding.record import Records, Role, ShardedParameter


def record_of(*shape: int, index: int = 0, rank: int = 0, owned: bool = True) -> ShardedParameter:
    layout = ShardLayout.of(torch.Size(shape), torch.float32, 2)
    param = nn.Parameter(torch.zeros(layout.visible_shape))
    sight: Any = MagicMock(number=rank)
    record = ShardedParameter(index, f"p{index}", param, layout, {Role.MASTER_SHARD: param.data.view(-1)}, sight)
    record.owners = [(nn.Module(), "p")] if owned else []
    return record


def test_a_rank_takes_its_part_of_a_whole_value() -> None:
    whole = torch.arange(70, dtype=torch.float64).view(7, 10)
    parts = [record_of(7, 10, rank=rank).part_of(whole) for rank in range(2)]
    layout = record_of(7, 10).layout
    assert all(part.shape == layout.visible_shape and part.dtype == torch.float64 for part in parts)
    together = torch.cat([part.view(-1) for part in parts])
    assert together[:70].equal(whole.view(-1))
    assert not together[70:].any()


def test_what_has_an_element_for_each_of_the_shards_is_told_by_its_visible_shape() -> None:
    record = record_of(7, 10)
    assert record.is_like_shard(torch.zeros(record.layout.visible_shape, dtype=torch.bfloat16))
    for other in (torch.zeros(()), torch.zeros(7, 10), torch.zeros(record.layout.shard_numel), 3.0, None):
        assert not record.is_like_shard(other)


def test_records_are_found_by_their_parameter_and_their_index() -> None:
    records = Records()
    found = [record_of(3, index=0), record_of(3, index=1, owned=False), record_of(3, index=2)]
    for record in found:
        records.add(record)
    assert [records.find(record.param) for record in records] == found
    assert records.find(nn.Parameter(torch.zeros(3))) is None
    assert [records[index] for index in range(3)] == found
    assert records.live == [found[0], found[2]]
