"""What an engine can add to an error on its way to the user."""

from __future__ import annotations

from lightning_zero.engine import Engine
from lightning_zero.sharding.replaced import explain_shard_error

__all__ = ["explain"]


def explain(error: BaseException, engine: Engine) -> None:
    """Adds notes. Not collective."""
    engine.memory.explain(error)
    if engine.module is not None:
        explain_shard_error(error, engine.module, engine.sharder)
