"""The ranks that share a model: who they are, and that parts of the world do not hear each other."""

from dataclasses import FrozenInstanceError
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_zero.mesh import Mesh, host_name, numbered
from tests.ranks.pool import Ranks

CPU = torch.device("cpu")


def whole_world() -> None:
    mesh = Mesh.of(CPU, timedelta(seconds=77))
    assert (mesh.rank, mesh.world_size, mesh.timeout_s) == (dist.get_rank(), dist.get_world_size(), 77.0)
    assert mesh.hosts == (0,) * mesh.world_size
    assert mesh.world_group is dist.group.WORLD
    assert len({*mesh.device_groups, mesh.control_group}) == 4
    assert mesh.gathered(f"rank {mesh.rank}") == [f"rank {rank}" for rank in range(mesh.world_size)]
    assert Mesh.of(CPU).timeout_s == dist.constants.default_pg_timeout.total_seconds()
    with pytest.raises(FrozenInstanceError):
        mesh.rank = 0  # type: ignore[misc]


def test_a_mesh_of_all_ranks(ranks: Ranks) -> None:
    ranks.run(2, whole_world)


def parts_of_the_world(parts: list[list[int]]) -> None:
    me = dist.get_rank()
    mesh = Mesh.over(parts, CPU)
    mine = next(sorted(part) for part in parts if me in part)
    assert (mesh.rank, mesh.world_size) == (mine.index(me), len(mine))
    for group in (mesh.shard_group, mesh.reduce_group, mesh.control_group):
        assert dist.get_process_group_ranks(group) == mine
        total = torch.tensor([1 << me])
        dist.all_reduce(total, group=group)
        assert int(total) == sum(1 << rank for rank in mine), "another part was heard"
    assert mesh.gathered(me) == mine
    mesh.store("test").set("told", str(mine))
    dist.barrier()
    assert mesh.store("test").get("told") == str(mine).encode()


@pytest.mark.parametrize("parts", [[[0, 2], [1]], [[1, 0], [2]], [[2], [1], [0]]], ids=str)
def test_parts_of_the_world_do_not_hear_each_other(ranks: Ranks, parts: list[list[int]]) -> None:
    ranks.run(3, parts_of_the_world, parts)


def hosts_of_each(names: list[str]) -> tuple[int, ...]:
    with patch("lightning_zero.mesh.host_name", lambda: names[dist.get_rank()]):
        return Mesh.of(CPU).hosts


def test_ranks_know_who_shares_a_host(ranks: Ranks) -> None:
    assert ranks.run(3, hosts_of_each, ["b", "a", "b"]) == [(0, 1, 0)] * 3


def refused(parts: list[list[int]]) -> str:
    with pytest.raises(ValueError, match="do not divide the 2 processes") as caught:
        Mesh.over(parts, CPU)
    return str(caught.value)


@pytest.mark.parametrize("parts", [[[0]], [[0, 1], [1]], [[0, 1], []], [[0], [1], [2]], [[0, 0, 1]], []], ids=str)
def test_parts_that_leave_a_rank_out_or_share_one_are_refused(ranks: Ranks, parts: list[list[int]]) -> None:
    for message in ranks.run(2, refused, parts):
        assert "Give each rank from 0 to 1 to exactly one part" in message


def test_ranks_must_have_found_each_other() -> None:
    for make in (lambda: Mesh.of(CPU), lambda: Mesh.over([[0]], CPU)):
        with pytest.raises(RuntimeError, match=r"Call torch.distributed.init_process_group\(\) first"):
            make()


def test_hosts_are_numbered_as_they_come() -> None:
    assert numbered(["x", "y", "x", "z", "y"]) == (0, 1, 0, 2, 1)
    assert numbered([]) == ()


def test_a_host_is_told_from_others_by_its_name_and_its_boot() -> None:
    here = host_name()
    assert here == host_name()
    with patch("socket.gethostname", lambda: "another"):
        assert host_name() != here
    with patch("lightning_zero.mesh.boot_id", lambda: "another"):
        assert host_name() != here
