"""Loads pass through a ring unharmed, in whatever order copies and compute get on; and no wait is there in vain."""

import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.offload.staging_ring import LEAST_SLOTS, StagedChunk, StagedChunks, RingPass, StagingRing
from tests.helpers.lanes import ORDERS, DelayedLanes, Event

CPU = torch.device("cpu")
LOADS, SIZE = 3 * LEAST_SLOTS + 1, 40
SMALL = 1 << 14  # bytes of a ring with as few slots as can be


def host() -> StagedChunks:
    return StagedChunks({"a": torch.full((SIZE,), float(n)), "b": torch.full((SIZE,), 100.0 + n)} for n in range(LOADS))


def step(buffers: StagedChunk) -> None:
    for tensor in buffers.values():
        tensor.mul_(2).add_(1)


def pass_through(through: RingPass, lanes: DelayedLanes, joined: bool) -> None:
    if joined:
        through.join()
    for number in range(LOADS):
        buffers = through.open(number)
        lanes.compute(lambda buffers=buffers: step(buffers))
        through.close(number)
    if joined:
        through.rejoin()
    through.leave()


def in_every_order(without: str = "", joined: bool = False, slots: int = LEAST_SLOTS) -> list[bool]:
    """Whether three passes, the first of which is given up halfway, leave on the host what they should."""
    found = []
    for order in ORDERS:
        lanes = DelayedLanes(without)
        ring = StagingRing(CPU, slots * SMALL // LEAST_SLOTS, lanes)
        assert ring.slots == slots
        loads, expected = host(), host()
        given_up = RingPass(ring, loads)
        given_up.ahead()
        buffers = given_up.open(0)
        lanes.compute(lambda buffers=buffers: step(buffers))
        for _ in range(2):
            through = RingPass(ring, loads)
            through.ahead()
            pass_through(through, lanes, joined)
            for load in expected:
                step(load)
        lanes.run(order)
        found.append(all(torch.equal(a[k], b[k]) for a, b in zip(loads, expected, strict=True) for k in a))
    return found


@pytest.fixture(params=[LEAST_SLOTS, LOADS - 4, LOADS, LOADS + 2])
def slots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A part of the loads, most of them, all, and more."""
    monkeypatch.setattr("lightning_zero.offload.staging_ring.MOST_BYTES", SMALL // LEAST_SLOTS)
    return request.param


@pytest.mark.parametrize("joined", [False, True])
def test_loads_pass_unharmed_in_any_order_of_copies_and_compute(joined: bool, slots: int) -> None:
    assert all(in_every_order(joined=joined, slots=slots))


@pytest.mark.parametrize(
    "race",
    [
        "out behind compute",  # a copy out waits for the optimizer's writes
        "in behind out",  # a buffer is not used again before its copy has left
        "in behind compute",  # copies wait for what compute was given before the pass
        "compute behind in",  # and compute waits for copies in
    ],
)
def test_each_wait_is_needed(race: str, slots: int) -> None:
    assert not all(in_every_order(race, slots=slots))


def test_what_comes_ahead_waits_for_no_buffer_but_its_own(slots: int) -> None:
    """If it waited for all, nothing would come while the last ones leave: twice the time where buffers hold much."""
    lanes = DelayedLanes()
    ring, loads = StagingRing(CPU, slots * SMALL // LEAST_SLOTS, lanes), host()
    through = RingPass(ring, loads)
    through.ahead()
    pass_through(through, lanes, joined=False)
    behind = RingPass(ring, loads)
    leaving = ring.leaving[1]
    behind.ahead()
    assert ring.leaving[1] == {}, "a pass that is given up does not leave twice"
    there = set()
    while lanes.waiting("out"):
        lanes.run(("in", "compute"), all_of_it=False)
        left = sum(event.done for event in leaving.values())
        assert sum(event.done for event in behind._came.values()) == left
        there.add(left)
        assert lanes.waiting("out").popleft()()
    assert there >= {*range(min(slots, LOADS))}


def test_what_is_on_its_way_out_does_not_hold_what_its_owner_has_dropped() -> None:
    ring, loads = StagingRing(CPU, SMALL), host()
    through = RingPass(ring, loads)
    through.ahead()
    through.leave(range(LOADS))
    gone = weakref.ref(loads)
    del through, loads
    assert gone() is None
    RingPass(ring, host()).ahead()


def test_buffers_are_gone_with_what_they_served() -> None:
    """And not only once Python looks for cycles: until then a device would hold the buffers of an earlier plan as well."""
    gc.disable()
    try:
        ring, loads = StagingRing(CPU, SMALL), host()
        through = RingPass(ring, loads)
        for _ in range(2):
            through.ahead()
            for number in range(LOADS):
                step(through.open(number))
                through.close(number)
            through.leave()
        through.ahead()
        gone = StorageWeakRef(ring.allocated().untyped_storage())
        del ring, through
        assert gone.expired()
    finally:
        gc.enable()


def test_copies_in_wait_for_what_fills_the_new_buffers() -> None:
    """Which is compute's, where torch's algorithms are deterministic: NaN would meet what comes."""

    class CopyStreams(DelayedLanes):
        def now(self) -> Event:
            there.append(ring.nbytes > 0)
            return super().now()

    there: list[bool] = []
    ring = StagingRing(CPU, SMALL, CopyStreams())
    RingPass(ring, [{}]).ahead()
    assert ring.nbytes == 0  # nothing comes
    RingPass(ring, host()).ahead()
    assert there == [False, True]


def test_whoever_gets_the_buffers_next_waits_for_copies_and_so_does_a_ring_of_another_size() -> None:
    lanes = DelayedLanes()
    ring, loads = StagingRing(CPU, SMALL, lanes), host()
    for nbytes in (SMALL, 2 * SMALL):
        ring.resize(nbytes)
        lanes.compute(lambda: order.append(sum(map(len, map(lanes.waiting, ("in", "out"))))))
        through = RingPass(ring, loads)
        through.ahead()
        pass_through(through, lanes, joined=False)
        RingPass(ring, loads).ahead()
    ring.resize(SMALL)
    lanes.compute(lambda: order.append(sum(map(len, map(lanes.waiting, ("in", "out"))))))
    assert [memory.nbytes for memory in lanes.used] == [SMALL, 2 * SMALL]
    order: list[int] = []
    lanes.run(("compute", "out", "in"))
    assert order[-1] == 0, "other buffers are there while copies to the old ones are under way"
    assert all(torch.equal(load["a"], torch.full((SIZE,), 4.0 * n + 3)) for n, load in enumerate(loads))


def test_copies_out_copies_in_and_compute_are_under_way_at_once() -> None:
    lanes = DelayedLanes()
    loads = host()
    ring = StagingRing(CPU, SMALL, lanes)
    through = RingPass(ring, loads)
    through.ahead()
    for number in range(LEAST_SLOTS - 1):
        buffers = through.open(number)
        lanes.compute(lambda buffers=buffers: step(buffers))
        through.close(number)
    first = ring.buffers(0, loads[0])
    lanes.run(("in", "compute"), all_of_it=False)
    assert torch.equal(first["a"], torch.ones(SIZE))  # was stepped, and has not left
    assert torch.equal(loads[0]["a"], torch.zeros(SIZE))
    ahead = ring.buffers(LEAST_SLOTS - 1, loads[0])
    assert torch.equal(ahead["a"], loads[LEAST_SLOTS - 1]["a"])  # came before it was asked for
    lanes.run(("out", "in", "compute"))
    assert torch.equal(loads[0]["a"], torch.ones(SIZE))
    assert torch.equal(ring.buffers(0, loads[0])["a"], loads[LEAST_SLOTS]["a"])


def test_compute_goes_on_behind_all_that_was_captured() -> None:
    """A capture ends where nothing is under way that began in it."""
    for order in ORDERS:
        lanes = DelayedLanes()
        loads, seen = host(), []
        through = RingPass(StagingRing(CPU, SMALL, lanes), loads)
        through.ahead()
        through.join()
        for number in range(LOADS):
            through.open(number)
            through.close(number)
        through.rejoin()
        lanes.compute(lambda lanes=lanes, seen=seen: seen.append([len(lanes.waiting(name)) for name in ("in", "out")]))
        assert all(len(lanes.waiting(name)) > 10 for name in ("in", "out"))
        lanes.run(order)
        assert seen == [[0, 0]]


def test_what_came_ahead_is_good_until_it_is_written_to_or_another_pass_comes() -> None:
    ring, loads = StagingRing(CPU, SMALL), host()
    through = RingPass(ring, loads)
    assert not through.is_valid
    through.ahead()
    assert through.is_valid
    loads[LEAST_SLOTS]["a"].zero_()  # which has not come yet
    assert through.is_valid
    loads[1]["b"][3:].zero_()
    assert not through.is_valid
    through.ahead()
    assert through.is_valid
    RingPass(ring, loads).ahead()
    assert not through.is_valid


def test_what_came_ahead_is_not_good_once_somebody_says_so() -> None:
    """Of memory that a device writes to as well, no version tells."""
    told = [0]
    through = RingPass(StagingRing(CPU, SMALL, stamp=lambda: told[0]), host())
    through.ahead()
    assert through.is_valid
    told[0] += 1
    assert not through.is_valid


def test_a_load_goes_out_with_what_was_not_there_when_it_came() -> None:
    ring = StagingRing(CPU, SMALL)
    count = LEAST_SLOTS + 2
    memory, value = torch.zeros(count, SIZE), torch.arange(count * SIZE).float().view(count, SIZE)
    through = RingPass(ring, [{}] * count)
    through.ahead()
    for number in range(count):
        assert through.open(number) == {}
        through.close(number, {"made": memory[number]}, {"made": value[number]})
    through.leave()
    assert torch.equal(memory, value)


def test_what_is_given_up_leaves_nothing() -> None:
    ring, loads = StagingRing(CPU, SMALL), host()
    through = RingPass(ring, loads)
    through.ahead()
    for number in range(2):
        step(through.open(number))
    through.close(0)
    through.leave()
    assert [float(load["a"][0]) for load in loads[:3]] == [1, 1, 2]


def test_there_are_no_more_buffers_than_a_pass_has_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zero.offload.staging_ring.MOST_BYTES", SMALL // LEAST_SLOTS)
    wide = 3 * LOADS * SMALL // LEAST_SLOTS
    ring = StagingRing(CPU, wide)
    for short in (LOADS - 2, LOADS - 3):
        through = RingPass(ring, host()[:short])
        through.ahead()
        through.leave(())
        assert ring.nbytes == (LOADS - 2) * ring.slot_bytes
    assert not ring.can_grow
    RingPass(ring, host()).ahead()
    assert ring.can_grow
    ring.resize(wide)
    assert not ring.can_grow
    RingPass(ring, host()[:LEAST_SLOTS]).ahead()
    assert ring.nbytes == LOADS * ring.slot_bytes, "a longer one is still to come"
    assert not ring.can_grow
    monkeypatch.setattr("lightning_zero.offload.staging_ring.MOST_BYTES", 4 * SMALL)
    ring.resize(100 * SMALL)
    RingPass(ring, host()[: LEAST_SLOTS + 1]).ahead()
    assert ring.nbytes == (LEAST_SLOTS + 1) * ring.slot_bytes, "of wider ones fewer loads are made"


def test_what_a_slot_holds_fits_into_it_and_stays_apart() -> None:
    ring = StagingRing(CPU, 10_000)
    for itemsizes in ([4], [4, 4], [8, 4, 2], [2] * 5):
        numel = ring.elements(itemsizes)
        assert numel % 32 == 0
        assert numel > 0
        dtypes = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}
        load = {str(n): torch.empty(numel, dtype=dtypes[size]) for n, size in enumerate(itemsizes)}
        slots = range(ring.slots)
        for slot in slots:
            for n, tensor in enumerate(ring.buffers(slot, load).values()):
                tensor.fill_(10 * slot + n)
        values = [[float(t[0]), float(t[-1])] for slot in slots for t in ring.buffers(slot, load).values()]
        assert values == [[10 * slot + n] * 2 for slot in slots for n in range(len(itemsizes))]
    assert ring.nbytes == 4 * 8 * 512  # as little as can be
    assert (StagingRing(CPU, 2**28).slots, StagingRing(CPU, 2**28).slot_bytes) == (4, 2**26)
    assert (StagingRing(CPU, 2**30).slots, StagingRing(CPU, 2**30).slot_bytes) == (16, 2**26)
    with pytest.raises(ValueError, match="does not fit into a slot of 4096"):
        StagingRing(CPU, 1).buffers(0, {"large": torch.empty(5000)})
