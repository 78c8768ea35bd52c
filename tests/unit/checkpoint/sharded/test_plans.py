"""A rank's plan is the same after encoding and decoding, and a damaged one is refused."""

from __future__ import annotations

import io
import zlib
from typing import Any

import pytest

from lightning_zero.checkpoint.sharded.commit import decode_plan, encode_plan
from lightning_zero.checkpoint.sharded.planner import flatten_state, paths_of, plan_items
from lightning_zero.checkpoint.sharded.writer import RankFiles, write_items
from lightning_zero.errors import CheckpointError
from tests.helpers.threaded import sharded_state

WORLD = 3


class _Files:
    """In memory."""

    def __init__(self) -> None:
        self.files: list[io.BytesIO] = []

    def create(self, name: str) -> Any:
        self.files.append(io.BytesIO())
        return self.files[-1]


def _written(rank: int, only_weights: bool = False) -> tuple[RankFiles, dict[str, Any]]:
    state = sharded_state(rank, WORLD, 1.0)
    flat = flatten_state({"state_dict": state["state_dict"]} if only_weights else state)
    return write_items(plan_items(flat, rank), rank, _Files().create, lambda count: None), paths_of(flat)


def test_a_plan_travels_as_text() -> None:
    for rank in range(WORLD):
        placed = _written(rank)[0].items
        assert decode_plan(encode_plan(placed)) == list(placed)
        assert encode_plan(placed) == encode_plan(_written(rank)[0].items)


@pytest.mark.parametrize(
    "text",
    [
        b"no json",
        b"{}x",
        b"[1]",
        b"[[]]",
        b'[[["a"], "f", 0, 1, [2], "float99", null]]',
        b'[[["a"],"f",0,1,[2],"load",0]]',
    ],
)
def test_a_plan_that_is_none_is_refused(text: bytes) -> None:
    for packed in (zlib.compress(text), text):
        with pytest.raises(CheckpointError, match="plan of its files cannot be read"):
            decode_plan(packed)
