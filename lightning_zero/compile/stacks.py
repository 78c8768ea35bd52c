"""How Dynamo writes down where a user's code made each node of a graph: all frames above it, anew for each node."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from traceback import FrameSummary
from typing import Any

from lightning_zero.compat.compiler import FRAMES_ONCE, output_graph
from lightning_zero.compat.patches import swap_attribute
from lightning_zero.compat.skipped_text import paths_shortened_once

__all__ = ["frames_written_once"]


@FRAMES_ONCE
@contextmanager
def frames_written_once() -> Iterator[None]:
    """Inside, Dynamo puts together what it has written of each frame before, and saves a tenth of its work: some twenty
    frames are above a node in a layer, and nearly all of them above the next one, too."""
    with swap_attribute(output_graph, "traceback", _Traceback()), paths_shortened_once():
        yield


class _Traceback:
    """The module of that name, but for what it makes of frames."""

    def __init__(self) -> None:
        written: dict[Any, str] = {}

        class StackSummary:
            @staticmethod
            def from_list(frames: Sequence[FrameSummary]) -> _Stack:
                return _Stack(frames, written)

        self.StackSummary = StackSummary

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)


class _Stack:
    def __init__(self, frames: Sequence[FrameSummary], written: dict[Any, str]) -> None:
        self._frames, self._written = frames, written

    def format(self) -> list[str]:
        keys = [_key(frame) for frame in self._frames]
        if any(one == following for one, following in pairwise(keys)):  # which Python counts instead of repeating them
            return _format(self._frames)
        for key, frame in zip(keys, self._frames, strict=True):
            if key not in self._written:
                self._written[key] = "".join(_format([frame]))
        return [self._written[key] for key in keys]


def _format(frames: Sequence[FrameSummary]) -> list[str]:
    return traceback.StackSummary.from_list([*frames]).format()


def _key(frame: FrameSummary) -> tuple[Any, ...]:
    return (frame.filename, frame.name, frame.lineno, frame.end_lineno, frame.colno, frame.end_colno)
