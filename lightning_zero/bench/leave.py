"""The end of a process that has printed what it measured."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

__all__ = ["leave"]


def leave() -> NoReturn:
    """Ends this process without taking anything apart: data workers, compilers, captured graphs and process groups take
    seconds to go, which a table with many rows pays for each of them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
