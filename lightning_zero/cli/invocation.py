"""Detect a process that was started for the command line.

Python imports a package before any of its modules. So ``lightning_zero/__init__.py`` runs before the arguments are
parsed. It imports torch and Lightning, which take seconds, only on demand in such a process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import PurePath

PACKAGE, PROGRAM = "lightning_zero", "lightning-zero"


def is_command_line(arguments: Sequence[str], original: Sequence[str]) -> bool:
    """Return True if Python runs ``lightning-zero`` or ``python -m lightning_zero``."""
    if not arguments:
        return False
    if PurePath(arguments[0]).name == PROGRAM:
        return not _is_other_program(arguments[0])
    # While runpy imports the package, argv[0] is "-m", and the module's name is the last argument of Python itself.
    is_module = arguments[0] == "-m" and len(original) > len(arguments)
    return is_module and original[-len(arguments)].removeprefix("-m") == PACKAGE


def _is_other_program(path: str) -> bool:
    """Return True for a program of the user's with the same name, such as a folder that Python runs."""
    try:
        with open(path, "rb") as file:
            return f"{PACKAGE}.cli".encode() not in file.read(4096)  # installers write a short script
    except FileNotFoundError:
        return False
    except OSError:
        return True


def program_name() -> str:
    """Return how the user has called the program, for usage lines and examples."""
    started = PurePath(sys.argv[0]) if sys.argv else PurePath()
    is_module = started.name == "__main__.py" and started.parent.name == PACKAGE
    return f"python -m {PACKAGE}" if is_module else PROGRAM
