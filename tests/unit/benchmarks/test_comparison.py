"""Failed baselines are rows with the reason, and do not end the others; times are shares of ours."""

from dataclasses import replace
from typing import Any

import pytest

from compare.baselines import PEERS
from compare.comparison import HEADS, Devices, brief, cells, compare, ratios
from compare.job import Job

JOB = Job("", "tiny", 2, 8, 6, 2, "32-true", "aot_eager", 1.0, ("cuda_graphs=false",))
FOUND: dict[str, Any] = {
    "ms": 20.0,
    "ms_10_90": [19.0, 21.0],
    "start_s": 3.0,
    "peak_gib": 1.5,
    "reserved_gib": 2.0,
    "device_gib": None,
    "last_loss": 9.5,
}
# Times of baselines have their names; ddp fails on its second rank.
RANK = f"""
import json, os, sys
job = json.loads(sys.argv[1])
assert job["options"] == ["cuda_graphs=false"]
if job["peer"] == "ddp" and os.environ["RANK"] == "1":
    raise SystemExit("out of memory")
if os.environ["RANK"] == "0":
    found = {FOUND!r} | {{"ms": 10.0 * len(job["peer"]), "ranks": int(os.environ["WORLD_SIZE"])}}
    open(sys.argv[2], "w").write(json.dumps(found))
"""


DEVICES = Devices(ranks=2, gpus=False, limit_s=60.0, rank=["-c", RANK])


def test_each_peer_gets_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compare.baselines.find_spec", lambda name: None)
    said: list[str] = []
    names = ["floor", "ddp", "fsdp", "zero3_compile"]
    rows = {row["peer"]: row for row in compare(JOB, names, DEVICES, said.append)}
    assert list(rows) == names
    assert rows["floor"]["ranks"] == 1
    assert rows["zero3_compile"]["ranks"] == 2
    assert (rows["zero3_compile"]["ratio"], rows["floor"]["ratio"]) == (1.0, round(50 / 130, 3))
    assert rows["ddp"]["failed"] == "rank 1 ended with status 1: out of memory"
    assert "ms" not in rows["ddp"]
    assert rows["ddp"]["ratio"] is None
    assert rows["fsdp"]["failed"] == "needs GPUs"
    assert "zero3_compile: 130.0 ms" in said


def test_what_ended_halfway_goes_on_where_it_was() -> None:
    kept: list[list[dict[str, Any]]] = []
    names = ["floor", "ddp", "zero3_compile"]
    compare(JOB, names, DEVICES, lambda line: None, keep=kept.append)
    assert [[row["peer"] for row in rows] for rows in kept] == [names[:1], names[:2], names]
    only_ddp = RANK.replace("open(", "assert job['peer'] == 'ddp'; open(").replace(
        'raise SystemExit("out of memory")', "pass"
    )
    again: list[str] = []
    rows = compare(JOB, names, replace(DEVICES, rank=["-c", only_ddp]), again.append, kept[-1])
    assert [row.get("ms") for row in rows] == [50.0, 30.0, 130.0]
    assert again[0] == "floor: 50.0 ms, as before"
    assert rows[0]["ratio"] == round(50 / 130, 3)
    compare(JOB, names, replace(DEVICES, rank=["-c", only_ddp]), again.append, kept[-1], kept.append)
    assert [row["peer"] for row in kept[-1]] == names  # later rows are not lost if this ends here


def test_where_ours_has_no_time_the_first_is_the_measure() -> None:
    rows = ratios([{"peer": "zero3_compile"}, {"peer": "ddp", "ms": 4.0}, {"peer": "fsdp2", "ms": 6.0}])
    assert [row["ratio"] for row in rows] == [None, 1.0, 1.5]


def test_a_row_has_a_cell_for_each_head() -> None:
    shown = cells(FOUND | {"peer": "ddp", "ratio": 1.25})
    assert len(shown) == len(HEADS)
    assert shown == ("ddp", "20.0", "1.25", "3.0", "1.50 / 2.00 / -", "9.5000")


def test_a_reason_is_told_by_its_last_line() -> None:
    assert brief("Traceback\n  ...\nValueError: no\n") == "ValueError: no"
    assert brief("") == ""


@pytest.mark.parametrize("name", ["deepspeed", "deepcompile"])
def test_what_is_not_installed_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compare.baselines.find_spec", lambda name: None)
    assert PEERS[name].missing_requirement(gpus=True) == "deepspeed is not installed"
    monkeypatch.setattr("compare.baselines.find_spec", lambda name: name)
    assert PEERS[name].missing_requirement(gpus=True) == ""
    assert PEERS[name].missing_requirement(gpus=False) == "needs GPUs"
