"""Idle times of a device, found in a trace."""

import json
from pathlib import Path
from typing import Any

import pytest

from compare.idle_gaps import MEETINGS, read, summarise
from lightning_zero.native.build import source_directory


def span(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def trace(steps: int = 3) -> list[dict[str, Any]]:
    """Each step takes 100 us: two kernels, 10 us apart; a copy during the first one outlasts it by 4."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
    for number in range(steps):
        begin = 100.0 * number
        events += [
            span("user_annotation", f"ProfilerStep#{number}", begin, 100),
            span("kernel", "product", begin + 10, 40),
            span("gpu_memcpy", "copy", begin + 40, 14),
            span("kernel", "sum", begin + 60, 30),
            span("cuda_runtime", "cudaGraphLaunch", begin + 52, 6),
        ]
    return events


def test_kernels_copies_and_idle_time_of_a_step_are_told_apart() -> None:
    found = summarise(trace())
    assert found is not None
    # The last mark ends the last whole step.
    assert (found.steps, found.us, found.computing, found.copying, found.idle) == (2, 100, 70, 4, 26)


def test_each_gap_is_named_by_its_ends_and_by_what_the_host_did() -> None:
    found = summarise(trace())
    assert found is not None
    gaps = {(gap.after, gap.before): gap for gap in found.gaps}
    inside = gaps["copy", "sum"]
    assert (inside.us, inside.times) == (6, 1)
    assert inside.calls == {"cudaGraphLaunch": 4}
    assert gaps["sum", "product"].us == 10  # of one gap in two steps
    assert [gap.us for gap in found.gaps] == sorted((gap.us for gap in found.gaps), reverse=True)
    assert found.calls == {"cudaGraphLaunch": 6}
    assert found.launched == {"cudaGraphLaunch": 1}
    assert "idle     10 us in 0.5 gaps: sum -> product (no call into the driver)" in "\n".join(found.lines())


def test_transfers_between_ranks_count_where_nothing_else_runs() -> None:
    meetings = [
        # NCCL's kernel takes 22 us. 12 of them overlap with a kernel, and one with the last copy.
        span("kernel", "ncclDevKernel_AllGather_RING_LL", 38, 22),
        span("kernel", "wait_for_parts", 90, 7),
    ]
    found = summarise([*trace(2), *meetings])
    assert found is not None
    assert (found.computing, found.meeting, found.copying, found.idle) == (70, 17, 0, 13)
    assert "transfers and waits alone 0.02," in found.lines()[0]


def test_all_kernels_of_ours_are_known_by_whether_ranks_meet_there() -> None:
    heads = [
        head.removeprefix(" __launch_bounds__(32)").removeprefix(" __launch_bounds__(256)").split("(")[0].split()[-1]
        for file in source_directory().rglob("*.cu")
        for head in file.read_text().replace("\\\n", "").split("__global__ void")[1:]
    ]
    assert set(heads) - MEETINGS == {"name"}  # of kernels.cu, which writes some by a macro
    assert set(heads) >= MEETINGS


@pytest.mark.parametrize("events", [[], trace(1), [e for e in trace() if e.get("cat") == "user_annotation"]])
def test_a_trace_of_less_than_a_step_or_without_kernels_tells_nothing(events: list[dict[str, Any]]) -> None:
    assert summarise(events) is None


def test_a_chrome_trace_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": trace()}))
    assert read(file) == summarise(trace())
