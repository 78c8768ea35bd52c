"""Programs that need a part of this package, and not Lightning: importing that, as the package's ``__init__`` does,
takes seconds of each process, and memory on every rank."""

from __future__ import annotations

from pathlib import Path

__all__ = ["program_without_lightning"]

PACKAGE = Path(__file__).resolve().parent


def program_without_lightning(program: str) -> str:
    """For ``python -c``: ``program``, which finds all modules of this package that do not import Lightning."""
    return f"""
import sys, types
package = sys.modules["lightning_zero"] = types.ModuleType("lightning_zero")
package.__path__ = [{str(PACKAGE)!r}]
{program}
"""
