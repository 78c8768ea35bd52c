"""Sharded checkpoints where there is no rename: in object stores, and wherever else fsspec reaches."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lightning_zero.checkpoint.atomic import INCOMPLETE
from lightning_zero.checkpoint.sharded.checkpoint_tensors import CheckpointShard
from lightning_zero.checkpoint.sharded.commit import save_sharded
from lightning_zero.checkpoint.sharded.folder import MANIFEST, RemoteFolder
from lightning_zero.checkpoint.sharded.reader import CheckpointReader, checkpoint_kind
from lightning_zero.errors import CheckpointError
from lightning_zero.integrations.checkpoint_files import read_folder, read_on_all_ranks
from lightning_zero.integrations.trainer.checkpoint_lookup import _replace_broken_last, other_checkpoints
from lightning_zero.sharding.layout import ShardLayout
from tests.helpers.elsewhere import Counted, Mounted, counting, mount, stored
from tests.helpers.threaded import checkpoints_of, on_ranks, sharded_state, values_of

WORLD = 2


@pytest.fixture(params=["memory", "mounted"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    mount(tmp_path)
    with stored():
        yield f"{request.param}://run"


def save(path: str, seed: float) -> list[Any]:
    def attempt(together: Any) -> None:
        save_sharded(path, sharded_state(together.rank, WORLD, seed), {"seed": seed}, together)

    return on_ranks(WORLD, attempt)


def seed_of(path: str) -> float | None:
    if checkpoint_kind(path) == "nothing":
        return None
    found = read_folder(path, None)
    for key, value in values_of(found["seed"]).items():
        assert torch.equal(found["state_dict"][key].full_tensor(), value), key
    return found["seed"]


def names(root: str) -> list[str]:
    fs, place = fsspec.core.url_to_fs(root)
    return sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(place, detail=False))


def test_one_after_another(root: str) -> None:
    path = f"{root}/x.ckpt"
    assert seed_of(path) is None
    for seed in (1.0, 2.0, 3.0):
        assert save(path, seed) == [None, None]
        assert seed_of(path) == seed
        assert names(root) == ["x.ckpt"]
        assert ".save_id" not in names(path)
    found = on_ranks(WORLD, lambda together: read_on_all_ranks(checkpoints_of(together), path, None)["seed"])
    assert found == [3.0, 3.0]


@pytest.fixture
def large() -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint of one rank with one weight, of 32 MiB, in one piece."""
    value = torch.randn(2048, 4096, generator=torch.Generator().manual_seed(0))
    layout = ShardLayout.from_shape(value.shape, value.dtype, 1)
    state = {"w": CheckpointShard(layout, value.flatten(), 0)}
    path = "counted://run/x.ckpt"
    with counting(".distcp"):
        on_ranks(1, lambda together: save_sharded(path, {"state_dict": state}, {}, together))
        yield path, value


@pytest.mark.parametrize("theirs", [False, True], ids=["ours", "another's"])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_a_rank_reads_its_part_of_the_downloaded_file(
    large: tuple[str, torch.Tensor], world_size: int, theirs: bool
) -> None:
    path, value = large
    if theirs:
        Counted().rm_file(f"{fsspec.core.url_to_fs(path)[1]}/{MANIFEST}")
    with patch("lightning_zero.checkpoint.sharded.reader.SAVE_ID_PREFIX", "another") if theirs else nullcontext():
        saved = CheckpointReader(path).state()["state_dict"]["w"]
    layout = ShardLayout.from_shape(value.shape, value.dtype, world_size)
    for rank in range(world_size):
        shard = torch.empty(layout.shard_numel)
        saved.read_part(shard, layout, rank)
        own = value.flatten()[rank * len(shard) : (rank + 1) * len(shard)]
        assert torch.equal(shard[: len(own)], own)


def test_a_piece_that_is_replaced_is_not_read_as_a_mixture(large: tuple[str, torch.Tensor]) -> None:
    path, value = large
    saved = CheckpointReader(path).state()["state_dict"]["w"]
    other = CheckpointReader(path).state()["state_dict"]["w"]
    layout = ShardLayout.from_shape(value.shape, value.dtype, 4)
    shard = torch.empty(layout.shard_numel)
    saved.read_part(shard, layout, 0)
    fs, place = fsspec.core.url_to_fs(path)
    [piece] = [entry for entry in fs.ls(place, detail=False) if entry.endswith(".distcp")]
    data = bytearray(fs.cat_file(piece))
    data[len(data) // 2] ^= 1
    fs.pipe_file(piece, bytes(data))
    saved.read_part(shard, layout, 1)
    assert torch.equal(shard, value.flatten()[len(shard) : 2 * len(shard)])
    with pytest.raises(CheckpointError, match=r"distcp is damaged: its checksum is"):
        other.read_part(shard, layout, 1)


def test_a_file_gives_way_to_a_folder(root: str) -> None:
    path = f"{root}/x.ckpt"
    with fsspec.open(path, "wb") as file:
        file.write(b"a full one")
    assert save(path, 2.0) == [None, None]
    assert seed_of(path) == 2.0


STEPS = ["exists", "rm", "rm_file", "makedirs", "pipe_file", "open", "copy", "cp_file"]


class Killed(BaseException):
    """No code catches it, and nothing runs after it."""


def _dying(fs: type, after: int) -> tuple[ExitStack, list[str]]:
    """From the ``after``-th change on nothing reaches the file system."""
    stack, seen = ExitStack(), list[str]()

    def stopping(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            if len(seen) > after:
                raise Killed(name)
            return original(*args, **kwargs)

        return call

    for name in STEPS:
        stack.enter_context(patch.object(fs, name, stopping(name, getattr(fs, name))))
    return stack, seen


@pytest.mark.parametrize("over", [False, True], ids=["a new place", "over another"])
@pytest.mark.exhaustive_variants("memory-over another")
def test_a_save_that_dies_leaves_the_last_checkpoint_or_the_new_one(root: str, over: bool, tmp_path: Path) -> None:
    fs = MemoryFileSystem if root.startswith("memory") else Mounted
    found: list[float | None] = []
    for after in range(200):
        path = f"{root}/{after}/x.ckpt"
        if over:
            save(path, 1.0)
        stack, seen = _dying(fs, after)
        with stack, patch.object(RemoteFolder, "discard", lambda self: None):
            save(path, 2.0)
        with nullcontext() if over else suppress(CheckpointError):
            found.append(seed_of(path))
        found += [None] * (after + 1 - len(found))
        assert found[-1] in ((1.0 if over else None), 2.0), after
        if after % 3 == 0:
            assert save(path, 3.0) == [None, None], "the next save clears up"
            assert seed_of(path) == 3.0, after
            assert names(f"{root}/{after}") == ["x.ckpt"]
        if len(seen) <= after:
            break
    else:
        pytest.fail("never came to an end")
    assert after > 10
    assert found[-1] == 2.0
    assert found == sorted(found, key=lambda seed: seed == 2.0), "the new checkpoint was there, and then not"


def test_a_rank_that_dies_when_all_is_done_takes_nothing_along(root: str) -> None:
    path = f"{root}/x.ckpt"

    def attempt(together: Any) -> None:
        first = together.run_on_rank0

        def dying(what: str, attempt: Callable[[], Any]) -> Any:
            result = first(what, attempt)
            if "finish_save" in attempt.__code__.co_names:
                raise ConnectionError("rank 1 is gone")
            return result

        together.run_on_rank0 = dying
        save_sharded(path, sharded_state(together.rank, WORLD, 1.0), {"seed": 1.0}, together)

    assert all(isinstance(error, ConnectionError) for error in on_ranks(WORLD, attempt))
    assert seed_of(path) == 1.0


def test_a_copy_that_fails_leaves_the_new_one_readable(root: str) -> None:
    path = f"{root}/x.ckpt"
    save(path, 1.0)
    fs = MemoryFileSystem if root.startswith("memory") else Mounted
    with patch.object(fs, "cp_file", lambda *_, **__: (_ for _ in ()).throw(OSError("throttled"))):
        errors = save(path, 2.0)
    assert all("throttled" in str(error) for error in errors)
    assert seed_of(path) == 2.0
    assert names(root) == [f"x.ckpt{INCOMPLETE}"] or "x.ckpt" in names(root)


def test_a_copy_of_the_folder_is_a_checkpoint_and_a_part_of_one_is_not(root: str, tmp_path: Path) -> None:
    path, copy = f"{root}/x.ckpt", tmp_path / "copy.ckpt"
    save(path, 1.0)
    fs, place = fsspec.core.url_to_fs(path)
    copy.mkdir()
    for name in names(path):
        (copy / name).write_bytes(fs.cat_file(f"{place}/{name}"))
    assert read_folder(copy, None)["seed"] == 1.0
    for name in names(path):
        part = tmp_path / "part.ckpt"
        shutil.copytree(copy, part)
        (part / name).unlink()
        with pytest.raises(CheckpointError, match=name):
            read_folder(part, None)
        shutil.rmtree(part)
    assert MANIFEST in names(path)


def test_others_are_found_newest_first(root: str) -> None:
    for seed, name in enumerate(["b", "a", "c"]):
        save(f"{root}/{name}.ckpt", seed)
    assert [entry.rsplit("/", 1)[-1] for entry in other_checkpoints(f"{root}/c.ckpt")] == ["a.ckpt", "b.ckpt"]


def test_the_last_one_is_found_where_lightning_does_not_look(root: str) -> None:
    for seed, name in enumerate(["a", "last", "b"]):
        save(f"{root}/{name}.ckpt", seed)
    trainer: Any = SimpleNamespace(
        checkpoint_callbacks=[SimpleNamespace(dirpath=f"{root}/none"), SimpleNamespace(dirpath=root)]
    )
    with pytest.warns(UserWarning, match=f"finds no last checkpoint in {root}"):
        path = _replace_broken_last(trainer)
    assert path is not None
    assert seed_of(path) == 2


def test_another_one_is_the_last_only_where_there_was_a_last_one(tmp_path: Path) -> None:
    (tmp_path / "step=1.ckpt").touch()
    trainer: Any = SimpleNamespace(checkpoint_callbacks=[SimpleNamespace(dirpath=str(tmp_path))])
    assert _replace_broken_last(trainer) is None
    for left in ("last.ckpt", "last.ckpt.incomplete"):
        (tmp_path / left).symlink_to("nowhere")
        with pytest.warns(UserWarning, match="was not saved to its end"):
            assert _replace_broken_last(trainer) == str(tmp_path / "step=1.ckpt")
        (tmp_path / left).unlink()
