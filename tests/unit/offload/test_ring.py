"""Loads pass through a ring unharmed, in whatever order copies and compute get on; and no wait is there in vain."""

import pytest
import torch
from torch import Tensor

from lightning_zero.offload.ring import SLOTS, Load, Pass, Ring
from tests.helpers.lanes import ORDERS, DelayedLanes

CPU = torch.device("cpu")
LOADS, SIZE = 3 * SLOTS + 1, 40


def host() -> list[dict[str, Tensor]]:
    return [{"a": torch.full((SIZE,), float(n)), "b": torch.full((SIZE,), 100.0 + n)} for n in range(LOADS)]


def step(buffers: Load) -> None:
    for tensor in buffers.values():
        tensor.mul_(2).add_(1)


def pass_through(loads: list[dict[str, Tensor]], ring: Ring, lanes: DelayedLanes) -> None:
    through = Pass(ring, loads)
    for number in range(len(loads)):
        buffers = through.open(number)
        lanes.compute(lambda buffers=buffers: step(buffers))
        through.close(number)
    through.end()


def in_every_order(without: str = "") -> list[bool]:
    """Whether two passes, between which compute changes what lies on the host and uses the ring's memory, leave on the
    host what they should."""
    found = []
    for order in ORDERS:
        lanes = DelayedLanes(without)
        ring = Ring(CPU, 1 << 14, lanes)
        loads, expected = host(), host()
        pass_through(loads, ring, lanes)
        # As a checkpoint is loaded between two steps; and as if the ring's memory had served somebody else before.
        lanes.compute(lambda loads=loads: [tensor.add_(5) for load in loads for tensor in load.values()])
        mine = ring.buffers(0, loads[0])
        lanes.compute(lambda mine=mine: [tensor.fill_(-1) for tensor in mine.values()])
        pass_through(loads, ring, lanes)
        lanes.compute(lambda loads=loads: [tensor.mul_(3) for load in loads for tensor in load.values()])
        lanes.run(order)
        for load in expected:
            step(load)
            for tensor in load.values():
                tensor.add_(5)
            step(load)
            for tensor in load.values():
                tensor.mul_(3)
        found.append(all(torch.equal(a[k], b[k]) for a, b in zip(loads, expected, strict=True) for k in a))
    return found


def test_loads_pass_unharmed_in_any_order_of_copies_and_compute() -> None:
    assert all(in_every_order())


@pytest.mark.parametrize(
    "race",
    [
        "out behind compute",  # a copy out waits for the optimizer's writes
        "in behind out",  # a buffer is not used again before its copy has left
        "in behind compute",  # copies wait for whatever compute was given before the pass
        "compute behind in",  # and compute waits for copies in
        "compute behind out",  # whoever comes after the pass finds all of it on the host
    ],
)
def test_each_wait_is_needed(race: str) -> None:
    assert not all(in_every_order(race))


def test_copies_out_copies_in_and_compute_are_under_way_at_once() -> None:
    lanes = DelayedLanes()
    loads = host()
    through = Pass(Ring(CPU, 1 << 14, lanes), loads)
    buffers = through.open(0)
    lanes.compute(lambda: step(buffers))
    lanes.run(("in", "compute", "out"))
    ahead = through._ring.buffers(SLOTS - 1, loads[0])
    assert torch.equal(ahead["a"], loads[SLOTS - 1]["a"])  # those behind it are there before it has left
    assert torch.equal(loads[0]["a"], torch.zeros(SIZE))


def test_a_load_goes_out_with_what_was_not_there_when_it_came() -> None:
    ring = Ring(CPU, 1 << 14)
    memory, value = torch.zeros(SIZE), torch.arange(SIZE).float()
    through = Pass(ring, [{}])
    assert through.open(0) == {}
    through.close(0, {"made": memory}, {"made": value})
    through.end()
    assert torch.equal(memory, value)


def test_what_a_slot_holds_fits_into_it_and_stays_apart() -> None:
    ring = Ring(CPU, 10_000)
    for itemsizes in ([4], [4, 4], [8, 4, 2], [2] * 5):
        numel = ring.elements(itemsizes)
        assert numel % 32 == 0
        assert numel > 0
        dtypes = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}
        load = {str(n): torch.empty(numel, dtype=dtypes[size]) for n, size in enumerate(itemsizes)}
        for slot in range(SLOTS):
            for n, tensor in enumerate(ring.buffers(slot, load).values()):
                tensor.fill_(10 * slot + n)
        values = [[float(t[0]), float(t[-1])] for slot in range(SLOTS) for t in ring.buffers(slot, load).values()]
        assert values == [[10 * slot + n] * 2 for slot in range(SLOTS) for n in range(len(itemsizes))]
    assert ring.nbytes <= max(10_000, SLOTS * 8 * 512)
    with pytest.raises(ValueError, match="does not fit into a slot of 4096"):
        Ring(CPU, 1).buffers(0, {"large": torch.empty(5000)})
