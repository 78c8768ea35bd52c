"""Save a sharded checkpoint: all ranks write their files concurrently, and rank 0 commits them.

:func:`save_sharded` does all steps; an async save calls :func:`begin_save` and :func:`finish_save` itself. Ranks send
rank 0 a :class:`RankSummary`, as JSON and not as a pickle: all that can reach the ranks' store may write to it.
"""

from __future__ import annotations

import base64
import json
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from lightning_zero.checkpoint.atomic import becomes_visible
from lightning_zero.checkpoint.file_writers import ChecksumWriter
from lightning_zero.checkpoint.integrity import FileChecksum
from lightning_zero.checkpoint.rank_tasks import RankTasks
from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.folder import MANIFEST, Manifest, SaveFolder, full_path, save_folder_at
from lightning_zero.checkpoint.sharded.metadata import (
    METADATA,
    OBJECTS_FILE,
    SAVE_ID_PREFIX,
    build_metadata,
    dump_metadata,
)
from lightning_zero.checkpoint.sharded.planner import Keys, StoredItem, flatten_state, paths_of, plan_items, serialize
from lightning_zero.checkpoint.sharded.writer import RankFiles, write_items
from lightning_zero.errors import CheckpointError

COMPRESSION = 1  # the fastest of zlib's levels: names and shapes repeat, so a higher one gains little


@dataclass(frozen=True)
class PendingSave:
    """A save that has begun: every rank sees its folder."""

    path: str
    save_id: str
    folder: SaveFolder
    what: str


def begin_save(path: str | Path, ranks: RankTasks, prepare: Callable[[], object]) -> PendingSave:
    """Make the folder of a save. Collective, in two steps, which training waits for.

    Args:
        prepare: this rank's preparation, after it sees the folder; if it fails on one rank, the save fails on all.
    """
    save_id = f"{SAVE_ID_PREFIX}{uuid.uuid4().hex}"
    folders: list[SaveFolder] = []

    def begin() -> tuple[str, str]:
        # Another rank may have another working directory, so rank 0 resolves a relative path.
        place = full_path(path)
        folders.append(save_folder_at(place))
        folders[0].begin(save_id)
        return place, save_id

    def follow() -> None:
        if ranks.rank:
            folders.append(save_folder_at(place))
        if not becomes_visible(lambda: folders[0].sees(save_id)):
            raise CheckpointError(
                f"this rank does not see the folder that rank 0 has made at {place}. Sharded checkpoints need a place "
                "that all hosts share; give one, or save with state_dict_type='full'."
            )
        prepare()

    with discard_on_error(folders, ranks):
        place, save_id = ranks.run_on_rank0(f"save a checkpoint to {path}", begin)
        what = f"save a checkpoint to {place}"
        ranks.run_on_all(what, follow)
    [folder] = folders
    return PendingSave(place, save_id, folder, what)


def save_sharded(
    path: str | Path,
    state: Mapping[str, Any],
    rest: Any,
    ranks: RankTasks,
    on_write: Callable[[int], None] = lambda count: None,
) -> None:
    """Write a folder that DCP, Lightning's sharded strategies and this package can read. Collective.

    Args:
        path: of the folder, or its URL; rank 0's is used.
        state: nested dicts of tensors, of
            :class:`~lightning_zero.checkpoint.sharded.checkpoint_tensors.CheckpointShard` and of other values, with the
            same keys on every rank. Rank 0 writes what is not sharded.
        on_write: is called, from several threads, with the bytes that this rank has written.

    Raises:
        CheckpointError: on every rank, if one failed; the previous checkpoint at ``path`` remains.
    """
    planned: list[tuple[dict[str, Any], list[Any]]] = []

    def plan() -> None:
        flat = flatten_state(state)
        planned.append((flat, list(plan_items(flat, ranks.rank))))

    save = begin_save(path, ranks, plan)
    [(flat, items)] = planned
    with discard_on_error([save.folder], ranks):
        summaries = ranks.run_on_all(
            save.what, lambda: RankSummary.of(write_items(items, ranks.rank, save.folder.create, on_write))
        )
        ranks.run_on_rank0(save.what, lambda: finish_save(save, summaries, paths_of(flat), serialize(rest), on_write))


@contextmanager
def discard_on_error(folders: Sequence[SaveFolder], ranks: RankTasks) -> Iterator[None]:
    """Discard the folders on rank 0 if the context raises."""
    try:
        yield
    except BaseException:
        for folder in folders if ranks.rank == 0 else ():
            discard(folder)
        raise


def discard(folder: SaveFolder) -> None:
    """Remove the files of a failed save as far as possible; the error of the save is the one to report."""
    with suppress(Exception):
        folder.discard()


def finish_save(
    save: PendingSave,
    summaries: Sequence[RankSummary],
    paths: Mapping[str, Keys],
    rest: bytes,
    on_progress: Callable[[int], None] = lambda count: None,
) -> None:
    """Commit the files of all ranks as a checkpoint. On rank 0."""
    checksums: dict[str, FileChecksum] = {}
    for summary in summaries:
        checksums.update(summary.checksums)
    items = chain.from_iterable(decode_plan(summary.plan) for summary in summaries)
    metadata = dump_metadata(build_metadata(items, paths, save.save_id))
    for name, data in ((OBJECTS_FILE, rest), (METADATA, metadata)):
        checksums[name] = write_file(save.folder, name, data)
    write_file(save.folder, MANIFEST, Manifest(save.save_id, len(summaries), checksums).to_bytes())
    save.folder.commit(on_progress)


def write_file(folder: SaveFolder, name: str, data: bytes) -> FileChecksum:
    with ChecksumWriter(folder.create(name)) as file:
        file.write(data)
    return file.checksum


# -- plans


@dataclass(frozen=True)
class RankSummary:
    """The written files of one rank."""

    checksums: Mapping[str, FileChecksum]
    plan: bytes

    @classmethod
    def of(cls, files: RankFiles) -> RankSummary:
        return cls(files.checksums, encode_plan(files.items))

    def to_text(self) -> str:
        sums = {name: (of.bytes, of.xxh3_128) for name, of in self.checksums.items()}
        return json.dumps({"sums": sums, "plan": base64.b64encode(self.plan).decode()})

    @classmethod
    def from_text(cls, text: str) -> RankSummary:
        """Parse a result of :meth:`to_text`."""
        try:
            read = json.loads(text)
            checksums = {name: FileChecksum(int(size), str(of)) for name, (size, of) in read["sums"].items()}
            return cls(checksums, base64.b64decode(read["plan"], validate=True))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"A rank's summary of its files cannot be read ({type(error).__name__}: {error})."
            ) from error


def encode_plan(items: Iterable[StoredItem]) -> bytes:
    """Return compressed JSON, the same for the same items."""
    rows = [
        (
            item.keys,
            item.file,
            item.offset,
            item.length,
            None if item.shape is None else tuple(item.shape),
            None if item.dtype is None else str(item.dtype).removeprefix("torch."),
            None if item.box is None else (item.box.offsets, item.box.sizes),
        )
        for item in items
    ]
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), COMPRESSION)


def decode_plan(plan: bytes) -> list[StoredItem]:
    """Return the items of :func:`encode_plan`."""
    try:
        return [_item(*row) for row in json.loads(zlib.decompress(plan))]
    except (zlib.error, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"A rank's plan of its files cannot be read ({type(error).__name__}: {error})."
        ) from error


def _item(
    keys: list[str], file: str, offset: int, length: int, shape: list[int] | None, dtype: str | None, box: Any
) -> StoredItem:
    kind = None if dtype is None else getattr(torch, dtype)
    if kind is not None and not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype")
    size = None if shape is None else torch.Size(shape)
    part = None if box is None else Box(tuple(box[0]), tuple(box[1]))
    return StoredItem(tuple(keys), file, offset, length, size, kind, part)
