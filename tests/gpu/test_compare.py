"""Peers that need GPUs train the built-in model as ours does."""

import json
from pathlib import Path

import pytest

from tests.helpers.command import run
from tests.ranks.pool import REPO

pytestmark = pytest.mark.gpu(2, apart=True)
COMPARE = str(REPO / "examples" / "benchmarks" / "compare")
PEERS = ["floor", "zero3_compile", "ddp", "fsdp", "fsdp2", "fsdp2_graph"]


@pytest.mark.slow
def test_all_peers_of_torch_have_times_and_come_to_the_same_loss(native_library: None, tmp_path: Path) -> None:
    few = ["--steps", "12", "--warm", "6", "--length", "64", "--backend", "aot_eager", "--ranks", "2", "--limit", "100"]
    # In parts, for each is given two minutes.
    rows = []
    for part in (PEERS[:2], PEERS[2:4], PEERS[4:]):
        done = run(COMPARE, "tiny", "--only", ",".join(part), *few, "--out", "o", cwd=tmp_path)
        rows += json.loads((tmp_path / "o" / "bench.json").read_text())["rows"]
        assert [row["failed"] for row in rows] == [""] * len(rows), done.stdout
    ddp = next(row for row in rows if row["peer"] == "ddp")
    for row in rows:
        assert row["ms"] > 0
        assert row["peak_gib"] > 0
        if row["peer"] != "floor":  # which sees half of the data
            assert row["last_loss"] == pytest.approx(ddp["last_loss"], abs=0.05), row["peer"]
