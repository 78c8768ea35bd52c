"""Errors of a torch that is newer than all versions that were tested."""

from __future__ import annotations

import re

import torch

import lightning_zero.compat.autograd
import lightning_zero.compat.compiler
import lightning_zero.compat.dynamo  # noqa: F401  all of them have looked for their names then
from lightning_zero.compat.lookup import missing
from lightning_zero.compat.patches import required_but_absent
from lightning_zero.compat.versions import install_command, is_newer, tested
from lightning_zero.errors import UnsupportedError

__all__ = ["failure_of_newer_torch", "require_compiler"]

_COMPILING = re.compile(r"[/\\](lightning_zero|torch[/\\]_(dynamo|functorch|inductor|subclasses))[/\\]")


def require_compiler() -> None:
    """Check that this torch has all private names without which nothing can be compiled.

    Raises:
        UnsupportedError: it lacks one.
    """
    absent = required_but_absent()
    if absent:
        raise UnsupportedError(missing(absent[0]))


def failure_of_newer_torch(error: Exception) -> UnsupportedError | None:
    """Return the error to raise in place of one that comes from compiling with a torch newer than was tested.

    Returns:
        None: torch was tested, or the error comes from a user's code.
    """
    installed = str(torch.__version__)
    if not is_newer(installed) or isinstance(error, UnsupportedError):
        return None
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = last.tb_frame.f_code.co_filename if last is not None else ""
    if not (type(error).__module__.startswith("torch._") or _COMPILING.search(where)):
        return None
    return UnsupportedError(
        f"Compilation failed with torch {installed}, and lightning_zero was tested with torch {tested('torch')}: "
        f"{type(error).__name__}: {error}\nUse strategy='zero3', which compiles nothing, or install a tested version: "
        f"{install_command()}."
    )
