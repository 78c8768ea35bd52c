"""Python programs that import parts of this package without Lightning.

Importing Lightning, as the package's ``__init__`` does, takes seconds per process and memory on every rank.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def program_without_lightning(program: str) -> str:
    """Return ``program`` for ``python -c``.

    It can import all modules of this package that do not import Lightning.
    """
    return f"""
import sys, types
package = sys.modules["lightning_zero"] = types.ModuleType("lightning_zero")
package.__path__ = [{str(PACKAGE)!r}]
{program}
"""
