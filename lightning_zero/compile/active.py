"""Counts of the compiler optimizations in use. A count of zero shows an optimization that a new torch has disabled."""

from __future__ import annotations

from collections import Counter

from lightning_zero.compat.cuts import HAS_ITS_OWN
from lightning_zero.compat.patches import PATCHES

__all__ = ["OPTIMIZATION_COUNTS", "OptimizationCounts", "left_out"]


class OptimizationCounts(Counter[str]):
    """Counts in one process, as torch shares what it has compiled between engines.

    "layers stamped" and "layers traced" by Dynamo; "layers" in joint graphs and the "layers differentiated" for them;
    "pieces" of graphs and the "pieces compiled" for them.
    """

    def text(self) -> str:
        """Return one line for the log."""
        counts = ", ".join(f"{what} {number}" for what, number in sorted(self.items()) if number)
        cut = "torch's" if HAS_ITS_OWN else "ours"
        out = "; ".join(left_out())
        return f"{counts or 'nothing yet'}; smallest cuts: {cut}; left out: {out or 'nothing'}"


OPTIMIZATION_COUNTS = OptimizationCounts()


def left_out() -> list[str]:
    """Return the features that are left out with this torch, each with the reason."""
    return [f"{patch.feature} ({patch.reason})" for patch in PATCHES if patch.reason]
