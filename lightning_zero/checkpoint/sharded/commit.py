"""Save a sharded checkpoint: all ranks write their files concurrently, and rank 0 commits them.

:func:`save_sharded` does all steps; an async save calls :func:`begin_save` and :func:`finish_save` itself. Ranks send
rank 0 a :class:`RankSummary`. Plans are the same in each save of a training and long for many ranks: :class:`PlanCache`
sends one again only if it has changed, and rank 0 reuses the metadata. Plans are sent as JSON and not as pickles: all
that can reach the ranks' store may write to it.

:func:`relink_save` saves an unchanged state to a second path by hard links, as ``ModelCheckpoint(save_last=True)``
does.
"""

from __future__ import annotations

import base64
import json
import pickle
import uuid
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from lightning_zero.checkpoint.atomic import becomes_visible
from lightning_zero.checkpoint.file_writers import ChecksumWriter
from lightning_zero.checkpoint.integrity import FileChecksum, digest_of
from lightning_zero.checkpoint.rank_tasks import RankTasks
from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.folder import (
    MANIFEST,
    LocalFolder,
    Manifest,
    SaveFolder,
    full_path,
    save_folder_at,
)
from lightning_zero.checkpoint.sharded.metadata import METADATA, OBJECTS_FILE, SAVE_ID_PREFIX, build_metadata
from lightning_zero.checkpoint.sharded.planner import (
    Keys,
    PickledItem,
    StoredItem,
    flatten_state,
    paths_of,
    plan_items,
    serialize,
)
from lightning_zero.checkpoint.sharded.reader import CheckpointReader
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
        path: of rank 0.
        ranks: the ranks.
        prepare: this rank's preparation, after it sees the folder; if it fails on one rank, the save fails on all.

    Raises:
        CheckpointError: on every rank.
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
    plans: PlanCache | None = None,
) -> str:
    """Write a folder that DCP, Lightning's sharded strategies and this package can read. Collective.

    Args:
        path: of the folder, or its URL; rank 0's is used.
        state: nested dicts of tensors, of
            :class:`~lightning_zero.checkpoint.sharded.checkpoint_tensors.CheckpointShard` and of other values, with the
            same keys on every rank. Rank 0 writes what is not sharded.
        rest: is pickled as one object by rank 0.
        ranks: the ranks.
        on_write: is called, from several threads, with the bytes that this rank has written.
        plans: of earlier saves.

    Returns:
        The absolute path on rank 0.

    Raises:
        CheckpointError: on every rank, if one failed; the previous checkpoint at ``path`` remains.
    """
    plans = PlanCache() if plans is None else plans
    planned: list[tuple[dict[str, Any], list[Any]]] = []

    def plan() -> None:
        flat = flatten_state(state)
        planned.append((flat, list(plan_items(flat, ranks.rank))))

    save = begin_save(path, ranks, plan)
    [(flat, items)] = planned
    try:
        with discard_on_error([save.folder], ranks):
            summaries = ranks.run_on_all(
                save.what, lambda: plans.summarize(write_items(items, ranks.rank, save.folder.create, on_write))
            )
            ranks.run_on_rank0(
                save.what, lambda: finish_save(save, summaries, plans, paths_of(flat), serialize(rest), on_write)
            )
    except BaseException:
        plans.forget()
        raise
    plans.confirm()
    return save.path


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
    plans: PlanCache,
    paths: Mapping[str, Keys],
    rest: bytes,
    on_progress: Callable[[int], None] = lambda count: None,
) -> None:
    """Commit the files of all ranks as a checkpoint. On rank 0."""
    checksums: dict[str, FileChecksum] = {}
    for summary in summaries:
        checksums.update(summary.checksums)
    for name, data in ((OBJECTS_FILE, rest), (METADATA, plans.metadata(summaries, paths, save.save_id))):
        checksums[name] = write_file(save.folder, name, data)
    write_file(save.folder, MANIFEST, Manifest(save.save_id, len(summaries), checksums).to_bytes())
    save.folder.commit(on_progress)


def write_file(folder: SaveFolder, name: str, data: bytes) -> FileChecksum:
    """Write a small file."""
    with ChecksumWriter(folder.create(name)) as file:
        file.write(data)
    return file.checksum


# -- plans


@dataclass(frozen=True)
class RankSummary:
    """The written files of one rank.

    Attributes:
        checksums: of its files by name.
        digest: of its plan.
        plan: the encoded items of its files; None if rank 0 has them.
    """

    checksums: Mapping[str, FileChecksum]
    digest: str
    plan: bytes | None

    def to_text(self) -> str:
        """Return JSON."""
        sums = {name: (of.bytes, of.xxh3_128) for name, of in self.checksums.items()}
        plan = None if self.plan is None else base64.b64encode(self.plan).decode()
        return json.dumps({"sums": sums, "digest": self.digest, "plan": plan})

    @classmethod
    def from_text(cls, text: str) -> RankSummary:
        """Parse a result of :meth:`to_text`.

        Raises:
            CheckpointError: ``text`` is none.
        """
        try:
            read = json.loads(text)
            checksums = {name: FileChecksum(int(size), str(of)) for name, (size, of) in read["sums"].items()}
            plan = None if read["plan"] is None else base64.b64decode(read["plan"], validate=True)
            return cls(checksums, str(read["digest"]), plan)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"A rank's summary of its files cannot be read ({type(error).__name__}: {error})."
            ) from error


class PlanCache:
    """Plans of one rank over the saves of a training.

    In each save every rank sends rank 0 its :meth:`summarize`, and rank 0 calls :meth:`metadata`. Afterwards all ranks
    call :meth:`confirm`, or :meth:`forget` if the save has failed on any rank.
    """

    def __init__(self) -> None:
        self._pending: RankSummary | None = None  # this rank's, in the current save
        self._confirmed: str | None = None
        self._received: list[tuple[str, bytes]] = []  # on rank 0, of all ranks, in the current save
        self._known: list[tuple[str, bytes]] = []  # and of the last one
        self._metadata: tuple[Any, str, bytes] | None = None  # key of the plans, save id, pickle

    def summarize(self, files: RankFiles) -> RankSummary:
        """Return the summary to send to rank 0."""
        plan = encode_plan(files.items)
        digest = digest_of(plan)
        self._pending = RankSummary(files.checksums, digest, None if digest == self._confirmed else plan)
        return self._pending

    def metadata(self, summaries: Sequence[RankSummary], paths: Mapping[str, Keys], save_id: str) -> bytes:
        """Return the content of ``.metadata``. On rank 0."""
        self._received = [(summary.digest, self._plan(rank, summary)) for rank, summary in enumerate(summaries)]
        key = [digest for digest, _ in self._received], digest_of(pickle.dumps(list(paths.items())))
        if self._metadata is not None and self._metadata[0] == key:
            _, before, data = self._metadata
            # A pickle stores the length of a text before it, so only one of the same length can replace it.
            if len(before) == len(save_id) and data.count(before.encode()) == 1:
                return data.replace(before.encode(), save_id.encode())
        plans = [decode_plan(plan) for _, plan in self._received]
        data = pickle.dumps(build_metadata(chain.from_iterable(plans), paths, save_id))
        self._metadata = key, save_id, data
        return data

    def _plan(self, rank: int, summary: RankSummary) -> bytes:
        if summary.plan is not None:
            return summary.plan
        digest, plan = self._known[rank] if rank < len(self._known) else ("", b"")
        if digest != summary.digest:
            raise CheckpointError(f"rank {rank} uses a plan that rank 0 does not have. Save again.")
        return plan

    def confirm(self) -> None:
        """Record that the save has succeeded on all ranks."""
        self._confirmed = None if self._pending is None else self._pending.digest
        self._pending, self._known, self._received = None, self._received, []

    def forget(self) -> None:
        """Record that the save has failed: the next one sends all plans again."""
        self._pending, self._confirmed = None, None
        self._known, self._received, self._metadata = [], [], None


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
    """Return the items of :func:`encode_plan`.

    Raises:
        CheckpointError: ``plan`` is no result of :func:`encode_plan`.
    """
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


# -- a second save of the same state


@dataclass(frozen=True)
class SavedState:
    """The last state that this rank has saved.

    Attributes:
        mark: identifies the state to the caller.
        path: absolute, on rank 0.
        print: see :func:`fingerprint`.
        writes: number of announced writes to shards before.
    """

    mark: Hashable
    path: str
    print: tuple[Any, ...]
    writes: int


def fingerprint(state: Mapping[str, Any], rank: int) -> tuple[Any, ...]:
    """Return a value that is equal for states of which ``rank`` writes the same.

    Shards count by their address: the caller compares the number of announced writes to them.
    """
    found: list[Any] = []
    for item in plan_items(flatten_state(state), rank):
        if isinstance(item, PickledItem):
            found.append((item.keys, digest_of(item.data)))
        elif item.guarded:
            found.append((item.keys, item.box, item.values.dtype, item.values.data_ptr()))
        else:
            found.append((item.keys, item.box, digest_of(serialize(item.values.cpu().clone()))))
    return tuple(found)


def relink_target(path: str | Path, first: str) -> str | None:
    """Return the absolute path of a save that can link the files at ``first``, or None."""
    place = full_path(path)
    return place if place != first and isinstance(save_folder_at(place), LocalFolder) else None


def relink_save(first: str, second: str, rest: bytes, may_copy: bool = False) -> bool:
    """Make a checkpoint at ``second`` by links to the files of the one at ``first``. On one rank.

    Args:
        first: path of a checkpoint of ours.
        second: another path.
        rest: the serialized rest, which is not linked but written.
        may_copy: copy files if links are not possible; one rank then writes the files of all ranks.

    Returns:
        False if links are not possible.

    Raises:
        CheckpointError: the first checkpoint has changed.
        OSError: the second could not be written.
    """
    folder, reader = LocalFolder(Path(second)), CheckpointReader(first)
    if reader.manifest is None or reader.local_path is None:
        return False
    save_id = f"{SAVE_ID_PREFIX}{uuid.uuid4().hex}"
    try:
        folder.begin(save_id)
        sums = {name: of for name, of in reader.manifest.files.items() if name not in (OBJECTS_FILE, METADATA)}
        for name in sums:
            if not folder.link(name, reader.local_path / name, may_copy):
                discard(folder)
                return False
        metadata = replace(reader.metadata, storage_meta=StorageMeta(save_id=save_id))
        for name, data in ((OBJECTS_FILE, rest), (METADATA, pickle.dumps(metadata))):
            sums[name] = write_file(folder, name, data)
        write_file(folder, MANIFEST, Manifest(save_id, reader.manifest.world_size, sums).to_bytes())
        folder.commit()
    except BaseException:
        discard(folder)
        raise
    return True
