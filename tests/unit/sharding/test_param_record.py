"""Test the records of sharded parameters."""

from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn

from lightning_zero.sharding.layout import ShardLayout
from lightning_zero.sharding.param_record import Records, Role, ShardedParameter


def find_record(*shape: int, index: int = 0, rank: int = 0, owned: bool = True) -> ShardedParameter:
    layout = ShardLayout.from_shape(torch.Size(shape), torch.float32, 2)
    param = nn.Parameter(torch.zeros(layout.visible_shape))
    spec: Any = MagicMock(shard_index=rank)
    record = ShardedParameter(index, f"p{index}", param, layout, {Role.MASTER_SHARD: param.data.view(-1)}, spec)
    record.owners = [(nn.Module(), "p")] if owned else []
    return record


def test_a_rank_takes_its_part_of_a_whole_value() -> None:
    whole = torch.arange(70, dtype=torch.float64).view(7, 10)
    parts = [find_record(7, 10, rank=rank).local_part(whole) for rank in range(2)]
    layout = find_record(7, 10).layout
    assert all(part.shape == layout.visible_shape and part.dtype == torch.float64 for part in parts)
    together = torch.cat([part.view(-1) for part in parts])
    assert together[:70].equal(whole.view(-1))
    assert not together[70:].any()


def test_what_has_an_element_for_each_of_the_shards_is_told_by_its_visible_shape() -> None:
    record = find_record(7, 10)
    assert record.has_shard_shape(torch.zeros(record.layout.visible_shape, dtype=torch.bfloat16))
    for other in (torch.zeros(()), torch.zeros(7, 10), torch.zeros(record.layout.shard_numel), 3.0, None):
        assert not record.has_shard_shape(other)


def test_records_are_found_by_their_parameter_and_their_index() -> None:
    records = Records()
    found = [find_record(3, index=0), find_record(3, index=1, owned=False), find_record(3, index=2)]
    for record in found:
        records.add(record)
    assert [records.find(record.param) for record in records] == found
    assert records.find(nn.Parameter(torch.zeros(3))) is None
    assert [records[index] for index in range(3)] == found
    assert records.live == [found[0], found[2]]
