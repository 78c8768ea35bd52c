"""Torch's limits on how often code is compiled anew, after which it runs eagerly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from lightning_zero.compat.lookup import module

convert_frame = module("torch._dynamo.convert_frame")

__all__ = ["LimitHit", "watch_recompile_limits"]

# The message that Dynamo logs then holds "hit config.". (torch 2.11+)


class LimitHit(NamedTuple):
    """Report of Dynamo about code that it stops compiling.

    Attributes:
        limit: name of the setting in ``torch._dynamo.config``.
        value: of the setting.
        code: name, file and line of the function.
        guard: the guard that failed last.
    """

    limit: str
    value: int
    code: str
    guard: str


@contextmanager
def watch_recompile_limits(notice: Callable[[LimitHit], None]) -> Iterator[None]:
    """Inside, ``notice`` is called when Dynamo gives code up, in place of Dynamo's own warning."""

    def filtered(record: logging.LogRecord) -> bool:
        if "hit config." not in str(record.msg) or not isinstance(record.args, tuple) or len(record.args) < 4:
            return True
        limit, value, code, guard, *_ = record.args
        notice(LimitHit(str(limit), int(str(value)), str(code), str(guard)))
        return False

    convert_frame.log.addFilter(filtered)
    try:
        yield
    finally:
        convert_frame.log.removeFilter(filtered)
