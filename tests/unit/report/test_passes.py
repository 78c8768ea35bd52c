"""What is written of each pass."""

from pathlib import Path

from lightning_zero.compile.passes.base import PassTrace
from lightning_zero.report.passes import write_passes

SWAP = PassTrace("swap", 1.25, 6, ("neg",), ("relu",), ("mm", "add"), (), "--- before\n+++ after swap\n-relu\n+neg\n")
LOOK = PassTrace("look", 0.5, 6, (), (), (), (), "")


def test_only_passes_that_did_something_leave_a_diff(tmp_path: Path) -> None:
    write_passes(tmp_path / "deep" / "passes", "graph_00_forward", [LOOK, SWAP])
    written = {path.name: path.read_text() for path in (tmp_path / "deep" / "passes").iterdir()}
    assert sorted(written) == ["graph_00_forward.txt", "graph_00_forward_01_swap.diff"]
    assert written["graph_00_forward_01_swap.diff"] == SWAP.diff
    assert [line.split() for line in written["graph_00_forward.txt"].splitlines()] == [
        ["pass", "ms", "nodes", "afterwards", "added", "removed", "changed", "moved"],
        ["look", "0.50", "6", "0", "0", "0", "0"],
        ["swap", "1.25", "6", "1", "1", "2", "0"],
    ]
