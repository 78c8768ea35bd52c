"""What a checkpoint may take the place of: another one, an empty folder or a file, and no folder of something else, all
of which would be removed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from lightning_zero.errors import CheckpointError

__all__ = ["check_replaceable_folder", "check_replaceable"]

# One of these stands in every folder that is a checkpoint, or what is left of one: torch's, Lightning's, DeepSpeed's,
# and our own, also of a save that was killed.
OF_CHECKPOINTS = (".metadata", "meta.pt", "*.distcp", ".save_id", "*_model_states.pt")
# What Lightning has DeepSpeed make; anybody may have a folder of one of these names among others.
DEEPSPEEDS = {"latest", "checkpoint", "zero_to_fp32.py"}


def check_replaceable_folder(path: Path) -> None:
    """
    Raises:
        CheckpointError: a folder stands at ``path``, in which there is something, but no checkpoint.
    """
    if path.is_dir() and not path.is_symlink():
        check_replaceable(str(path), os.listdir(path))


def check_replaceable(path: str, names: Iterable[str]) -> None:
    """The same of a folder with these entries, wherever it is."""
    found = sorted(names)
    known = any(fnmatch(name, known) for name in found for known in OF_CHECKPOINTS)
    if found and not known and not DEEPSPEEDS.issuperset(found):
        raise CheckpointError(
            f"{path} is a folder, and no checkpoint: it holds {', '.join(map(repr, found[:3]))}"
            f"{f' and {len(found) - 3} more' if len(found) > 3 else ''}. A checkpoint that is saved there takes its "
            "place. Give the checkpoint a name of its own in that folder, or remove the folder first."
        )
