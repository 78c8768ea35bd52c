"""Activations on the host: who waits for whom, whichever of the lanes is the slowest; and what an exception leaves."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.offload.activations import HostActivations
from lightning_zero.offload.blocks import HostBlocks
from tests.helpers.lanes import ORDERS, DelayedLanes, LateLanes

CPU = torch.device("cpu")
WAITS = ("out behind compute", "compute behind out", "in behind compute", "compute behind in")


class OneBlock:
    """What the host has is given out again each time, as if nobody held it any more."""

    def __init__(self, numel: int) -> None:
        self.memory = torch.zeros(4 * numel, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        assert nbytes == self.memory.nbytes
        return self.memory


def train(order: Sequence[str], monkeypatch: pytest.MonkeyPatch, without: str = "") -> list[list[float]]:
    """What two backwards, one after the other, read. Both the device and the host have room for one tensor."""
    lanes, room, read = DelayedLanes(without), torch.zeros(4), []
    activations = HostActivations(CPU, OneBlock(4), lanes)  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **kwargs: room)
    for step in (1.0, 2.0):
        lanes.compute(lambda step=step: room.fill_(step))
        host = activations.leave(room)
        activations.left(room, host)
        lanes.compute(lambda: room.fill_(-1.0))  # something else has the memory
        lanes.compute(lambda: read.append(room.tolist()))
        back = activations.come(host)
        activations.came(back, host)
        lanes.compute(lambda: read.append(room.tolist()))
    lanes.run(order)
    return read


RIGHT = [[value] * 4 for value in (-1.0, 1.0, -1.0, 2.0)]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_all_waits_are_there(order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(order, monkeypatch) == RIGHT


@pytest.mark.parametrize("wait", WAITS)
def test_each_wait_is_needed(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [train(order, monkeypatch, wait) for order in ORDERS]
    assert any(read != RIGHT for read in found), "a test of this wait would pass without it"


def test_each_race_that_others_had_is_one_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    late_compute, late_out, late_in = ("in", "out", "compute"), ("compute", "in", "out"), ("compute", "out", "in")
    assert train(late_compute, monkeypatch, "out behind compute")[1] != [1.0] * 4  # copied before it was written
    assert train(late_out, monkeypatch, "compute behind out")[1] != [1.0] * 4  # reused before its copy had left
    assert train(late_in, monkeypatch, "compute behind in")[1] != [1.0] * 4  # read before it had come
    assert train(late_compute, monkeypatch, "in behind compute")[1] != [1.0] * 4  # into memory that compute still used


def test_what_a_capture_would_send_counts_once_for_each_replay_and_not_before() -> None:
    activations, noted = HostActivations(CPU), list[int]()
    value = torch.ones(4)
    activations.amount.begin_pass(20)
    activations.left(value, activations.leave(value))
    with activations.recording(noted):
        activations.left(value, activations.leave(value))
    assert (activations.amount.sent, activations.amount.beyond, noted) == (16, "", [16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("kind", ["contiguous", "transposed", "a part", "with gaps", "empty", "no dimension"])
def test_values_and_strides_come_back(dtype: torch.dtype, kind: str) -> None:
    whole = torch.randn(6, 8).gt(0) if dtype is torch.bool else (100 * torch.randn(6, 8)).to(dtype)
    value = {
        "contiguous": whole,
        "transposed": whole.t(),
        "a part": whole[2:4],
        "with gaps": whole[:, 1:5],
        "empty": whole[:0],
        "no dimension": whole[1, 2],
    }[kind]
    activations = HostActivations(CPU)
    host = activations.leave(value)
    activations.left(value, host)
    back = activations.come(host)
    activations.came(back, host)
    assert torch.equal(back, value)
    assert (host.stride(), host.dtype) == (back.stride(), back.dtype) == (value.stride(), dtype)
    assert not {host.data_ptr(), back.data_ptr()} & {value.data_ptr()} or not value.numel()
    assert not activations._leaving
    assert not activations._coming


def test_another_tensor_than_the_copy_was_started_with_is_an_error() -> None:
    activations, value = HostActivations(CPU), torch.randn(4)
    host = activations.leave(value)
    with pytest.raises(RuntimeError, match="leave 'activations' out of offload="):
        activations.left(value.clone(), host)
    activations.settle()
    with pytest.raises(RuntimeError, match="has made a copy in between"):
        activations.left(value, host)


def test_what_an_exception_leaves_half_done_is_waited_for_before_it_is_let_go_of() -> None:
    lanes = LateLanes()
    activations, value = HostActivations(CPU, lanes=lanes), torch.randn(4)
    first, second = activations.leave(value), activations.leave(value + 1)
    activations.left(value, first)
    back = activations.come(first)
    assert back.isnan().all()
    assert lanes.waiting == 2
    activations.settle()
    assert lanes.waiting == 0
    assert torch.equal(back, value)
    assert torch.equal(second, value + 1)
    activations.settle()


def test_memory_is_used_again_from_step_to_step() -> None:
    blocks = HostBlocks(CPU)
    activations, values = HostActivations(CPU, blocks), [torch.randn(1000), torch.randn(3000)]
    for step in range(4):
        hosts = [activations.leave(value) for value in values]
        for value, host in zip(values, hosts, strict=True):
            activations.left(value, host)
        backs = [activations.come(host) for host in hosts]
        for back, host in zip(backs, hosts, strict=True):
            activations.came(back, host)
        del hosts, host
        if not step:
            held = activations.nbytes
        assert activations.nbytes == held == 4096 + 3 * 4096
