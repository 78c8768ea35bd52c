"""The speed of a disk itself, past the page cache: what checkpoints can reach at most. Prints one JSON line.

    python examples/benchmarks/disk.py --home /data --gib 4

Some threads each write a file and read it back, with O_DIRECT where the file system knows it; elsewhere the file is
flushed, and its pages are dropped before it is read.
"""

import argparse
import json
import mmap
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK = 16 << 20


def forget(home: Path) -> None:
    """Drops what the page cache holds of the files at ``home``, which must be on the disk."""
    for path in [home] if home.is_file() else home.rglob("*"):
        if path.is_file():
            number = os.open(path, os.O_RDONLY)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(number)


def direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:  # no such thing there
        return os.open(path, flags, 0o600)


def write(path: Path, count: int) -> None:
    block = mmap.mmap(-1, BLOCK)  # at a page's border, as O_DIRECT wants it
    block.write(os.urandom(1 << 20) * (BLOCK >> 20))
    number = direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for _ in range(count):
        os.write(number, block)
    os.fsync(number)
    os.close(number)


def read(path: Path, count: int) -> None:
    block = mmap.mmap(-1, BLOCK)
    number = direct(path, os.O_RDONLY)
    for _ in range(count):
        os.readv(number, [block])
    os.close(number)


def timed(work: Callable[[Path, int], None], paths: list[Path], count: int) -> float:
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(paths)) as threads:
        list(threads.map(lambda path: work(path, count), paths))
    return len(paths) * count * BLOCK / 2**30 / (time.perf_counter() - begin)


def speed(home: Path, gib: float, streams: int = 4) -> tuple[float, float]:
    """GiB/s of writing and of reading, by so many threads."""
    folder = home / "disk"
    folder.mkdir(parents=True)
    try:
        paths = [folder / str(number) for number in range(streams)]
        count = max(1, int(gib * 2**30 / BLOCK / streams))
        written = timed(write, paths, count)
        forget(folder)
        return written, timed(read, paths, count)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, default=Path("."))
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--streams", type=int, default=4)
    arguments = parser.parse_args()
    written, found = speed(arguments.home, arguments.gib, arguments.streams)
    print(json.dumps({"write_gib_s": round(written, 2), "read_gib_s": round(found, 2)}), flush=True)


if __name__ == "__main__":
    main()
