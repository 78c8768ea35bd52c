"""Test passes through a ring in any order of copies and compute, and that each wait is needed."""

import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.offload.staging_ring import MIN_SLOTS, RingPass, StagedChunk, StagedChunks, StagingRing
from tests.helpers.copy_streams import ORDERS, DelayedCopyStreams, Event

CPU = torch.device("cpu")
LOADS, SIZE = 3 * MIN_SLOTS + 1, 40
SMALL = 1 << 14  # bytes of a ring with the fewest slots


def host() -> StagedChunks:
    return StagedChunks({"a": torch.full((SIZE,), float(n)), "b": torch.full((SIZE,), 100.0 + n)} for n in range(LOADS))


def step(buffers: StagedChunk) -> None:
    for tensor in buffers.values():
        tensor.mul_(2).add_(1)


def pass_through(through: RingPass, streams: DelayedCopyStreams, joined: bool) -> None:
    if joined:
        through.join()
    for number in range(LOADS):
        buffers = through.open(number)
        streams.compute(lambda buffers=buffers: step(buffers))
        through.close(number)
    if joined:
        through.rejoin()
    through.flush()


def in_every_order(without: str = "", joined: bool = False, slots: int = MIN_SLOTS) -> list[bool]:
    """Return True if three passes, the first of which is given up halfway, leave the expected host memory."""
    found = []
    for order in ORDERS:
        streams = DelayedCopyStreams(without)
        ring = StagingRing(CPU, slots * SMALL // MIN_SLOTS, streams)
        assert ring.slots == slots
        loads, expected = host(), host()
        given_up = RingPass(ring, loads)
        given_up.prefetch()
        buffers = given_up.open(0)
        streams.compute(lambda buffers=buffers: step(buffers))
        for _ in range(2):
            through = RingPass(ring, loads)
            through.prefetch()
            pass_through(through, streams, joined)
            for load in expected:
                step(load)
        streams.run(order)
        found.append(all(torch.equal(a[k], b[k]) for a, b in zip(loads, expected, strict=True) for k in a))
    return found


@pytest.fixture(params=[MIN_SLOTS, LOADS - 4, LOADS, LOADS + 2])
def slots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return fewer slots than chunks, as many, or more."""
    monkeypatch.setattr("lightning_zero.offload.staging_ring.MAX_SLOT_BYTES", SMALL // MIN_SLOTS)
    return request.param


@pytest.mark.parametrize("joined", [False, True])
def test_loads_pass_unharmed_in_any_order_of_copies_and_compute(joined: bool, slots: int) -> None:
    assert all(in_every_order(joined=joined, slots=slots))


@pytest.mark.parametrize(
    "race",
    [
        "out behind compute",  # a copy out waits for the optimizer's writes
        "in behind out",  # a buffer is not used again before its copy has finished
        "in behind compute",  # copies wait for compute before the pass
        "compute behind in",  # and compute waits for copies in
    ],
)
def test_each_wait_is_needed(race: str, slots: int) -> None:
    assert not all(in_every_order(race, slots=slots))


def test_what_comes_ahead_waits_for_no_buffer_but_its_own(slots: int) -> None:
    """Waiting for all buffers would double the time if buffers hold much."""
    streams = DelayedCopyStreams()
    ring, loads = StagingRing(CPU, slots * SMALL // MIN_SLOTS, streams), host()
    through = RingPass(ring, loads)
    through.prefetch()
    pass_through(through, streams, joined=False)
    behind = RingPass(ring, loads)
    leaving = ring.last_pass[1]
    behind.prefetch()
    assert ring.last_pass[1] == {}, "a pass that is given up does not leave twice"
    there = set()
    while streams.waiting("out"):
        streams.run(("in", "compute"), all_of_it=False)
        left = sum(event.done for event in leaving.values())
        assert sum(event.done for event in behind._arrivals.values()) == left
        there.add(left)
        assert streams.waiting("out").popleft()()
    assert there >= {*range(min(slots, LOADS))}


def test_what_is_on_its_way_out_does_not_hold_what_its_owner_has_dropped() -> None:
    ring, loads = StagingRing(CPU, SMALL), host()
    through = RingPass(ring, loads)
    through.prefetch()
    through.flush(range(LOADS))
    gone = weakref.ref(loads)
    del through, loads
    assert gone() is None
    RingPass(ring, host()).prefetch()


def test_buffers_are_gone_with_what_they_served() -> None:
    """They are freed without the garbage collector, so that one plan's buffers are held at a time."""
    gc.disable()
    try:
        ring, loads = StagingRing(CPU, SMALL), host()
        through = RingPass(ring, loads)
        for _ in range(2):
            through.prefetch()
            for number in range(LOADS):
                step(through.open(number))
                through.close(number)
            through.flush()
        through.prefetch()
        gone = StorageWeakRef(ring.allocated().untyped_storage())
        del ring, through
        assert gone.expired()
    finally:
        gc.enable()


def test_copies_in_wait_for_what_fills_the_new_buffers() -> None:
    """With deterministic algorithms torch fills new memory with NaN on the compute stream."""

    class CopyStreams(DelayedCopyStreams):
        def compute_event(self) -> Event:
            there.append(ring.nbytes > 0)
            return super().compute_event()

    there: list[bool] = []
    ring = StagingRing(CPU, SMALL, CopyStreams())
    RingPass(ring, [{}]).prefetch()
    assert ring.nbytes == 0  # no copy in is pending
    RingPass(ring, host()).prefetch()
    assert there == [False, True]


def test_whoever_gets_the_buffers_next_waits_for_copies_and_so_does_a_ring_of_another_size() -> None:
    streams = DelayedCopyStreams()
    ring, loads = StagingRing(CPU, SMALL, streams), host()
    for nbytes in (SMALL, 2 * SMALL):
        ring.resize(nbytes)
        streams.compute(lambda: order.append(sum(map(len, map(streams.waiting, ("in", "out"))))))
        through = RingPass(ring, loads)
        through.prefetch()
        pass_through(through, streams, joined=False)
        RingPass(ring, loads).prefetch()
    ring.resize(SMALL)
    streams.compute(lambda: order.append(sum(map(len, map(streams.waiting, ("in", "out"))))))
    assert [memory.nbytes for memory in streams.used] == [SMALL, 2 * SMALL]
    order: list[int] = []
    streams.run(("compute", "out", "in"))
    assert order[-1] == 0, "other buffers are there while copies to the old ones are under way"
    assert all(torch.equal(load["a"], torch.full((SIZE,), 4.0 * n + 3)) for n, load in enumerate(loads))


def test_copies_out_copies_in_and_compute_are_under_way_at_once() -> None:
    streams = DelayedCopyStreams()
    loads = host()
    ring = StagingRing(CPU, SMALL, streams)
    through = RingPass(ring, loads)
    through.prefetch()
    for number in range(MIN_SLOTS - 1):
        buffers = through.open(number)
        streams.compute(lambda buffers=buffers: step(buffers))
        through.close(number)
    first = ring.buffers(0, loads[0])
    streams.run(("in", "compute"), all_of_it=False)
    assert torch.equal(first["a"], torch.ones(SIZE))  # was stepped, and not copied out
    assert torch.equal(loads[0]["a"], torch.zeros(SIZE))
    ahead = ring.buffers(MIN_SLOTS - 1, loads[0])
    assert torch.equal(ahead["a"], loads[MIN_SLOTS - 1]["a"])  # arrived by a prefetch
    streams.run(("out", "in", "compute"))
    assert torch.equal(loads[0]["a"], torch.ones(SIZE))
    assert torch.equal(ring.buffers(0, loads[0])["a"], loads[MIN_SLOTS]["a"])


def test_compute_goes_on_behind_all_that_was_captured() -> None:
    """A capture must not end before work that began in it."""
    for order in ORDERS:
        streams = DelayedCopyStreams()
        loads, seen = host(), []
        through = RingPass(StagingRing(CPU, SMALL, streams), loads)
        through.prefetch()
        through.join()
        for number in range(LOADS):
            through.open(number)
            through.close(number)
        through.rejoin()
        streams.compute(
            lambda streams=streams, seen=seen: seen.append([len(streams.waiting(name)) for name in ("in", "out")])
        )
        assert all(len(streams.waiting(name)) > 10 for name in ("in", "out"))
        streams.run(order)
        assert seen == [[0, 0]]


def test_what_came_ahead_is_good_until_it_is_written_to_or_another_pass_comes() -> None:
    ring, loads = StagingRing(CPU, SMALL), host()
    through = RingPass(ring, loads)
    assert not through.is_valid
    through.prefetch()
    assert through.is_valid
    loads[MIN_SLOTS]["a"].zero_()  # not arrived yet
    assert through.is_valid
    loads[1]["b"][3:].zero_()
    assert not through.is_valid
    through.prefetch()
    assert through.is_valid
    RingPass(ring, loads).prefetch()
    assert not through.is_valid


def test_what_came_ahead_is_not_good_once_somebody_says_so() -> None:
    """Writes of the device to mapped host memory change no version."""
    told = [0]
    through = RingPass(StagingRing(CPU, SMALL, stamp=lambda: told[0]), host())
    through.prefetch()
    assert through.is_valid
    told[0] += 1
    assert not through.is_valid


def test_a_load_goes_out_with_what_was_not_there_when_it_came() -> None:
    ring = StagingRing(CPU, SMALL)
    count = MIN_SLOTS + 2
    memory, value = torch.zeros(count, SIZE), torch.arange(count * SIZE).float().view(count, SIZE)
    through = RingPass(ring, [{}] * count)
    through.prefetch()
    for number in range(count):
        assert through.open(number) == {}
        through.close(number, {"made": memory[number]}, {"made": value[number]})
    through.flush()
    assert torch.equal(memory, value)


def test_what_is_given_up_leaves_nothing() -> None:
    ring, loads = StagingRing(CPU, SMALL), host()
    through = RingPass(ring, loads)
    through.prefetch()
    for number in range(2):
        step(through.open(number))
    through.close(0)
    through.flush()
    assert [float(load["a"][0]) for load in loads[:3]] == [1, 1, 2]


def test_there_are_no_more_buffers_than_a_pass_has_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zero.offload.staging_ring.MAX_SLOT_BYTES", SMALL // MIN_SLOTS)
    wide = 3 * LOADS * SMALL // MIN_SLOTS
    ring = StagingRing(CPU, wide)
    for short in (LOADS - 2, LOADS - 3):
        through = RingPass(ring, host()[:short])
        through.prefetch()
        through.flush(())
        assert ring.nbytes == (LOADS - 2) * ring.slot_bytes
    assert not ring.can_grow
    RingPass(ring, host()).prefetch()
    assert ring.can_grow
    ring.resize(wide)
    assert not ring.can_grow
    RingPass(ring, host()[:MIN_SLOTS]).prefetch()
    assert ring.nbytes == LOADS * ring.slot_bytes, "a longer one is still to come"
    assert not ring.can_grow
    monkeypatch.setattr("lightning_zero.offload.staging_ring.MAX_SLOT_BYTES", 4 * SMALL)
    ring.resize(100 * SMALL)
    RingPass(ring, host()[: MIN_SLOTS + 1]).prefetch()
    assert ring.nbytes == (MIN_SLOTS + 1) * ring.slot_bytes, "of wider ones fewer loads are made"


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
    assert ring.nbytes == 4 * 8 * 512  # the minimum
    assert (StagingRing(CPU, 2**28).slots, StagingRing(CPU, 2**28).slot_bytes) == (4, 2**26)
    assert (StagingRing(CPU, 2**30).slots, StagingRing(CPU, 2**30).slot_bytes) == (16, 2**26)
    with pytest.raises(ValueError, match="does not fit into a slot of 4096"):
        StagingRing(CPU, 1).buffers(0, {"large": torch.empty(5000)})
