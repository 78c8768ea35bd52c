"""What lies where is told once, and not in each save; what is read is what was saved all the same."""

from __future__ import annotations

import io
import pickle
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lightning_zero.checkpoint.sharded import commit
from lightning_zero.checkpoint.sharded.commit import PlanCache, decode_plan, encode_plan, save_sharded
from lightning_zero.checkpoint.sharded.metadata import build_metadata, read_metadata
from lightning_zero.checkpoint.sharded.planner import flatten_state, paths_of, plan_items
from lightning_zero.checkpoint.sharded.writer import RankFiles, write_items
from lightning_zero.errors import CheckpointError
from tests.helpers.saves import seed_of
from tests.helpers.threaded import on_ranks, sharded_state

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


def _save(plans: list[PlanCache], save_id: str, only_weights: bool = False) -> tuple[bytes, bytes, list[bool]]:
    """The metadata, as they should be, and who has told a plan."""
    written = [_written(rank, only_weights) for rank in range(WORLD)]
    paths = written[0][1]
    briefs = [plan.summarize(files) for plan, (files, _) in zip(plans, written, strict=True)]
    found = plans[0].metadata(briefs, paths, save_id)
    wanted = build_metadata((place for files, _ in written for place in files.items), paths, save_id)
    return found, pickle.dumps(wanted), [brief.plan is not None for brief in briefs]


def _read(data: bytes) -> Any:
    return read_metadata(io.BytesIO(data), "x")


def test_it_is_told_once_and_again_when_it_is_another() -> None:
    plans = [PlanCache() for _ in range(WORLD)]
    for number, (only_weights, tells) in enumerate([(False, True), (False, False), (False, False), (True, True)]):
        save_id = f"lightning_zero-{number:032}"
        found, wanted, told = _save(plans, save_id, only_weights)
        assert told == [tells] * WORLD
        assert _read(found) == _read(wanted)
        assert _read(found).storage_meta.save_id == save_id
        for plan in plans:
            plan.confirm()


def test_after_a_save_that_has_failed_all_is_told_again() -> None:
    plans = [PlanCache() for _ in range(WORLD)]
    for number in range(4):
        found, wanted, told = _save(plans, f"lightning_zero-{number:032}")
        assert told == [number in (0, 2)] * WORLD
        assert _read(found) == _read(wanted)
        for plan in plans:
            plan.forget() if number == 1 else plan.confirm()


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


def test_ranks_that_are_not_of_one_mind_say_so_once() -> None:
    plans = [PlanCache() for _ in range(WORLD)]
    _save(plans, "a" * 40)
    for plan in plans[1:]:
        plan.confirm()
    with pytest.raises(CheckpointError, match="rank 1 uses a plan that rank 0 does not have"):
        _save(plans, "b" * 40)
    for plan in plans:
        plan.forget()
    assert _save(plans, "c" * 40)[2] == [True] * WORLD


def test_many_saves_of_one_training(tmp_path: Path) -> None:
    """Among them one that fails, and one of weights only."""
    path = tmp_path / "x.ckpt"
    plans = [PlanCache() for _ in range(WORLD)]
    built = []

    def save(seed: float, only_weights: bool = False) -> list[Any]:
        def attempt(together: Any) -> None:
            state = sharded_state(together.rank, WORLD, seed)
            state = {"state_dict": state["state_dict"]} if only_weights else state
            save_sharded(path, state, {"seed": seed}, together, plans=plans[together.rank])

        return on_ranks(WORLD, attempt)

    real = build_metadata
    with patch("lightning_zero.checkpoint.sharded.commit.build_metadata", lambda *args: built.append(1) or real(*args)):
        for seed, only_weights, building in [(1.0, False, 1), (2.0, False, 1), (3.0, True, 2), (4.0, False, 3)]:
            assert save(seed, only_weights) == [None] * WORLD
            assert seed_of(path) == seed
            assert len(built) == building
        with patch.object(commit, "write_file", side_effect=OSError(28, "No space left on device")):
            assert all("No space left" in str(error) for error in save(5.0))
        assert seed_of(path) == 4.0
        for seed, building in [(6.0, 4), (7.0, 4)]:
            assert save(seed) == [None] * WORLD
            assert seed_of(path) == seed
            assert len(built) == building
