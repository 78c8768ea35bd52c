"""Readers of files with random changes return the saved values, or name the file."""

from __future__ import annotations

import pickle
import shutil
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis", reason="it is in the extra named test")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from lightning_zero.checkpoint.sharded.boxes import (
    Box,  # noqa: E402
    tiling_error,  # noqa: E402
)
from lightning_zero.checkpoint.sharded.metadata import (  # noqa: E402
    CLASSES,
    FUNCTIONS,
    _MetadataUnpickler,
    load_restricted,
)
from lightning_zero.checkpoint.sharded.planner import nest_state  # noqa: E402
from lightning_zero.errors import CheckpointError  # noqa: E402
from tests.helpers.damaged_inputs import FORMATS, copied, read, values_in, write  # noqa: E402

SOON_S = 20.0  # on a busy machine
UNCHECKED = ("dcp", "safetensors")  # without checksums of all their bytes: another name or value may be read

EDITS = st.lists(
    st.tuples(
        st.floats(0, 0.999), st.sampled_from(["flip", "set", "insert", "delete", "double"]), st.binary(max_size=9)
    ),
    min_size=1,
    max_size=4,
)


def _edited(data: bytes, edits: list[tuple[float, str, bytes]]) -> bytes:
    made = bytearray(data)
    for part, how, some in edits:
        at = int(part * len(made))
        if how == "flip" and made:
            made[at] ^= 1 << len(some) % 8
        elif how == "set":
            made[at : at + len(some)] = some
        elif how == "insert":
            made[at:at] = some
        elif how == "delete":
            del made[at : at + len(some) * len(some)]
        elif how == "double":
            made[at:at] = made[at : at + 64]
    return bytes(made)


def _fuzz(examples: int, test: Callable[..., None], **drawn: Any) -> None:
    health = list(HealthCheck)
    run = settings(
        max_examples=examples, deadline=None, database=None, derandomize=examples < 100, suppress_health_check=health
    )
    run(given(**drawn)(test))()


def _fuzz_reader(kind: str, home: Path, examples: int) -> None:
    good = write(kind, home / "good.ckpt")
    wanted = values_in(read(kind, good))
    names = sorted(str(file.relative_to(good)) for file in good.rglob("*") if file.is_file()) if good.is_dir() else [""]

    def test(name: str, edits: list[tuple[float, str, bytes]]) -> None:
        path = copied(good, home / "x.ckpt")
        try:
            file = path / name if name else path
            file.write_bytes(_edited(file.read_bytes(), edits))
            begin = time.monotonic()
            found, said = wanted, "x.ckpt"
            try:
                found = values_in(read(kind, path))
            except CheckpointError as error:
                said = str(error)
            assert "x.ckpt" in said
            same = found.keys() == wanted.keys() and all(torch.equal(found[k], v) for k, v in wanted.items())
            assert same or kind in UNCHECKED, f"{name} was read, with other values"
            assert time.monotonic() - begin < SOON_S
        finally:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    _fuzz(examples, test, name=st.sampled_from(names), edits=EDITS)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_few_changes_of_bytes(tmp_path: Path, kind: str) -> None:
    _fuzz_reader(kind, tmp_path, 12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", FORMATS)
def test_changes_of_bytes(tmp_path: Path, kind: str) -> None:
    _fuzz_reader(kind, tmp_path, 400)


@pytest.mark.parametrize("examples", [50, pytest.param(3000, marks=pytest.mark.exhaustive)])
def test_any_instructions_of_a_pickle(examples: int) -> None:
    names = [f"c{module}\n{name}\n".encode() for module, name in (*CLASSES, *FUNCTIONS, ("torch", "int8"))]
    some = st.binary(max_size=4)
    steps = st.one_of(
        st.sampled_from([*names, b"\x8c\x03fqn", b"K\x07", b"}", b"]", b")", b"N", b")\x81", b"\x94", b"h\x00"]),
        st.tuples(st.sampled_from(sorted(bytes([code]) for code in _MetadataUnpickler.dispatch)), some).map(b"".join),
    )

    def test(parts: list[bytes]) -> None:
        data = b"".join(parts) + pickle.STOP
        tracemalloc.start()
        with suppress(Exception):  # read_metadata() names the file of any
            load_restricted(data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20

    _fuzz(examples, test, parts=st.lists(steps, max_size=30))


@pytest.mark.parametrize("examples", [150, pytest.param(5000, marks=pytest.mark.exhaustive)])
def test_boxes_are_compared_with_a_count_of_each_element(examples: int) -> None:
    @st.composite
    def layouts(draw: Any) -> tuple[tuple[int, ...], list[Box]]:
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        boxes = [Box((0,) * len(shape), shape)]
        for _ in range(draw(st.integers(0, 6)) if prod(shape) else 0):  # cut one in two
            box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
            dim = draw(st.integers(0, len(shape) - 1)) if shape else None
            at = 0 if dim is None else draw(st.integers(0, box.sizes[dim]))
            for begin, size in ((0, at), (at, 0 if dim is None else box.sizes[dim] - at)) if dim is not None else ():
                offsets, sizes = list(box.offsets), list(box.sizes)
                offsets[dim], sizes[dim] = offsets[dim] + begin, size
                boxes.append(Box(tuple(offsets), tuple(sizes)))
            boxes = boxes or [box]
        for _ in range(draw(st.integers(0, 2))):  # move one
            box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
            offsets = tuple(draw(st.integers(0, n - size)) for n, size in zip(shape, box.sizes, strict=True))
            boxes.append(Box(offsets, box.sizes))
        return shape, boxes

    def test(layout: tuple[tuple[int, ...], list[Box]]) -> None:
        shape, boxes = layout
        count = torch.zeros(shape, dtype=torch.int64)
        for box in boxes:
            count[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))] += 1
        assert (tiling_error(shape, boxes) is None) == bool((count == 1).all())

    _fuzz(examples, test, layout=layouts())


@pytest.mark.parametrize("examples", [100, pytest.param(3000, marks=pytest.mark.exhaustive)])
def test_any_paths_are_followed_or_refused(examples: int) -> None:
    keys = st.one_of(st.sampled_from(["a", "b"]), st.integers(-2, 3), st.integers(1 << 40, 1 << 60))

    def test(paths: list[list[Any]]) -> None:
        entries = {("x", *path): number for number, path in enumerate(paths)}
        try:
            found = nest_state(entries)
        except ValueError:
            return
        for path, number in entries.items():
            place: Any = found
            for key in path:
                place = place[key]
            assert place == number

    _fuzz(examples, test, paths=st.lists(st.lists(keys, max_size=3), max_size=5))


def test_many_boxes_take_no_longer_than_their_number() -> None:
    boxes = [Box((row, begin), (1, 4)) for row in range(200) for begin in range(0, 400, 4)]
    begin = time.process_time()
    assert tiling_error((200, 400), boxes) is None
    assert time.process_time() - begin < 10
    boxes[7] = boxes[8]
    assert "overlap in one place" in str(tiling_error((200, 400), boxes))
    cut = [Box(tuple(number >> dim & 1 for dim in range(12)), (1,) * 12) for number in range(1 << 12)]
    assert tiling_error((2,) * 12, cut) is not None, "too many to be checked"
