"""A file where only fsspec reaches, by ranges of its bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from lightning_zero.checkpoint.remote_files import located
from lightning_zero.checkpoint.window import Window
from lightning_zero.errors import CheckpointError

__all__ = ["AT_ONCE", "RemoteRanges", "exists"]

BLOCK, AT_ONCE = 8 << 20, 32 << 20  # bytes of a request, and of all that go out together
BUFFER = 1 << 18  # bytes: for who reads a few of them here and there
# By which a file is known again; not when it was last read.
KNOWN_BY = {"size", "etag", "generation", "version_id", "blob_id", "md5hash", "crc32c"}
KNOWN_BY |= {"lastmodified", "last_modified", "modified", "last_write_time", "mtime", "created", "updated"}


class RemoteRanges:
    """Of a file, by its URL.

    Args:
        url: its name, for errors, too.
        at: where that is, as :func:`located` gives it; None: where the name says.

    Attributes:
        size: in bytes.
        identity: another one for each file that stands there, as far as its store tells.
    """

    def __init__(self, url: str, at: tuple[Any, str] | None = None) -> None:
        self._url = url
        self._fs, self._place = located(url) if at is None else at
        self._several = True
        self.identity = self._look()
        self.size = int(self.identity["size"])

    def read(self, begin: int, into: memoryview) -> None:
        blocks = [(begin + at, begin + min(at + BLOCK, len(into))) for at in range(0, len(into), BLOCK)]
        done = 0
        together = AT_ONCE // BLOCK
        for first in range(0, len(blocks), together):
            for data in self.several(blocks[first : first + together]):
                into[done : done + len(data)] = data
                done += len(data)

    def several(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes from the first to before the second of each, at once where the store can.

        Raises:
            CheckpointError: it is another file by now, or ends too early.
        """
        begins, ends = zip(*spans, strict=True)
        try:
            found = self._ranges(begins, ends)
            now = self._look()
        except Exception as error:  # stores raise their own
            raise CheckpointError(f"{self._url} cannot be read: {type(error).__name__}: {error}") from error
        if now != self.identity:
            raise CheckpointError(f"{self._url} was replaced by another one while it was being loaded. Load it again.")
        for data, begin, end in zip(found, begins, ends, strict=True):
            if len(data) != end - begin:
                raise CheckpointError(f"{self._url} gave {len(data):,} bytes where {end - begin:,} were asked for.")
        return found

    def _ranges(self, begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        if self._several:
            try:
                places = [self._place] * len(begins)
                return list(self._fs.cat_ranges(places, list(begins), list(ends), on_error="raise"))
            except (AttributeError, NotImplementedError):
                # Directories of a file system without asynchronous functions, in fsspec before 2026.9.
                self._several = False
        pairs = zip(begins, ends, strict=True)
        return [self._fs.cat_file(self._place, start=begin, end=end) for begin, end in pairs]

    def _look(self) -> dict[str, str]:
        self._fs.invalidate_cache()  # all of it: some stores forget a name, and not the list in which it stands
        return {key: str(value) for key, value in self._fs.info(self._place).items() if key.lower() in KNOWN_BY}

    def opened(self, begin: int = 0, length: int | None = None) -> io.BufferedReader:
        """So many bytes from ``begin`` on, or all, as a file for those who know files only."""
        return io.BufferedReader(_File(self, begin, self.size if length is None else length), BUFFER)


def exists(url: str) -> bool:
    """Whether something is there now, whatever this host remembers."""
    fs, place = located(url)
    fs.invalidate_cache()
    return bool(fs.exists(place))


class _File(Window):
    def __init__(self, ranges: RemoteRanges, begin: int, length: int) -> None:
        super().__init__(length)
        self._ranges, self._begin = ranges, begin

    def fill(self, at: int, view: memoryview) -> int:
        self._ranges.read(self._begin + at, view)
        return len(view)
