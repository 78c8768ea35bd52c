"""The executor that a wheel carries, and the conditions under which it loads.

``python -m lightning_zero build --wheel`` puts two files into the package's folder ``native/prebuilt_executor``: the
library, and ``key.json``, which describes the torch and the system that it was built for. The library uses torch's C++
interfaces and none of Python's, so one wheel serves all Python versions.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "prebuilt_executor"
LIBRARY, KEY = "lightning_zero.so", "key.json"


@dataclass(frozen=True)
class ExecutorKey:
    """Identity of a built executor.

    Attributes:
        torch: torch's version, with its local part, such as ``"2.13.0+cu130"``.
        cxx11_abi: torch uses the C++11 ABI of libstdc++.
        sources: hash of the C++ sources and of the compiler's flags.
        machine: the processor's architecture.
        libc: name and version of the C library; a newer version of the same library loads it, too.
    """

    torch: str
    cxx11_abi: bool
    sources: str
    machine: str
    libc: tuple[str, str]

    @classmethod
    def here(cls, torch: str, cxx11_abi: bool, sources: str) -> ExecutorKey:
        """Return the key of this machine."""
        return cls(torch, cxx11_abi, sources, platform.machine(), platform.libc_ver())

    def write(self, folder: Path) -> None:
        """Write the key of the library in ``folder``, with the library's size."""
        size = {"bytes": (folder / LIBRARY).stat().st_size}
        (folder / KEY).write_text(json.dumps(asdict(self) | size, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> ExecutorKey | None:
        """Return the key in ``folder``; None if it cannot be read, or is not that of the library.

        A library that is cut off must not load: reading beyond its end kills the process.
        """
        try:
            values = json.loads((folder / KEY).read_text())
            size = values.pop("bytes")
            found = cls(**values)
            name, version = map(str, found.libc)
            if size != (folder / LIBRARY).stat().st_size:
                return None
        except (AttributeError, KeyError, OSError, ValueError, TypeError):
            return None
        return cls(found.torch, found.cxx11_abi, found.sources, found.machine, (name, version))

    def mismatch(self, here: ExecutorKey) -> str:
        """Return why an executor with this key does not load ``here``; an empty text if it does."""
        name, version = self.libc
        for text, built, found in (
            ("torch", self.torch, here.torch),
            ("the C++11 ABI", self.cxx11_abi, here.cxx11_abi),
            ("the processor", self.machine, here.machine),
            ("the C library", name, here.libc[0]),
            ("the C++ sources", self.sources, here.sources),
        ):
            if built != found:
                return f"it was built for {text} {built}, and this is {found}"
        if _numbers(version) > _numbers(here.libc[1]):
            return f"it needs {name} {version} or newer, and this is {here.libc[1]}"
        return ""


@dataclass(frozen=True)
class Prebuilt:
    """A wheel's executor.

    Attributes:
        library: its path.
        mismatch: why it does not load here; an empty text if it does.
    """

    library: Path
    mismatch: str


def find_prebuilt(here: Callable[[], ExecutorKey], folder: Path | None = None) -> Prebuilt | None:
    """Return the executor in ``folder``; None if this installation has none.

    Args:
        here: Returns the key of this machine. It is called only if there is an executor, because it reads all sources.
        folder: By default that of this package.
    """
    folder = folder or FOLDER
    library, key = folder / LIBRARY, ExecutorKey.read(folder)
    if not library.is_file():
        return None
    return Prebuilt(library, f"{folder} is incomplete or damaged" if key is None else key.mismatch(here()))


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]
