"""The versions of torch and Lightning that this package was tested with."""

from __future__ import annotations

import os
import re
import warnings
from importlib.metadata import version

# Minor versions, oldest first, with which all test suites pass.
SUPPORTED = {"torch": ("2.11", "2.13", "2.14", "2.15"), "lightning": ("2.6",)}
# The rank of a process, as launchers give it and in Lightning's order: torchrun, Lightning, SLURM.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


def tested(library: str) -> str:
    """Return the tested versions of a library as text, such as "2.11, 2.13, 2.14 and 2.15"."""
    *most, last = SUPPORTED[library]
    return f"{', '.join(most)} and {last}" if most else last


def install_command() -> str:
    """Return the command that installs the newest tested torch."""
    return f"pip install 'torch=={SUPPORTED['torch'][-1]}.*'"


def is_tested(installed: str, library: str = "torch") -> bool:
    """Return True if a version of a library has a tested minor version."""
    return minor(installed) in map(minor, SUPPORTED[library])


def warn_of_untested() -> None:
    """Warn on rank 0 if torch or Lightning has another version than the tested ones."""
    if next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0") != "0":
        return
    for library in SUPPORTED:
        installed = _installed(library)
        if not is_tested(installed, library):
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
