"""Writes a sharded checkpoint: all ranks their own files at once, and rank 0 what makes a checkpoint of them."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from lightning_zero.checkpoint.sharded.contents import flattened, items_of
from lightning_zero.checkpoint.sharded.folder import Folder, folder_at
from lightning_zero.checkpoint.sharded.hashed import FileSum, HashedFile
from lightning_zero.checkpoint.sharded.manifest import MANIFEST, Manifest
from lightning_zero.checkpoint.sharded.metadata import METADATA, metadata_of
from lightning_zero.checkpoint.sharded.writing import RankFiles, write_pieces
from lightning_zero.checkpoint.together import Together
from lightning_zero.errors import CheckpointError

__all__ = ["REST", "SAVED_BY", "save_sharded"]

REST = "meta.pt"  # as Lightning's own sharded strategies name it
SAVED_BY = "lightning_zero-"  # save ids begin so: whoever reads one knows that there must be a manifest


def save_sharded(
    path: str | Path,
    state: Mapping[str, Any],
    rest: Any,
    together: Together,
    wrote: Callable[[int], None] = lambda count: None,
) -> None:
    """Writes a folder that torch's distributed checkpoints, Lightning's own strategies and this package can read.
    Collective.

    Args:
        path: of the folder, or its URL; rank 0's counts.
        state: nested dicts of tensors, of :class:`~lightning_zero.checkpoint.sharded.values.ShardedValue` and of
            other things, with the same keys on every rank. Rank 0 writes what is not sharded.
        rest: is saved as one object, by rank 0.
        together: the ranks.
        wrote: is told, from several threads, how many bytes of tensors more this rank has written.

    Raises:
        CheckpointError: on every rank, when one could not do its part; what stood at ``path`` is still there.
    """
    save_id = f"{SAVED_BY}{uuid.uuid4().hex}"
    path, save_id = together.first(f"save a checkpoint to {path}", lambda: (str(path), save_id))
    what = f"save a checkpoint to {path}"
    folder = folder_at(path)
    together.first(what, lambda: folder.begin(save_id))
    try:
        together.each(what, lambda: _look(folder, save_id, path))
        flat = flattened(state)
        items = list(items_of(flat, together.rank))
        ranks = together.each(what, lambda: write_pieces(items, together.rank, folder.create, wrote))
        paths = {key: place for key, (place, _) in flat.items()}
        together.first(what, lambda: _finish(folder, ranks, paths, rest, save_id))
    except BaseException:
        if together.rank == 0:
            folder.discard()
        raise


def _look(folder: Folder, save_id: str, path: str) -> None:
    if not folder.sees(save_id):
        raise CheckpointError(
            f"this rank does not see the folder that rank 0 has made at {path}. Sharded checkpoints need a place that "
            "all hosts share; give one, or save with state_dict_type='full'."
        )


def _finish(folder: Folder, ranks: list[RankFiles], paths: Mapping[str, Any], rest: Any, save_id: str) -> None:
    sums: dict[str, FileSum] = {}
    for files in ranks:
        sums.update(files.sums)
    metadata = metadata_of(chain.from_iterable(files.placed for files in ranks), paths, save_id)
    with HashedFile(folder.create(REST)) as file:
        torch.save(rest, file)  # type: ignore[arg-type]
    sums[REST] = file.sum
    with HashedFile(folder.create(METADATA)) as file:
        file.write(pickle.dumps(metadata))
    sums[METADATA] = file.sum
    manifest = Manifest(save_id, len(ranks), sums)
    with HashedFile(folder.create(MANIFEST)) as file:
        file.write(manifest.to_bytes())
    folder.commit()
