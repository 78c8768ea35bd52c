"""Show lines to the user on rank 0: through Lightning's logger, and above its progress bars.

A line that is written to a terminal while a bar is on it would be appended to the bar. tqdm's bars are cleared and
redrawn around the line. Rich redirects ``sys.stderr``, but a log handler keeps the stream that it was created with.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only
from tqdm import tqdm


def show_info(line: str) -> None:
    """Log a line for the user at level info. Only rank 0 logs."""
    if getattr(rank_zero_only, "rank", 0) == 0:
        with above_progress_bars():
            rank_zero_info(line)


@contextmanager
def above_progress_bars() -> Iterator[None]:
    """Return a context in which Lightning's log writes above the bars of tqdm and Rich."""
    found = _handlers("lightning.pytorch")
    handlers = [handler for handler in found if type(handler) is logging.StreamHandler]
    with ExitStack() as stack:
        # In this order: a handler, or its stream, may take tqdm's lock while another thread logs.
        for handler in found:
            handler.acquire()
            stack.callback(handler.release)
        # Handlers of other types may clear the bars themselves.
        if handlers:
            stack.enter_context(tqdm.external_write_mode(file=sys.stderr))
        # Rich replaces sys.stderr by an object that knows the stream and writes above the bar.
        if (original := getattr(sys.stderr, "rich_proxied_file", None)) is not None:
            for handler in handlers:
                if handler.stream is original:
                    handler.setStream(sys.stderr)
                    stack.callback(handler.setStream, original)
        yield


def _handlers(name: str) -> list[logging.Handler]:
    """Return the handlers of a logger and its parents."""
    logger: logging.Logger | None = logging.getLogger(name)
    found: list[logging.Handler] = []
    while logger is not None:
        found += logger.handlers
        logger = logger.parent if logger.propagate else None
    return found
