"""What a folder of a checkpoint must hold: names, sizes and checksums of its files, in ``manifest.json``.

The manifest is written last. A folder that we wrote and that has none, or one that does not fit, is not a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath

import torch

from lightning_zero.checkpoint.damaged import parse_json
from lightning_zero.checkpoint.sharded.hashed import FileChecksum, digest_of
from lightning_zero.errors import CheckpointError
from lightning_zero.version import __version__

__all__ = ["FORMAT", "MANIFEST", "Manifest"]

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """Of one folder.

    Attributes:
        save_id: of the save that wrote all files; ``.metadata`` names it, too.
        world_size: number of ranks that wrote them.
        files: all but the manifest itself, by their names in the folder.
        written_by: this package's name and version.
        torch: version of torch.
        format: of the folder; a reader knows those up to its own.
    """

    save_id: str
    world_size: int
    files: Mapping[str, FileChecksum]
    written_by: str = f"lightning_zero {__version__}"
    torch: str = torch.__version__
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """As JSON, with a checksum over itself."""
        body = asdict(self) | {"files": {name: found.as_dict() for name, found in sorted(self.files.items())}}
        return json.dumps(body | {"xxh3_128": digest_of(_canonical(body))}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """The inverse of :meth:`to_bytes`.

        Args:
            data: the file's contents.
            where: its path, for errors.

        Raises:
            CheckpointError: it is damaged, of a later format, or names files outside of its folder.
        """
        try:
            body = parse_json(data)
            told = body.pop("xxh3_128")
            whole = told == digest_of(_canonical(body))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            whole = False
        if not whole:
            raise CheckpointError(f"{where} is damaged: its own checksum does not fit. Use another checkpoint.")
        told = body.get("format")
        if not isinstance(told, int) or told < 1:
            raise CheckpointError(f"{where} says format {told!r}, which there never was. It was not written by us.")
        if told > FORMAT:
            raise CheckpointError(
                f"{where} says format {told}, written by {body.get('written_by')}; this version "
                f"({__version__}) knows formats up to {FORMAT}. Update lightning_zero."
            )
        try:
            files = {name: FileChecksum(**entry) for name, entry in body.pop("files").items()}
            found = cls(files=files, **body)
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{where} does not say what format {told} does: {error}.") from error
        if not isinstance(found.world_size, int) or not isinstance(found.save_id, str):
            raise CheckpointError(f"{where} does not say by how many ranks, and in which save, it was written.")
        for name, wanted in files.items():
            if not isinstance(wanted.bytes, int) or not isinstance(wanted.xxh3_128, str):
                raise CheckpointError(f"{where} does not say how long {name!r} is, and what its checksum is.")
            if not name or PurePosixPath(name).name != name or name in (".", "..") or "\\" in name:
                raise CheckpointError(
                    f"{where} names {name!r}, which is not a file of its folder. It was not written by us."
                )
        return found


def _canonical(body: Mapping[str, object]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
