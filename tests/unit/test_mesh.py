"""Test the ranks that share a model, and that parts of the world do not communicate with each other."""

import re
from dataclasses import FrozenInstanceError
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_zero.engine import Engine
from lightning_zero.errors import UnsupportedError
from lightning_zero.mesh import Mesh, check_backend, host_name, host_numbers, number_names
from tests.ranks.pool import Ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def whole_world() -> None:
    mesh = Mesh.from_world(CPU, timedelta(seconds=77))
    assert (mesh.rank, mesh.world_size, mesh.timeout_s) == (dist.get_rank(), dist.get_world_size(), 77.0)
    assert mesh.hosts == (0,) * mesh.world_size
    assert mesh.world_group is dist.group.WORLD
    assert len({*mesh.device_groups, mesh.control_group}) == 4
    assert mesh.all_gather_values(f"rank {mesh.rank}") == [f"rank {rank}" for rank in range(mesh.world_size)]
    assert Mesh.from_world(CPU).timeout_s == dist.constants.default_pg_timeout.total_seconds()
    with pytest.raises(FrozenInstanceError):
        mesh.rank = 0  # type: ignore[misc]


def test_a_mesh_of_all_ranks(ranks: Ranks) -> None:
    ranks.run(2, whole_world)


def groups_of_a_world_for_one_device() -> list[tuple[str, torch.device | None]]:
    made: list[tuple[str, torch.device | None]] = []
    new_group = dist.new_group

    def new(*args: Any, **kwargs: Any) -> Any:
        assert dist.group.WORLD is not None
        made.append((kwargs["backend"], dist.group.WORLD.bound_device_id))
        dist.group.WORLD.bound_device_id = None  # gloo cannot be split
        group = new_group(*args, **kwargs)
        dist.group.WORLD.bound_device_id = made[-1][1]
        return group

    assert dist.group.WORLD is not None
    dist.group.WORLD.bound_device_id = GPU
    with patch.object(dist, "new_group", new):
        Mesh.from_world(CPU, ranks_per_host=1)
    assert dist.group.WORLD.bound_device_id == GPU
    dist.group.WORLD.bound_device_id = None
    return made


def test_groups_for_gradients_connect_when_they_are_used(ranks: Ranks) -> None:
    """A NCCL communicator takes about 0.5 GiB, and copies between GPUs need none for gradients."""
    at_once, later = ("gloo", GPU), ("gloo", None)
    # Those of all ranks, on the CPU, of each host, and of each local rank.
    for made in ranks.run(2, groups_of_a_world_for_one_device):
        assert made == [at_once, later, at_once, *[at_once, later] * 3]


def parts_of_the_world(parts: list[list[int]]) -> None:
    me = dist.get_rank()
    mesh = Mesh.from_parts(parts, CPU)
    mine = next(sorted(part) for part in parts if me in part)
    assert (mesh.rank, mesh.world_size) == (mine.index(me), len(mine))
    for group in (mesh.gather_group, mesh.reduce_group, mesh.control_group):
        assert dist.get_process_group_ranks(group) == mine
        total = torch.tensor([1 << me])
        dist.all_reduce(total, group=group)
        assert int(total) == sum(1 << rank for rank in mine), "another part was heard"
    assert mesh.all_gather_values(me) == mine
    mesh.store("test").set("told", str(mine))
    dist.barrier()
    assert mesh.store("test").get("told") == str(mine).encode()


@pytest.mark.parametrize("parts", [[[0, 2], [1]], [[1, 0], [2]], [[2], [1], [0]]], ids=str)
def test_parts_of_the_world_do_not_hear_each_other(ranks: Ranks, parts: list[list[int]]) -> None:
    ranks.run(3, parts_of_the_world, parts)


def hosts_of_each(names: list[str]) -> tuple[int, ...]:
    with patch("lightning_zero.mesh.host_name", lambda: names[dist.get_rank()]):
        return Mesh.from_world(CPU).hosts


def test_ranks_know_who_shares_a_host(ranks: Ranks) -> None:
    assert ranks.run(4, hosts_of_each, ["b", "a", "b", "a"]) == [(0, 1, 0, 1)] * 4


def on_hosts(names: list[str], ranks_per_host: int | None) -> tuple[Any, ...]:
    with patch("lightning_zero.mesh.host_name", lambda: names[dist.get_rank()]):
        mesh = Mesh.from_world(CPU, ranks_per_host=ranks_per_host)
    assert (mesh.shard_group.size, mesh.shard_host_count, mesh.replica) == (mesh.world_size, mesh.host_count, (0, 1))
    assert len({*mesh.device_groups, mesh.control_group}) == (4 if mesh.inter_host is None else 8)
    sides = [mesh.intra_host] if mesh.inter_host is None else [mesh.intra_host, mesh.inter_host]
    for side in sides:
        assert side.ranks[side.rank] == mesh.rank
        for group in (side.gather_group, side.reduce_group):
            total = torch.tensor([1 << mesh.rank])
            dist.all_reduce(total, group=group)
            assert int(total) == sum(1 << rank for rank in side.ranks), "others were heard"
    # Shards are named by their indices.
    assert mesh.all_gather_shard(torch.tensor([mesh.shard_index])).tolist() == list(range(mesh.world_size))
    return mesh.hosts, mesh.physical_hosts, tuple(side.ranks for side in sides), mesh.shard_index


@pytest.mark.parametrize("ranks_per_host", [None, 2])
def test_ranks_at_one_place_of_all_hosts_hold_neighbouring_shards(ranks: Ranks, ranks_per_host: int | None) -> None:
    names = ["a", "b", "a", "b"] if ranks_per_host is None else ["here"] * 4
    found = ranks.run(4, on_hosts, names, ranks_per_host)
    if ranks_per_host is None:
        assert [sides for _, _, sides, _ in found] == [
            ((0, 2), (0, 1)),
            ((1, 3), (0, 1)),
            ((0, 2), (2, 3)),
            ((1, 3), (2, 3)),
        ]
        assert [(hosts, machines, number) for hosts, machines, _, number in found] == [
            ((0, 1, 0, 1), (0, 1, 0, 1), number) for number in range(4)
        ]
    else:
        assert [sides for _, _, sides, _ in found] == [
            ((0, 1), (0, 2)),
            ((0, 1), (1, 3)),
            ((2, 3), (0, 2)),
            ((2, 3), (1, 3)),
        ]
        assert [(hosts, machines, number) for hosts, machines, _, number in found] == [
            ((0, 0, 1, 1), (0, 0, 0, 0), number) for number in (0, 2, 1, 3)
        ]


def replicated(ranks_per_host: int) -> tuple[int, tuple[int, ...], tuple[int, int]]:
    mesh = Mesh.from_world(CPU, ranks_per_host=ranks_per_host, replicate=True)
    assert mesh.replicated == (ranks_per_host < mesh.world_size)
    assert (mesh.shard_host_count, mesh.inter_host_shard_group) == (1, None)
    for group in (mesh.shard_group.gather_group, mesh.shard_group.reduce_group):
        total = torch.tensor([1 << mesh.rank])
        dist.all_reduce(total, group=group)
        assert int(total) == sum(1 << rank for rank in mesh.shard_group.ranks), "another host was heard"
    assert mesh.all_gather_shard(torch.tensor([mesh.shard_index])).tolist() == list(range(mesh.shard_group.size))
    assert mesh.all_gather_shard(torch.tensor([mesh.rank])).tolist() == list(mesh.shard_group.ranks)
    return mesh.shard_index, mesh.shard_group.ranks, mesh.replica


def test_replicas_hold_the_same_shards_at_the_same_places(ranks: Ranks) -> None:
    assert ranks.run(4, replicated, 2) == [
        (0, (0, 1), (0, 2)),
        (1, (0, 1), (0, 2)),
        (0, (2, 3), (1, 2)),
        (1, (2, 3), (1, 2)),
    ]
    assert ranks.run(3, replicated, 1) == [(0, (rank,), (rank, 3)) for rank in range(3)]
    assert ranks.run(2, replicated, 2) == [(rank, (0, 1), (0, 1)) for rank in range(2)]


@pytest.mark.parametrize(("names", "ranks_per_host"), [("aaa", None), ("abc", 3), ("abc", 4)])
def test_where_there_is_one_host_nothing_goes_across(ranks: Ranks, names: str, ranks_per_host: int | None) -> None:
    for rank, (hosts, _, sides, number) in enumerate(ranks.run(3, on_hosts, list(names), ranks_per_host)):
        assert (hosts, sides, number) == ((0, 0, 0), ((0, 1, 2),), rank)


@pytest.mark.parametrize(
    ("names", "ranks_per_host", "words"),
    [("aab", None, "as they were found) have 2, 1 ranks"), ("aaaa", 3, "by ranks_per_host=3) have 3, 1 ranks")],
)
def test_hosts_of_other_sizes_are_refused(names: str, ranks_per_host: int | None, words: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(words) + ".*Start as many processes on each"):
        host_numbers(list(names), ranks_per_host)
    assert host_numbers(list("abab"), None) == (0, 1, 0, 1)


def parts_on_hosts() -> None:
    mesh = Mesh.from_parts([[0, 3], [1, 2]], CPU, ranks_per_host=1)
    assert mesh.inter_host is not None
    assert (mesh.world_size, mesh.intra_host.size, mesh.inter_host.ranks) == (2, 1, (0, 1))
    assert dist.get_process_group_ranks(mesh.inter_host.gather_group) == (
        [0, 3] if dist.get_rank() in (0, 3) else [1, 2]
    )
    assert mesh.all_gather_shard(torch.tensor([dist.get_rank()])).tolist() == (
        [0, 3] if dist.get_rank() in (0, 3) else [1, 2]
    )


def test_each_part_has_hosts_of_its_own(ranks: Ranks) -> None:
    ranks.run(4, parts_on_hosts)


def refused(parts: list[list[int]]) -> str:
    with pytest.raises(ValueError, match="do not divide the 2 processes") as caught:
        Mesh.from_parts(parts, CPU)
    return str(caught.value)


@pytest.mark.parametrize("parts", [[[0]], [[0, 1], [1]], [[0, 1], []], [[0], [1], [2]], [[0, 0, 1]], []], ids=str)
def test_parts_that_leave_a_rank_out_or_share_one_are_refused(ranks: Ranks, parts: list[list[int]]) -> None:
    for message in ranks.run(2, refused, parts):
        assert "Give each rank from 0 to 1 to exactly one part" in message


def test_ranks_must_have_found_each_other() -> None:
    for make in (lambda: Mesh.from_world(CPU), lambda: Mesh.from_parts([[0]], CPU)):
        with pytest.raises(RuntimeError, match=r"Call torch.distributed.init_process_group\(\) first"):
            make()


def gloo_for_a_gpu() -> None:
    # The process group is the user's. Engines of Trainer and Fabric make their meshes here, too.
    with pytest.raises(UnsupportedError, match=r"uses gloo for it .*init_process_group\('cpu:gloo,cuda:nccl'\)"):
        Engine(GPU)


def test_gloo_is_refused_for_a_gpu_before_anything_communicates(ranks: Ranks) -> None:
    ranks.run(1, gloo_for_a_gpu)


@pytest.mark.parametrize(
    ("backends", "words"),
    [("cpu:gloo,cuda:gloo", "uses gloo"), ("cpu:gloo", "has no backend"), ("cuda:gloo,cpu:gloo", "uses gloo")],
)
def test_process_groups_without_a_backend_for_the_gpu_are_refused(backends: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{words} .*process_group_backend='cpu:gloo,cuda:nccl'"):
        check_backend(backends, "cuda")
    check_backend(backends, "cpu")


@pytest.mark.parametrize("backends", ["cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo", "cuda:nccl", "cpu:fake,cuda:fake"])
def test_other_backends_are_accepted_for_a_gpu(backends: str) -> None:
    check_backend(backends, "cuda")


def test_hosts_are_numbered_as_they_come() -> None:
    assert number_names(["x", "y", "x", "z", "y"]) == (0, 1, 0, 2, 1)
    assert number_names([]) == ()


def test_a_host_is_told_from_others_by_its_name_and_its_boot() -> None:
    here = host_name()
    assert here == host_name()
    with patch("socket.gethostname", lambda: "another"):
        assert host_name() != here
    with patch("lightning_zero.mesh.boot_id", lambda: "another"):
        assert host_name() != here
