"""Test offloaded master shards and state.

For each order of copies and compute, readers see the right values.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.offload.staging_ring import MIN_SLOTS, StagingRing
from lightning_zero.optim.flat_runs import ChunkedState, FlatRun, LoadedChunk
from tests.helpers.copy_streams import ORDERS, DelayedCopyStreams

CPU = torch.device("cpu")
SMALL = 1 << 14  # bytes of a ring with the minimum number of slots
NUMEL = 3 * MIN_SLOTS * 320


def run(away: bool) -> FlatRun:
    param = torch.nn.Parameter(torch.arange(float(NUMEL)))
    param.grad = torch.ones(NUMEL)
    found = FlatRun(0, [], param, param.grad, state={"average": torch.zeros(NUMEL)})
    if away:
        found.on_host, found.copy = param.data, torch.full((NUMEL,), -1.0)
    return found


def step(part: LoadedChunk) -> None:
    part.state["average"].add_(part.param)
    part.param.mul_(2).add_(part.chunk.view_of(part.chunk.run.grad))
    if part.copy is not None:
        part.copy.copy_(part.param)


AWAY = (True, False, True)  # of each run; masters are loaded first and written back last


def train(order: Any, without: str = "", steps: int = 3) -> list[Tensor]:
    """Return the final memory, and the values seen after each step."""
    lanes, seen = DelayedCopyStreams(without), []
    runs = [run(away) for away in AWAY]
    parts = ChunkedState(runs, lambda s: list(s.state), StagingRing(CPU, SMALL, lanes))
    for _ in range(steps):
        parts.prefetch_from_host()
        with parts.stream_state():
            for part in parts.iter_chunks():
                lanes.compute(lambda part=part: step(part))
        for stepped in runs:  # after it, compute reads masters and writes them, as users may
            lanes.compute(lambda stepped=stepped: seen.append(stepped.param.detach().clone()))
            lanes.compute(lambda stepped=stepped: stepped.param.data.add_(1))
    lanes.run(order)
    kept = [t for s in runs for t in (s.param.data, s.state["average"])]
    return [*kept, *(s.copy for s in runs if s.copy is not None), *seen]


def expected(steps: int = 3) -> list[Tensor]:
    param, average, seen = torch.arange(float(NUMEL)), torch.zeros(NUMEL), []
    for _ in range(steps):
        average = average + param
        param = 2 * param + 1
        seen += [param] * len(AWAY)
        param = param + 1
    return [*[param, average] * len(AWAY), *seen[-1:] * sum(AWAY), *seen]


def is_right(order: Any, without: str = "") -> bool:
    return all(torch.equal(a, b) for a, b in zip(train(order, without), expected(), strict=True))


def test_steps_and_who_reads_behind_them_see_what_they_should_in_any_order() -> None:
    assert all(map(is_right, ORDERS))


@pytest.mark.parametrize(
    "race",
    [
        "out behind compute",  # copies wait for the optimizer's writes
        "in behind out",  # a buffer is not reused before its copy has finished
        "in behind compute",  # copies wait for compute, which may have changed masters
        "compute behind in",  # a step waits for its loads
        "compute behind out",  # readers of masters wait for the write-back
    ],
)
def test_each_wait_is_needed(race: str) -> None:
    assert not all(is_right(order, race) for order in ORDERS)


def test_what_is_on_the_device_stays_there() -> None:
    """Without a ring nothing moves."""
    both = [run(False), run(False)]
    for part in ChunkedState(both, lambda s: list(s.state), None).iter_chunks():
        assert part.param.data_ptr() == part.chunk.run.param.data_ptr()
        assert part.copy is None
        step(part)
    for stepped in both:
        assert torch.equal(stepped.param.data, 2 * torch.arange(float(NUMEL)) + 1)


def test_a_stretch_has_room_for_its_master() -> None:
    ring = StagingRing(CPU, SMALL)
    counts = [len(list(ChunkedState([run(away)], lambda s: list(s.state), ring).chunks)) for away in (False, True)]
    assert counts[1] > counts[0] > MIN_SLOTS
