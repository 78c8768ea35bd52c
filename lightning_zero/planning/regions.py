"""Activation checkpointing as users write it, in graphs on paper: its regions are marked, as Dynamo would mark them,
for the partitioner to have them computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch.fx import traceback
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from lightning_zero.compat.graphs import RECOMPUTE, AC_GRAPH_ID
from lightning_zero.compat.modules import CHECKPOINT_REGIONS
from lightning_zero.compat.patches import swap_attribute

__all__ = ["marked_regions"]


@CHECKPOINT_REGIONS
@contextmanager
def marked_regions() -> Iterator[None]:
    """Inside, ``torch.utils.checkpoint.checkpoint`` runs its function once, and marks what that traces."""
    numbers = count(1)

    @contextmanager
    def region() -> Iterator[None]:
        meta = traceback.current_meta
        before = {key: meta[key] for key in (RECOMPUTE, AC_GRAPH_ID) if key in meta}
        meta.update({RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE, AC_GRAPH_ID: next(numbers)})
        try:
            yield
        finally:
            for key in (RECOMPUTE, AC_GRAPH_ID):
                meta.pop(key, None)
            meta.update(before)

    def without_reentrant(
        function: Any, preserve: bool = True, context: Callable[[], Any] | None = None, *_: Any, **__: Any
    ) -> Iterator[None]:
        forward, _again = context() if context is not None else (None, None)
        with region():
            if forward is None:
                yield
            else:
                with forward:  # a user's own choice of what is saved
                    yield

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            with region():
                return function(*args)

    with (
        swap_attribute(checkpoint, "_checkpoint_without_reentrant_generator", without_reentrant),
        swap_attribute(checkpoint, "CheckpointFunction", Reentrant),
    ):
        yield
