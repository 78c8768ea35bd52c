"""Detect damaged checkpoint files, and name the file in each error.

Files of sharded checkpoints have XXH3 checksums in the manifest, which detect damage but not forgery. Files of
``torch.save`` are zip archives with a CRC for each entry. Reading never trusts sizes that a file claims.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash
from torch import Tensor

from lightning_zero.errors import CheckpointError
from lightning_zero.sharding.layout import is_strided

READ_BYTES = 4 << 20  # of one read

# Raised by code that meets a value of another type or size than expected. RuntimeError: torch's own errors, and
# Python's RecursionError. OSError: also a folder in the place of a file.
DAMAGE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def wrap_read_errors(path: object) -> Iterator[None]:
    """Turn errors of reading ``path`` into :class:`CheckpointError` with its name."""
    try:
        yield
    except (CheckpointError, FileNotFoundError):
        raise
    except DAMAGE_ERRORS as error:
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{path} cannot be read: {why[:500]}. It is damaged, or not what it seems. Use another checkpoint."
        ) from error


def parse_json(text: str | bytes) -> Any:
    """Parse JSON of an untrusted file.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or an object has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key[:80]!r} is there twice")
    return found


@dataclass(frozen=True)
class FileChecksum:
    """Size and checksum of a file."""

    bytes: int
    xxh3_128: str

    as_dict = asdict


def checksum_of(file: BinaryIO, on_read: Callable[[int], None] = lambda count: None) -> FileChecksum:
    """Read a file to its end and return its checksum; call ``on_read`` with the bytes of each block."""
    found, size, block = xxhash.xxh3_128(), 0, memoryview(bytearray(READ_BYTES))
    while count := file.readinto(block):  # type: ignore[attr-defined]
        found.update(block[:count])
        size += count
        on_read(count)
    return FileChecksum(size, found.hexdigest())


def digest_of(data: bytes) -> str:
    """Return the checksum of ``data`` in hexadecimal digits."""
    return xxhash.xxh3_128(data).hexdigest()


# -- files of torch.save


def verify_archive(
    path: Path,
    part: int = 0,
    parts: int = 1,
    on_read: Callable[[int], None] = lambda count: None,
    name: str | None = None,
) -> None:
    """Compare one of ``parts`` about equal parts of a file with its CRCs.

    Errors have its path, or ``name``. A file without CRCs passes: one in torch's older format, or saved after
    ``torch.serialization.set_crc32_options(False)``.
    """
    name = name or str(path)
    with wrap_read_errors(name), open(path, "rb") as file:
        verify_open_archive(file, name, part, parts, on_read)


def verify_open_archive(file: Any, name: str, part: int, parts: int, on_read: Callable[[int], None]) -> None:
    """Verify a file that is open for reading, see :func:`verify_archive`."""
    if not file.seek(0, 2):
        raise CheckpointError(f"{name} is empty. Use another checkpoint.")
    if not _is_archive(file):
        return
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if not entries or min(entry.header_offset for entry in entries):
                raise zipfile.BadZipFile("something stands before its first part, or there is none")
            names = Counter(entry.filename for entry in entries)
            if len(names) < len(entries):
                raise zipfile.BadZipFile(f"it has {names.most_common(1)[0][0][:80]!r} twice")
            if any(entry.compress_type for entry in entries):  # torch maps entries, so it never compresses them
                raise zipfile.BadZipFile("it is compressed, which torch's files never are")
            has_crc = any(entry.CRC for entry in entries)
            for entry in _share_of_entries(entries, part, parts) if has_crc else ():
                with archive.open(entry) as contents:
                    while data := contents.read(READ_BYTES):
                        on_read(len(data))
    except CheckpointError:  # is a RuntimeError, too
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, LookupError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{name} is damaged: {error}. It was cut off or changed after it was saved. Use another checkpoint."
        ) from error


def _is_archive(file: Any) -> bool:
    # The directory is at the end, which a truncated file has lost; the beginning may be damaged instead.
    file.seek(0)
    begins = file.read(4) == b"PK\x03\x04"
    return begins or zipfile.is_zipfile(file)


def _share_of_entries(entries: Sequence[zipfile.ZipInfo], part: int, parts: int) -> list[zipfile.ZipInfo]:
    """Return the entries whose middle is in the given one of equal ranges of the file, in file order."""
    total = 1 + max(entry.header_offset + entry.compress_size for entry in entries)
    mine = [entry for entry in entries if (entry.header_offset + entry.compress_size // 2) * parts // total == part]
    return sorted(mine, key=lambda entry: entry.header_offset)


def verify_storages(value: Any, file: Any, name: str) -> None:
    """Raise if the storages of loaded tensors do not match the entries of the archive.

    torch takes the size of a storage from the pickle and not from the archive. A size that is too large exposes other
    bytes: of the next entry in a mapped file, of foreign memory otherwise.

    Args:
        file: the archive, open for reading, or its path; files in torch's older format pass.
    """
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        stored = Counter(entry.file_size for entry in archive.infolist() if "/data/" in entry.filename)
    used = host_storages(tensors_in(value))
    for count, number in Counter(size for size in used.values() if size).items():
        if stored[count] < number:
            raise CheckpointError(
                f"{name} is damaged: {number} of its tensors need {count:,} bytes each, and {stored[count]} of its "
                "parts have this length. Use another checkpoint."
            )


def host_storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the tensors' storages on the host, by address."""
    plain = [tensor for tensor in tensors if type(tensor).untyped_storage is Tensor.untyped_storage]
    storages = [tensor.untyped_storage() for tensor in plain if tensor.device.type == "cpu" and is_strided(tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def tensors_in(value: Any, attributes: bool = True) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, and in ``attributes`` of this package's objects."""
    pending, seen = [value], set()  # no recursion: untrusted values may be deep, or contain themselves
    while pending:
        one = pending.pop()
        if isinstance(one, Tensor):
            yield one
        elif id(one) not in seen and isinstance(one, Mapping | list | tuple | set | frozenset):
            seen.add(id(one))
            pending.extend(one.values() if isinstance(one, Mapping) else one)
        elif attributes and id(one) not in seen and type(one).__module__.startswith("lightning_zero."):
            seen.add(id(one))
            pending.extend(getattr(one, "__dict__", {}).values())
