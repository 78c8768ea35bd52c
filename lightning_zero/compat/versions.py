"""The versions of torch and Lightning that this package was tested with."""

from __future__ import annotations

import os
import re
import warnings
from importlib.metadata import version

# Minor versions, oldest first, with which all test suites pass.
SUPPORTED = {"torch": ("2.11", "2.13", "2.14", "2.15"), "lightning": ("2.6",)}


def tested(library: str) -> str:
    """Return the tested versions of a library as text, such as "2.11, 2.13, 2.14 and 2.15"."""
    *most, last = SUPPORTED[library]
    return f"{', '.join(most)} and {last}" if most else last


def install_command() -> str:
    """Return the command that installs the newest tested torch."""
    return f"pip install 'torch=={SUPPORTED['torch'][-1]}.*'"


def is_newer(installed: str, library: str = "torch") -> bool:
    """Return True if a version of a library is newer than all tested ones."""
    return minor(installed) > minor(SUPPORTED[library][-1])


def warn_of_newer() -> None:
    """Warn on rank 0 if torch or Lightning is newer than all tested versions."""
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) != "0":
        return
    for library in SUPPORTED:
        installed = _installed(library)
        if is_newer(installed, library):
            warnings.warn(
                f"lightning_zero was tested with {library} {tested(library)}, and this is {library} {installed}. "
                "Optimizations that do not fit it are disabled, each with a line in the log. If compilation fails, use "
                "strategy='zero3'.",
                stacklevel=4,  # the line that imports lightning_zero
            )


def _installed(library: str) -> str:
    if library == "torch":
        import torch  # a build from source may have no package metadata

        return str(torch.__version__)
    return version(library)


def minor(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version, or (0, 0)."""
    matched = re.match(r"(\d+)\.(\d+)", text)
    return (int(matched[1]), int(matched[2])) if matched else (0, 0)
