"""Ways in which checkpoints are damaged, each with the words that a reader must name."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_zero.checkpoint.integrity import digest_of
from lightning_zero.checkpoint.sharded.folder import FORMAT, MANIFEST, _canonical

__all__ = ["RanCode", "of_file", "of_folder"]

Damage = Callable[[Path], None]


class RanCode:
    """Makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> Any:
        return open, (self.file, "w")


def cut(file: Path, part: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * part)])


def flip(file: Path, part: float = 0.0, at: int | None = None) -> None:
    data = bytearray(file.read_bytes())
    data[min(int(len(data) * part), len(data) - 1) if at is None else at] ^= 16
    file.write_bytes(data)


def double(file: Path) -> None:
    file.write_bytes(file.read_bytes() * 2)


def into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def resign(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a manifest so that its own checksum fits, as another version would have written it."""
    file = folder / MANIFEST
    body = json.loads(file.read_text())
    del body["xxh3_128"]
    change(body)
    file.write_text(json.dumps(body | {"xxh3_128": digest_of(_canonical(body))}))


def of_folder(folder: Path, other: Path) -> Iterator[tuple[str, Damage, str]]:
    """Return name, a function that damages a copy of ``folder``, and the error as a regular expression.

    ``other``: a checkpoint of the same shapes by another save.
    """
    for file in sorted(path.name for path in folder.iterdir()):
        named = re.escape(f"/{file}") + "['\"]? (is|cannot|holds|does|and)" if file != ".metadata" else r"\.metadata"
        for part in (0.0, 0.3, 0.999):
            yield f"{file} cut at {part}", lambda at, file=file, part=part: cut(at / file, part), named
        for part in (0.0, 0.02, 0.5, 1.0):
            yield f"{file} flipped at {part}", lambda at, file=file, part=part: flip(at / file, part), named
        yield f"{file} doubled", lambda at, file=file: double(at / file), named
        yield f"{file} a folder", lambda at, file=file: into_folder(at / file), re.escape(file)
        yield f"{file} missing", lambda at, file=file: (at / file).unlink(), re.escape(file)
        foreign = r"\.metadata" if file == MANIFEST else named
        yield f"{file} of another save", lambda at, file=file: shutil.copy(other / file, at / file), foreign
    yield "no files", lambda at: [file.unlink() for file in at.iterdir()], r"holds no sharded checkpoint.*\.metadata"
    yield (
        "a later format",
        lambda at: resign(at, lambda body: body.update(format=FORMAT + 1)),
        rf"manifest\.json says format {FORMAT + 1}.*Update",
    )
    for told in (0, -1, "1", None):
        older = partial(resign, change=lambda body, told=told: body.update(format=told))
        yield f"format {told!r}", older, rf"manifest\.json says format {told!r}, which there never was"
    less = partial(resign, change=lambda body: body.pop("save_id"))
    yield "a manifest that says less", less, r"manifest\.json does not say"
    named_less = partial(resign, change=lambda body: body["files"].pop(".metadata"))
    yield "a manifest without .metadata", named_less, r"\.metadata is not of this checkpoint"


def of_file(file: Path, ran: Path) -> Iterator[tuple[str, Damage, str]]:
    """Return the same for a full checkpoint. ``ran``: made by code in the file."""
    size = file.stat().st_size
    for length in (0, 1, 2, 3, 4, 30, 100, size // 2, size - 200, size - 23, size - 22, size - 1):
        yield f"cut to {length} of {size}", partial(cut, part=length / size), "x.ckpt"
    with zipfile.ZipFile(file) as archive:
        tensors = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    for entry in (tensors[0], tensors[-1]):
        header = file.read_bytes()[entry.header_offset :][:30]
        begin = entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        yield f"a bit of {entry.filename}", partial(flip, at=begin + entry.file_size // 2), "x.ckpt"
    for at in (0, 2, 26, size - 22):
        yield f"a bit at {at} of {size}", partial(flip, at=at), "x.ckpt"
    yield "doubled", double, "x.ckpt"
    yield "a folder", into_folder, "x.ckpt"
    yield "no checkpoint", lambda at: at.write_bytes(b"what else there is" * 99), "x.ckpt"
    yield "a zip of something else", lambda at: zipfile.ZipFile(at, "w").writestr("a", "b"), "x.ckpt"
    yield "code", lambda at: torch.save({"state_dict": RanCode(ran)}, at), r"x\.ckpt.*builtins? ?open|x\.ckpt.*open"
    yield "code, older format", lambda at: at.write_bytes(pickle.dumps(RanCode(ran))), "x.ckpt"
