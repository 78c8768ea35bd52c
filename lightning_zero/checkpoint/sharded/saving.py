"""Writes a sharded checkpoint: all ranks their own files at once, and rank 0 what makes a checkpoint of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint.lateness import shows
from lightning_zero.checkpoint.sharded.contents import flattened, plan_items
from lightning_zero.checkpoint.sharded.folder import Folder, save_folder_at, full_path
from lightning_zero.checkpoint.sharded.hashed import FileChecksum, ChecksumWriter
from lightning_zero.checkpoint.sharded.manifest import MANIFEST, Manifest
from lightning_zero.checkpoint.sharded.metadata import METADATA
from lightning_zero.checkpoint.sharded.paths import Keys
from lightning_zero.checkpoint.sharded.plans import Brief, Plans
from lightning_zero.checkpoint.sharded.writing import packed, write_items
from lightning_zero.checkpoint.together import Together
from lightning_zero.errors import CheckpointError

__all__ = [
    "REST",
    "SAVE_ID_PREFIX",
    "Save",
    "begin_save",
    "discard",
    "discarding",
    "finish_save",
    "paths_of",
    "save_sharded",
    "write_file",
]

REST = "meta.pt"  # as Lightning's own sharded strategies name it
SAVE_ID_PREFIX = "lightning_zero-"  # save ids begin so: whoever reads one knows that there must be a manifest


@dataclass(frozen=True)
class Save:
    """A save that has begun: every rank sees the folder.

    Attributes:
        path: the same on every rank.
        save_id: its own.
        folder: where it is written.
        what: ranks do, for errors.
    """

    path: str
    save_id: str
    folder: Folder
    what: str


def begin_save(path: str | Path, together: Together, prepare: Callable[[], object]) -> Save:
    """Makes the folder, beside ``path``. Collective: ranks meet twice, for which training waits.

    Args:
        path: rank 0's counts.
        together: the ranks.
        prepare: this rank's part that must not fail, or all do; once it sees the folder.

    Raises:
        CheckpointError: on every rank.
    """
    save_id = f"{SAVE_ID_PREFIX}{uuid.uuid4().hex}"
    folders: list[Folder] = []

    def begin() -> tuple[str, str]:
        # as rank 0 understands it: another rank may be in another folder, which a relative one is relative to
        place = full_path(path)
        folders.append(save_folder_at(place))
        folders[0].begin(save_id)
        return place, save_id

    def follow() -> None:
        if together.rank:
            folders.append(save_folder_at(place))
        if not shows(lambda: folders[0].sees(save_id)):
            raise CheckpointError(
                f"this rank does not see the folder that rank 0 has made at {place}. Sharded checkpoints need a place "
                "that all hosts share; give one, or save with state_dict_type='full'."
            )
        prepare()

    with discarding(folders, together):
        place, save_id = together.first(f"save a checkpoint to {path}", begin)
        what = f"save a checkpoint to {place}"
        together.each(what, follow)
    [folder] = folders
    return Save(place, save_id, folder, what)


def save_sharded(
    path: str | Path,
    state: Mapping[str, Any],
    rest: Any,
    together: Together,
    wrote: Callable[[int], None] = lambda count: None,
    plans: Plans | None = None,
) -> str:
    """Writes a folder that torch's distributed checkpoints, Lightning's own strategies and this package can read.
    Collective.

    Args:
        path: of the folder, or its URL; rank 0's counts.
        state: nested dicts of tensors, of :class:`~lightning_zero.checkpoint.sharded.values.CheckpointShard` and of
            other things, with the same keys on every rank. Rank 0 writes what is not sharded.
        rest: is saved as one object, by rank 0.
        together: the ranks.
        wrote: is told, from several threads, how many bytes more this rank has written.
        plans: of the saves before.

    Returns:
        Where it is, as rank 0 understands ``path``.

    Raises:
        CheckpointError: on every rank, when one could not do its part; what stood at ``path`` is still there.
    """
    plans = Plans() if plans is None else plans
    planned: list[tuple[dict[str, Any], list[Any]]] = []
    save = begin_save(path, together, lambda: planned.append(_planned(state, together.rank)))
    [(flat, items)] = planned
    try:
        with discarding([save.folder], together):
            briefs = together.each(
                save.what, lambda: plans.brief(write_items(items, together.rank, save.folder.create, wrote))
            )
            together.first(save.what, lambda: finish_save(save, briefs, plans, paths_of(flat), packed(rest)))
    except BaseException:
        plans.forget()
        raise
    plans.confirm()
    return save.path


@contextmanager
def discarding(folders: Sequence[Folder], together: Together) -> Iterator[None]:
    """Whatever fails meanwhile leaves nothing of what has been written."""
    try:
        yield
    except BaseException:
        for folder in folders if together.rank == 0 else ():
            discard(folder)
        raise


def discard(folder: Folder) -> None:
    """Removes what a save has written that has failed, as far as that can be done: why it has failed is what others
    wait to hear."""
    with suppress(Exception):
        folder.discard()


def _planned(state: Mapping[str, Any], rank: int) -> tuple[dict[str, Any], list[Any]]:
    flat = flattened(state)
    return flat, list(plan_items(flat, rank))


def paths_of(flat: Mapping[str, tuple[Keys, Any]]) -> dict[str, Keys]:
    """Where each entry of a flattened state stood."""
    return {key: keys for key, (keys, _) in flat.items()}


def finish_save(save: Save, briefs: Sequence[Brief], plans: Plans, paths: Mapping[str, Keys], rest: bytes) -> None:
    """Makes a checkpoint of what all ranks have written. On rank 0.

    Args:
        save: that was begun.
        briefs: what each rank says of its files.
        plans: rank 0's.
        paths: see :func:`paths_of`.
        rest: what is saved as one object, packed.
    """
    sums: dict[str, FileChecksum] = {}
    for brief in briefs:
        sums.update(brief.sums)
    for name, data in ((REST, rest), (METADATA, plans.metadata(briefs, paths, save.save_id))):
        sums[name] = write_file(save.folder, name, data)
    write_file(save.folder, MANIFEST, Manifest(save.save_id, len(briefs), sums).to_bytes())
    save.folder.commit()


def write_file(folder: Folder, name: str, data: bytes) -> FileChecksum:
    """Of one piece."""
    with ChecksumWriter(folder.create(name)) as file:
        file.write(data)
    return file.sum
