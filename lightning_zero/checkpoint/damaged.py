"""Name the file of whatever error its contents cause."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_zero.errors import CheckpointError

__all__ = ["wrap_read_errors", "parse_json"]

# Raised by code that meets a value of another type or size than it was written for. RuntimeError: torch's own errors,
# and Python's of recursion. OSError: also a folder in the place of a file.
BY_DAMAGE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def wrap_read_errors(where: object) -> Iterator[None]:
    """Turn errors of reading the file or folder ``where`` into :class:`CheckpointError` with its name."""
    try:
        yield
    except (CheckpointError, FileNotFoundError):
        raise
    except BY_DAMAGE as error:
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{where} cannot be read: {why[:500]}. It is damaged, or not what it seems. Use another checkpoint."
        ) from error


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text holds.

    Raises:
        ValueError: it is none, is nested too deeply, or an object has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key[:80]!r} is there twice")
    return found
