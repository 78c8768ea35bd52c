"""Which part of the reading is whose."""

from types import SimpleNamespace
from typing import Any

from lightning_zero.checkpoint.together import Alone, Together


def test_ranks_of_a_host_share_what_lies_there() -> None:
    """Each host may have a copy of its own, and damage in one is not seen on another."""

    def on(rank: int) -> tuple[int, int]:
        mesh: Any = SimpleNamespace(hosts=(0, 1, 0, 1, 1), rank=rank, world_size=5)
        watchdog: Any = None
        return Together(mesh, watchdog).share

    assert [on(rank) for rank in range(5)] == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert Alone().share == (0, 1)
