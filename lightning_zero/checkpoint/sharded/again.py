"""A state that was saved a moment ago is saved to a second place, as ``ModelCheckpoint(save_last=True)`` does each
time: one rank links the files that hold tensors, and writes anew only what is small."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta

from lightning_zero.checkpoint.sharded.contents import flattened, plan_items
from lightning_zero.checkpoint.sharded.folder import LocalFolder, save_folder_at, full_path
from lightning_zero.checkpoint.sharded.hashed import digest_of
from lightning_zero.checkpoint.sharded.manifest import MANIFEST, Manifest
from lightning_zero.checkpoint.sharded.metadata import METADATA
from lightning_zero.checkpoint.sharded.opened import CheckpointReader
from lightning_zero.checkpoint.sharded.saving import REST, SAVE_ID_PREFIX, discard, write_file
from lightning_zero.checkpoint.sharded.writing import Blob, packed

__all__ = ["SavedState", "fingerprint", "relink_target", "relink_save"]


@dataclass(frozen=True)
class SavedState:
    """What this rank has saved last.

    Attributes:
        mark: by which the caller knows the same state again.
        path: where, as rank 0 understands it.
        print: see :func:`fingerprint`.
        writes: how often shards had changed, or might have.
    """

    mark: Hashable
    path: str
    print: tuple[Any, ...]
    writes: int


def fingerprint(state: Mapping[str, Any], rank: int) -> tuple[Any, ...]:
    """Equal for states of which ``rank`` would write the same, as far as nobody has changed shards, which are only
    known by their place in memory."""
    found: list[Any] = []
    for item in plan_items(flattened(state), rank):
        if isinstance(item, Blob):
            found.append((item.keys, digest_of(item.data)))
        elif item.guarded:
            found.append((item.keys, item.box, item.values.dtype, item.values.data_ptr()))
        else:
            found.append((item.keys, item.box, digest_of(packed(item.values.cpu().clone()))))
    return tuple(found)


def relink_target(path: str | Path, first: str) -> str | None:
    """Where a save to ``path`` may link what was saved at ``first``; None: nowhere."""
    place = full_path(path)
    return place if place != first and isinstance(save_folder_at(place), LocalFolder) else None


def relink_save(first: str, second: str, rest: bytes, may_copy: bool = False) -> bool:
    """Makes a checkpoint at ``second`` of the one at ``first``. On one rank.

    Args:
        first: of a folder that we have written.
        second: another place.
        rest: what is saved as one object, packed.
        may_copy: where no links can be made; one rank then writes what all have written.

    Returns:
        False where there can be no links.

    Raises:
        CheckpointError: the first one is not what it was.
        OSError: it could not be written.
    """
    folder, known = LocalFolder(Path(second)), CheckpointReader(first)
    if known.manifest is None or known.place is None:
        return False
    save_id = f"{SAVE_ID_PREFIX}{uuid.uuid4().hex}"
    try:
        folder.begin(save_id)
        sums = {name: found for name, found in known.manifest.files.items() if name not in (REST, METADATA)}
        for name in sums:
            if not folder.link(name, known.place / name, may_copy):
                discard(folder)
                return False
        metadata = replace(known.metadata, storage_meta=StorageMeta(save_id=save_id))
        for name, data in ((REST, rest), (METADATA, pickle.dumps(metadata))):
            sums[name] = write_file(folder, name, data)
        write_file(folder, MANIFEST, Manifest(save_id, known.manifest.world_size, sums).to_bytes())
        folder.commit()
    except BaseException:
        discard(folder)
        raise
    return True
