"""A rank's plan of its files as compressed JSON, to be sent to rank 0.

It is no pickle: whoever can write to the ranks' key-value store could have a pickle run code.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import Any

import torch

from lightning_zero.checkpoint.sharded.boxes import Box
from lightning_zero.checkpoint.sharded.writing import Written
from lightning_zero.errors import CheckpointError

__all__ = ["encode_plan", "decode_plan"]

FAST = 1  # of zlib's levels: names and shapes repeat, so that more would gain little


def encode_plan(placed: Iterable[Written]) -> bytes:
    """Return the same bytes for the same plan."""
    rows = [
        (
            item.keys,
            item.file,
            item.offset,
            item.length,
            None if item.shape is None else tuple(item.shape),
            None if item.dtype is None else str(item.dtype).removeprefix("torch."),
            None if item.box is None else (item.box.offsets, item.box.sizes),
        )
        for item in placed
    ]
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), FAST)


def decode_plan(plan: bytes) -> list[Written]:
    """Return what :func:`encode_plan` was given.

    Raises:
        CheckpointError: it is not what :func:`encode_plan` makes.
    """
    try:
        return [_written(*row) for row in json.loads(zlib.decompress(plan))]
    except (zlib.error, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"A rank's plan of its files cannot be read ({type(error).__name__}: {error})."
        ) from error


def _written(
    keys: list[str], file: str, offset: int, length: int, shape: list[int] | None, dtype: str | None, box: Any
) -> Written:
    kind = None if dtype is None else getattr(torch, dtype)
    if kind is not None and not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype")
    whole = None if shape is None else torch.Size(shape)
    part = None if box is None else Box(tuple(box[0]), tuple(box[1]))
    return Written(tuple(keys), file, offset, length, whole, kind, part)
